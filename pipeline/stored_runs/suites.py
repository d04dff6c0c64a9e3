"""Runs benchmark tasks of lm-eval on a checkpoint of a run, or on a model's folder (`staleflow eval`)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.stored_runs import suite_process
from staleflow.stores.errors import ConfigError, SuiteFailed, raised_as, strerror
from staleflow.stores.serialization import Codec

CODEC = Codec()
CHECK_LM_EVAL_CODE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """The model, the tasks, and lm-eval's settings."""

    model: str
    """Folder, or name on the hub."""
    tasks: tuple[str, ...]
    include: str = ""
    """Folder of further task files; empty: none."""
    shots: int | None = None
    """Examples in each prompt; None: the task's own number."""
    limit: int | None = None
    """Documents of each task; None: all."""
    chat: bool = False
    """Whether the model's chat template renders the prompts."""
    batch_size: int = 8
    """Prompts in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteMetric:
    """One metric of a task, as lm-eval computes it."""

    task: str
    metric: str
    filter: str
    """How answers were extracted from the text; `none`: not at all."""
    value: float
    stderr: float | None
    num_documents: int | None
    """None for a group of tasks."""
    num_shots: int

    @property
    def label(self) -> str:
        """The metric and how answers were extracted."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"

    @property
    def line(self) -> str:
        """The metric as a line for display."""
        stderr = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        documents = "" if self.num_documents is None else f", {self.num_documents} documents"
        return f"{self.task}: {self.label} {self.value:.4f}{stderr}, {self.num_shots}-shot{documents}"


def as_evaluations(metrics: Sequence[SuiteMetric], settings: SuiteSettings, version: int) -> list[Evaluation]:
    """Metrics as evaluations of a checkpoint. Their names have the settings that they depend on."""
    prompts = ", chat" * settings.chat + (f", first {settings.limit}" if settings.limit else "")
    return [
        Evaluation(
            version=version,
            num_prompts=metric.num_documents or 0,
            sampled=None,
            greedy=metric.value,
            greedy_stderr=metric.stderr,
            name=f"{metric.task} {metric.label}, {metric.num_shots}-shot{prompts}",
            samples=0,
        )
        for metric in metrics
        if math.isfinite(metric.value)
    ]


def check_lm_eval(python: str) -> None:
    """Raise ConfigError if a Python interpreter cannot import lm-eval."""
    with raised_as(ConfigError, f"--python = {python!r}: cannot be run", OSError, describe=strerror):
        process = subprocess.run([python, "-P", "-c", CHECK_LM_EVAL_CODE], check=False)
    if process.returncode:
        raise ConfigError(
            f"{python} has no lm-eval: pip install 'staleflow[eval]', or name the Python of another environment by "
            "--python"
        )


def run_suite(settings: SuiteSettings, python: str) -> list[SuiteMetric]:
    """Run lm-eval tasks on a model. Raises ConfigError if a task or folder does not exist, and SuiteFailed with
    lm-eval's reason if it fails. python: an interpreter that can import lm-eval."""
    if settings.include and not Path(settings.include).is_dir():
        raise ConfigError(f"--include = {settings.include!r}: no such folder")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        process = subprocess.run(
            [python, "-P", suite_process.__file__],
            input=json.dumps(asdict(settings) | {"results": str(file)}).encode(),
            stdout=sys.stderr,
            check=False,
        )
        if not file.is_file():
            raise SuiteFailed(f"lm-eval ended with exit code {process.returncode} and without results")
        results = json.loads(file.read_text())
    if "unknown_task" in results:
        raise ConfigError(
            f"--tasks: lm-eval has no task {results['unknown_task']!r}; `lm-eval ls tasks` lists them, --include adds "
            "a folder"
        )
    if "error" in results:
        raise SuiteFailed(f"lm-eval failed: {results['error']}")
    return CODEC.decode(results, list[SuiteMetric])

"""Runs benchmark tasks of lm-eval on a served checkpoint of a run, or a served model (`staleflow eval`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path

from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.stored_runs import suite_process
from staleflow.pipeline.stored_runs.completions_probe import PROBE_TEXT, CompletionsServer, find_problem, model_name
from staleflow.pipeline.stored_runs.serving import ServingPlan
from staleflow.stores.errors import ConfigError, SuiteFailed, raised_as, strerror
from staleflow.stores.serialization import Codec
from staleflow.tasks.rendering.chat_tokenizer import load_chat_tokenizer
from staleflow.tasks.settings.endpoint_settings import EndpointConfig

CODEC = Codec()
CHECK_LM_EVAL_CODE = (
    "import importlib.util, sys; names = ('lm_eval', 'transformers', 'aiohttp', 'requests', 'tenacity'); "
    "sys.exit(any(importlib.util.find_spec(name) is None for name in names))"
)
"""Exits with 1 where lm-eval, or what it needs to call a server, is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """The tasks, and lm-eval's settings."""

    tasks: tuple[str, ...]
    include: str = ""
    """Folder of further task files; empty: none."""
    shots: int | None = None
    """Examples in each prompt; None: the task's own number."""
    limit: int | None = None
    """Documents of each task; None: all."""
    chat: bool = False
    """Whether the model's chat template renders the prompts."""


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
    """None if lm-eval gives none."""
    num_shots: int | None
    """Examples in each prompt; None if they differ within a group of tasks."""

    @property
    def label(self) -> str:
        """The metric and how answers were extracted."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"

    @property
    def shots_text(self) -> str:
        """The number of examples in each prompt as text."""
        return "several shots" if self.num_shots is None else f"{self.num_shots}-shot"

    @property
    def line(self) -> str:
        """The metric as a line for display."""
        stderr = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        documents = "" if self.num_documents is None else f", {self.num_documents} documents"
        return f"{self.task}: {self.label} {self.value:.4f}{stderr}, {self.shots_text}{documents}"


def as_evaluations(metrics: Sequence[SuiteMetric], settings: SuiteSettings, version: int) -> list[Evaluation]:
    """Metrics as evaluations of a checkpoint. Their names have the settings that they depend on."""
    prompts = ", chat" * settings.chat + (f", first {settings.limit}" if settings.limit else "")
    if settings.include:  # whose tasks may have the names of others
        prompts += f", with {Path(settings.include).resolve().name}"
    several = "several shots" if settings.shots is None else f"--shots {settings.shots} as far as tasks take them"
    return [
        Evaluation(
            version=version,
            num_prompts=metric.num_documents or 0,
            sampled=None,
            greedy=metric.value,
            greedy_stderr=metric.stderr,
            name=f"{metric.task} {metric.label}, {several if metric.num_shots is None else metric.shots_text}{prompts}",
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


async def evaluate_plan(
    plan: ServingPlan, settings: SuiteSettings, python: str, *, url: str = "", key: str = ""
) -> list[SuiteMetric]:
    """Serve a model, check the server, and run lm-eval tasks on it. url: a server that serves the model already, with
    this API key. Raises ConfigError, also if that server's figures would be wrong, and SuiteFailed."""
    if settings.include and not Path(settings.include).is_dir():
        raise ConfigError(f"--include = {settings.include!r}: no such folder")
    async with contextlib.AsyncExitStack() as stack:
        if not url:
            key = secrets.token_urlsafe(24)
            url = (await stack.enter_async_context(plan.serve(EndpointConfig(), key))).base_url
            error_type: type[Exception] = SuiteFailed
        else:
            error_type = ConfigError
        url = url.rstrip("/")
        with raised_as(
            error_type, f"{url}: it lists no model", OSError, HTTPException, ValueError, LookupError, TypeError
        ):
            model = await asyncio.to_thread(model_name, url, key)
        server = CompletionsServer(
            url=url,
            key=key,
            model=model,
            tokenizer=plan.config.model.path,
            context=plan.context,
            concurrency=plan.config.rollout.engine.max_running,
        )
        prompt = load_chat_tokenizer(server.tokenizer).ids(PROBE_TEXT)[: server.context // 2]
        if problem := await asyncio.to_thread(find_problem, server, prompt):
            raise error_type(f"{server.url}: {problem}; no task was run")
        return await run_suite(settings, server, python)


async def run_suite(settings: SuiteSettings, server: CompletionsServer, python: str) -> list[SuiteMetric]:
    """Run lm-eval tasks on a served model. Raises ConfigError if a task cannot be run, and SuiteFailed with lm-eval's
    reason if it fails. python: an interpreter that can import lm-eval."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        job = asdict(settings) | {"server": asdict(server) | {"key": ""}, "results": str(file)}
        process = await asyncio.create_subprocess_exec(
            python, "-P", suite_process.__file__, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr,
            env={**os.environ, "OPENAI_API_KEY": server.key},
        )  # fmt: skip
        try:
            await process.communicate(json.dumps(job).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not file.is_file():
            raise SuiteFailed(f"lm-eval ended with exit code {process.returncode} and without results")
        results = json.loads(file.read_text("utf-8"))
    if "refusal" in results:
        raise ConfigError(results["refusal"])
    if "error" in results:
        raise SuiteFailed(f"lm-eval failed: {results['error']}")
    return CODEC.decode(results, list[SuiteMetric])

"""Code and data of the user's own that a job names by file: located, checked, and made to travel with the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pipeline.config.deciding import make_strategies
from pipeline.config.schema import RunConfig
from stores.errors import ConfigError
from tasks.training.advantage import ADVANTAGES
from tasks.training.loss import LOSSES

CODE = (
    "task.source",
    "reward.function",
    "tracking.tracker",
    "rollout.routing",
    "training.advantage",
    "training.loss.name",
)
"""Where a job may name code of its user's own by file."""
RULES = ("rollout.routing", "training.advantage", "training.loss.name")
"""Those of which a run keeps a copy in its folder: replayed or resumed, it goes by what it began with."""
SCORING = ("task.source", "reward.function")
"""Those by which responses are scored."""


def located(config: RunConfig) -> RunConfig:
    """The same job with absolute paths: workers of a cluster have working folders of their own."""
    for key in CODE:
        file, name = _named(config, key)
        if file:
            config = _set(config, key, f"{Path(file).resolve()}:{name}")
    if Path(config.model.path).is_dir():
        config = _set(config, "model.path", str(Path(config.model.path).resolve()))
    kind, _, data = config.task.source.partition(":")
    if kind == "jsonl":
        config = _set(config, "task.source", f"jsonl:{Path(data).resolve()}")
    if config.workload.run:
        config = _set(config, "workload.run", str(Path(config.workload.run).resolve()))
    return _set(config, "runs_dir", str(Path(config.runs_dir).resolve()))


def placed(config: RunConfig, run_dir: Path) -> RunConfig:
    """The same job in another folder."""
    return dataclasses.replace(config, runs_dir=str(run_dir.parent), name=run_dir.name)


def check(config: RunConfig) -> None:
    """Load and make once what the job names by file to decide and to train with. Raises ConfigError."""
    make_strategies(config)
    ADVANTAGES.load(config.training.advantage)
    LOSSES.make(config.training.loss)


def with_code(config: RunConfig, keys: Sequence[str] = CODE) -> tuple[RunConfig, dict[str, str]]:
    """The job with the code of these keys named by file name only, and that code by file name. Raises ConfigError if it
    cannot be read."""
    code: dict[str, str] = {}
    for key in keys:
        file, name = _named(config, key)
        if file:
            prefix = key.split(".")[-2] + "_"
            travels = prefix + Path(file).name.removeprefix(prefix)
            try:
                code[travels] = Path(file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{key} = {_get(config, key)!r}: cannot be read: {error}") from error
            config = _set(config, key, f"{travels}:{name}")
    return config, code


def with_code_in(config: RunConfig, folder: Path, code: Mapping[str, str]) -> RunConfig:
    """The job with such code named where it lies in `folder`."""
    for key in CODE:
        file, name = _named(config, key)
        if file in code:
            config = _set(config, key, f"{folder / file}:{name}")
    return config


def write_code(folder: Path, code: Mapping[str, str]) -> None:
    """Write code by file name. Raises OSError."""
    for name, text in code.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _named(config: RunConfig, key: str) -> tuple[str, str]:
    """The file that a key names, and what of it; empty if it names none."""
    file, _, name = _get(config, key).rpartition(":")
    return (file, name) if file.endswith(".py") else ("", "")


def _get(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _set(config: RunConfig, key: str, value: str) -> RunConfig:
    changed: RunConfig = _replaced(config, key.split("."), value)
    return changed


def _replaced(node: Any, path: Sequence[str], value: str) -> Any:
    first, *rest = path
    return dataclasses.replace(node, **{first: _replaced(getattr(node, first), rest, value) if rest else value})

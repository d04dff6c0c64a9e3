"""Code and data of the user's own that a job names by file: located, and made to travel with a submitted job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.config.schema import RunConfig
from stores.errors import ConfigError


def located(config: RunConfig) -> RunConfig:
    """The same job with absolute paths: workers of a cluster have working folders of their own."""
    model, task, reward = config.model, config.task, config.reward
    kind, _, name = task.source.rpartition(":") if ".py:" in task.source else task.source.partition(":")
    file, _, function = reward.function.rpartition(":")
    if Path(model.path).is_dir():
        model = dataclasses.replace(model, path=str(Path(model.path).resolve()))
    if kind.endswith(".py"):
        task = dataclasses.replace(task, source=f"{Path(kind).resolve()}:{name}")
    if kind == "jsonl":
        task = dataclasses.replace(task, source=f"jsonl:{Path(name).resolve()}")
    workload = config.workload
    if workload.run:
        workload = dataclasses.replace(workload, run=str(Path(workload.run).resolve()))
    if file.endswith(".py"):
        reward = dataclasses.replace(reward, function=f"{Path(file).resolve()}:{function}")
    tracking = config.tracking
    file, _, name = tracking.tracker.rpartition(":")
    if file.endswith(".py"):
        tracking = dataclasses.replace(tracking, tracker=f"{Path(file).resolve()}:{name}")
    runs_dir = str(Path(config.runs_dir).resolve())
    return dataclasses.replace(
        config, model=model, task=task, reward=reward, tracking=tracking, workload=workload, runs_dir=runs_dir
    )


def placed(config: RunConfig, run_dir: Path) -> RunConfig:
    """The same job in another folder."""
    return dataclasses.replace(config, runs_dir=str(run_dir.parent), name=run_dir.name)


CODE = (("task", "source"), ("reward", "function"), ("tracking", "tracker"))
"""Where a job may name code of its user's own by file."""


def with_code(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """The job with its own code named by file name only, and that code by file name. Raises ConfigError if it cannot be
    read."""
    code: dict[str, str] = {}
    for table, key in CODE:
        section = getattr(config, table)
        file, _, name = getattr(section, key).rpartition(":")
        if file.endswith(".py"):
            kept = Path(file).parent == config.run_dir / "code"  # it has travelled with the run before
            travels = Path(file).name if kept else f"{table}_{Path(file).name}"
            try:
                code[travels] = Path(file).read_text()
            except OSError as error:
                raise ConfigError(f"{table}.{key} = {getattr(section, key)!r}: cannot be read: {error}") from error
            config = dataclasses.replace(config, **{table: dataclasses.replace(section, **{key: f"{travels}:{name}"})})
    return config, code

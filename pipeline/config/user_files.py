"""User code and data that a job names by file: made absolute, and sent along with a submitted job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.config.schema import RunConfig
from stores.errors import ConfigError


def located(config: RunConfig) -> RunConfig:
    """The job with absolute paths, since a cluster's workers have other working directories."""
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
    """The job in another run folder."""
    return dataclasses.replace(config, runs_dir=str(run_dir.parent), name=run_dir.name)


CODE = (("task", "source"), ("reward", "function"), ("tracking", "tracker"))
"""Keys of a job that may name user code by file."""


def with_code(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """The job with user code named by file name only, and that code by file name. Raises ConfigError for an unreadable
    file."""
    code: dict[str, str] = {}
    for table, key in CODE:
        section = getattr(config, table)
        file, _, name = getattr(section, key).rpartition(":")
        if file.endswith(".py"):
            sent_before = Path(file).parent == config.run_dir / "code"  # sent along at an earlier submission
            sent_as = Path(file).name if sent_before else f"{table}_{Path(file).name}"
            try:
                code[sent_as] = Path(file).read_text()
            except OSError as error:
                raise ConfigError(f"{table}.{key} = {getattr(section, key)!r}: cannot be read: {error}") from error
            config = dataclasses.replace(config, **{table: dataclasses.replace(section, **{key: f"{sent_as}:{name}"})})
    return config, code

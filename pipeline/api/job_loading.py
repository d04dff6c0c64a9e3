"""Jobs as Python callers describe them: a job file, a mapping or a Job, with functions, classes and rows in them."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from staleflow.pipeline.api.code_objects import write_code
from staleflow.pipeline.api.overrides import Overrides, override_lines
from staleflow.pipeline.api.rows import write_rows
from staleflow.pipeline.config import knob_tree, loading, preflight, session_files, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import resumption
from staleflow.pipeline.recovery.run_folder import refuse_locked, require_unused_name
from staleflow.stores.errors import ConfigError

logger = logging.getLogger(__name__)

Job = RunConfig
"""A job: the frozen tree of all its settings, as a job file names them. `load_job` makes one."""
JobSource = str | Path | Mapping[str, Any] | Job
"""What a job is made from: the path of a job file, a nested mapping as in a job file, or a Job."""
OBJECTS = {
    "reward": "reward.function",
    "loss": "training.loss.name",
    "advantage": "training.advantage",
    "routing": "rollout.routing",
    "source": "task.source",
    "agent": "task.source",
    "tools": "environment.tools",
    "tracker": "tracking.tracker",
    "rows": "task.source",
    "eval_rows": "task.eval_source",
}
"""Keys of a job that functions, classes and rows are given for, by the name of their argument."""


class JobObjects(TypedDict, total=False):
    """Functions, classes and rows in place of what a job names; each may also be a name, as in a job file."""

    loss: Callable[..., Any] | str
    """A class as in docs/extending.md, "A loss with a knob"."""
    advantage: Callable[..., Any] | str
    """A function of rewards and their validity, both [groups, members]."""
    routing: Callable[..., Any] | str
    """A class as in docs/extending.md, "A routing rule"."""
    source: Callable[..., Any] | str
    """A source of prompts, or an environment of many turns: a class or a coroutine."""
    agent: Callable[..., Any] | str
    """A function that asks for the model's turns over HTTP."""
    tools: Sequence[Callable[..., Any] | str]
    """Functions that the model may call."""
    tracker: Callable[..., Any] | str
    """A class that receives the metrics of each step."""
    eval_rows: Any
    """Held-out rows, as `rows`."""


WITH_KNOBS = ("loss", "routing")
"""Those whose classes may have knobs."""


def load_job(source: JobSource, overrides: Overrides | None = None) -> Job:
    """Load and check a job.

    Args:
        source: The path of a job file, a nested mapping as in a job file, or a Job. In a mapping a function or class
            may stand wherever a job file names one as `path/to/file.py:NAME`.
        overrides: Values that replace the job's: a mapping such as `{"training.learning_rate": 1e-4}`, or texts
            `key=value` as after `--set`. A table replaces the job's whole table: set single keys as `"task.source"`.

    Returns:
        The job, frozen; `job.run_dir` is the folder of its run.

    Raises:
        ConfigError: The job cannot be read, or has a mistake; the message names the key, the value and the limit.
    """
    if isinstance(source, Job):
        tree, where = tomllib.loads(knob_tree.to_toml(source)), "job"
    elif isinstance(source, Mapping):
        tree, where = _plain_table(source), "job"
    elif isinstance(source, (str, Path)):
        tree, where = loading.read_tree(source), str(source)
    else:
        raise ConfigError(f"job: a {type(source).__name__}; expected the path of a job file, a mapping or a Job")
    return loading.from_tree_with_overrides(tree, override_texts(overrides), where)


def override_texts(overrides: Overrides | None) -> tuple[str, ...]:
    """Overrides as texts `key=value`, with functions and classes named by their files. Raises ConfigError."""
    if isinstance(overrides, Mapping):
        overrides = {key: _plain(key, value) for key, value in overrides.items()}
    return override_lines(overrides)


def new_job(job: Job) -> Job:
    """The job of a new run, with absolute paths. Raises ConfigError, also if the name of its run is taken."""
    preflight.check_names(job)
    job = user_files.with_absolute_paths(job)
    require_unused_name(job.run_dir)
    return job


def resumable_job(run_dir: Path, overrides: Overrides | None = None) -> Job:
    """The job of a stored run that can be resumed, with absolute paths; a note is logged if its learning rate has
    reached its end before. Raises ConfigError if there is none, nothing is left to do, or a value cannot be changed."""
    refuse_locked(run_dir)  # first: points of a run in progress come and go
    config = resumption.load(run_dir, override_texts(overrides))
    if note := resumption.schedule_note(config):
        logger.warning(note)
    resumption.resume_version(config)
    return user_files.with_absolute_paths(config)


def with_objects(source: JobSource, overrides: Overrides | None, objects: Mapping[str, Any]) -> Job:
    """A job in which functions, classes and rows replace what its keys name.

    Args:
        source: As in `load_job`.
        overrides: As in `load_job`.
        objects: By the names of `OBJECTS`; None changes nothing. A text is a name as in a job file. A mapping as
            `reward` names the parts of a weighted sum.

    Raises:
        ConfigError: An object has no such key, or cannot be pickled, or the job has a mistake.
    """
    changes: dict[str, Any] = {}
    for name, value in objects.items():
        if name not in OBJECTS:
            raise ConfigError(f"{name}: no such argument; there are {', '.join(OBJECTS)}")
        if value is None:
            continue
        key = OBJECTS[name]
        if key in changes:
            raise ConfigError(f"{name} and another argument both set {key}; give one of them")
        if name in ("rows", "eval_rows"):
            path = session_files.new_folder() / f"{name}.jsonl"
            write_rows(value, path)
            changes |= {key: f"jsonl:{path}", key.replace("source", "options"): {}}
        elif name == "reward" and isinstance(value, Mapping):
            changes |= {
                key: "task",
                "reward.parts": {
                    part: table if isinstance(table, Mapping) else {"function": table} for part, table in value.items()
                },
            }
        elif not callable(value) and not isinstance(value, (str, Path, Mapping, list, tuple)):
            knobs = f"; set its knobs by overrides, as {key.removesuffix('.name')}.KNOB" if name in WITH_KNOBS else ""
            raise ConfigError(
                f"{name}: a {type(value).__name__}; expected a function, a class, or a name as in a job file{knobs}"
            )
        else:
            changes[key] = _plain(name, value)
            if name == "agent" and callable(value):
                changes[key] = f"agent:{changes[key]}"
            if name == "reward":
                changes["reward.parts"] = {}
    return load_job(source, (*override_texts(changes), *override_texts(overrides)))


def _plain_table(table: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _plain(str(key), value) for key, value in table.items()}


def _plain(key: str, value: Any) -> Any:
    """A value as a job file has it: functions and classes named by the files that they are written to. Raises
    ConfigError."""
    if isinstance(value, Mapping):
        return _plain_table(value)
    if isinstance(value, (list, tuple)):
        return [_plain(key, entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return _named(value, key.rpartition(".")[2])
    if value is None:
        raise ConfigError(f"{key} = None: leave it out for its default")
    return value.item() if hasattr(value, "item") else value  # a number of numpy


def _named(value: Callable[..., Any], name: str) -> str:
    called = str(getattr(value, "__name__", name))
    return write_code(value, session_files.new_folder(), called if called.isidentifier() else name)

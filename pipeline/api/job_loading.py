"""Loads jobs in the forms that Python callers use: a job file, a mapping or a Job, which may contain functions, classes
and rows."""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from staleflow.pipeline.api.code_objects import write_code
from staleflow.pipeline.config import knob_tree, loading, preflight, user_files
from staleflow.pipeline.config.knob_tree import Overrides, override_lines
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.task_tables import with_named_tasks
from staleflow.pipeline.recovery import resumption
from staleflow.pipeline.recovery.run_folder import require_unlocked, require_unused_name
from staleflow.stores.errors import ConfigError
from staleflow.stores.files import replace_text

logger = logging.getLogger(__name__)

Job = RunConfig
"""A job: the frozen tree of all settings of a job file. Created by `load_job`."""
JobSource = str | Path | Mapping[str, Any] | Job
"""The forms of a job: the path of a job file, a nested mapping as in a job file, or a Job."""
OBJECT_KEYS = {
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
"""The job's key that an argument with a function, class or rows sets, by the argument's name."""


class JobObjects(TypedDict, total=False):
    """Functions, classes and rows that replace names in a job. Each may also be a name, as in a job file."""

    loss: Callable[..., Any] | str
    """A class as in docs/extending.md, "A loss with a knob"."""
    advantage: Callable[..., Any] | str
    """A function of rewards and their validity, both [groups, members]."""
    routing: Callable[..., Any] | str
    """A class as in docs/extending.md, "A routing rule"."""
    source: Callable[..., Any] | str
    """A source of prompts, or an environment of several turns: a class or a coroutine function."""
    agent: Callable[..., Any] | str
    """A function that requests the model's turns over HTTP."""
    tools: Sequence[Callable[..., Any] | str]
    """Functions that the model may call."""
    tracker: Callable[..., Any] | str
    """A class that receives the metrics of each step."""
    eval_rows: Any
    """Held-out rows, as `rows`."""


OBJECTS_WITH_KNOBS = ("loss", "routing")
"""Arguments whose classes may have knobs."""


def load_job(source: JobSource, overrides: Overrides | None = None) -> Job:
    """Load and check a job.

    Args:
        source: The path of a job file, a nested mapping as in a job file, or a Job. A mapping may contain a function or
            class where a job file has its name, `path/to/file.py:NAME`.
        overrides: Values that replace the job's: a mapping such as `{"training.learning_rate": 1e-4}`, or texts
            `key=value` as for `--set`. A table replaces the job's whole table; set single keys as `"task.source"`.

    Returns:
        The job, frozen; `job.run_dir` is the folder of its run.

    Raises:
        ConfigError: The job cannot be read, or has a mistake; the message names the key, the value and the limit.
    """
    if isinstance(source, Job):
        tree, label = tomllib.loads(knob_tree.to_toml(source)), "job"
    elif isinstance(source, Mapping):
        tree, label = with_named_tasks(_to_job_table(source), "job"), "job"
    elif isinstance(source, (str, Path)):
        tree, label = loading.read_tree(source), str(source)
    else:
        raise ConfigError(f"job: a {type(source).__name__}; expected the path of a job file, a mapping or a Job")
    return loading.from_tree_with_overrides(tree, override_texts(overrides), label)


def override_texts(overrides: Overrides | None) -> tuple[str, ...]:
    """Overrides as texts `key=value`. Functions and classes are replaced by the names of their files. Raises
    ConfigError."""
    if isinstance(overrides, Mapping):
        overrides = {key: _to_job_value(key, value) for key, value in overrides.items()}
    return override_lines(overrides)


def prepare_job(job: Job) -> Job:
    """The job of a new run, with absolute paths. Raises ConfigError, also if the name of its run is taken."""
    preflight.check_names(job)
    job = user_files.with_absolute_paths(job)
    require_unused_name(job.run_dir)
    return job


def load_resumable_job(run_dir: Path, overrides: Overrides | None = None) -> Job:
    """The job of a stored run that can be resumed, with absolute paths. Logs a note if its learning rate reaches its
    end before the run does. Raises ConfigError if there is no such run, nothing is left to do, or a value cannot be
    changed."""
    require_unlocked(run_dir)  # first, because the resume points of a running run change
    config = resumption.load(run_dir, override_texts(overrides))
    if note := resumption.schedule_note(config):
        logger.warning(note)
    resumption.find_resume_version(config)
    return user_files.with_absolute_paths(config)


def with_objects(source: JobSource, overrides: Overrides | None, objects: Mapping[str, Any]) -> Job:
    """A copy of a job in which functions, classes and rows replace the values of their keys.

    Args:
        source: As in `load_job`.
        overrides: As in `load_job`.
        objects: By the names of `OBJECT_KEYS`; None changes nothing. A text is a name as in a job file. A mapping as
            `reward` names the parts of a weighted sum.

    Raises:
        ConfigError: An object has no such key, or cannot be pickled, or the job has a mistake.
    """
    changes: dict[str, Any] = {}
    for name, value in objects.items():
        if name not in OBJECT_KEYS:
            raise ConfigError(f"{name}: no such argument; there are {', '.join(OBJECT_KEYS)}")
        if value is None:
            continue
        key = OBJECT_KEYS[name]
        if key in changes:
            raise ConfigError(f"{name} and another argument both set {key}; give one of them")
        if name in ("rows", "eval_rows"):
            path = user_files.new_temporary_folder() / f"{name}.jsonl"
            write_rows(value, path, name)
            changes |= {key: f"jsonl:{path}", key.replace("source", "options"): {}}
        elif name == "reward" and isinstance(value, Mapping):
            changes |= {
                key: "task",
                "reward.parts": {
                    part: table if isinstance(table, Mapping) else {"function": table} for part, table in value.items()
                },
            }
        elif not callable(value) and not isinstance(value, (str, Path, Mapping, list, tuple)):
            knobs = (
                f"; set its knobs by overrides, as {key.removesuffix('.name')}.KNOB"
                if name in OBJECTS_WITH_KNOBS
                else ""
            )
            raise ConfigError(
                f"{name}: a {type(value).__name__}; expected a function, a class, or a name as in a job file{knobs}"
            )
        else:
            changes[key] = _to_job_value(name, value)
            if name == "agent" and callable(value):
                changes[key] = f"agent:{changes[key]}"
            if name == "reward":
                changes["reward.parts"] = {}
    return load_job(source, (*override_texts(changes), *override_texts(overrides)))


def _to_job_table(table: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _to_job_value(str(key), value) for key, value in table.items()}


def _to_job_value(key: str, value: Any) -> Any:
    """Convert a value to the form of a job file: functions and classes are written to files and replaced by their
    names. Raises ConfigError."""
    if isinstance(value, Mapping):
        return _to_job_table(value)
    if isinstance(value, (list, tuple)):
        return [_to_job_value(key, entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return _write_code_file(value, key.rpartition(".")[2])
    if value is None:
        raise ConfigError(f"{key} = None: leave it out for its default")
    return value.tolist() if hasattr(value, "tolist") else value  # of numpy


def _write_code_file(value: Callable[..., Any], name: str) -> str:
    own_name = str(getattr(value, "__name__", name))
    return write_code(value, user_files.new_temporary_folder(), own_name if own_name.isidentifier() else name)


def write_rows(rows: Any, path: Path, name: str) -> None:
    """Write rows as JSON lines.

    Args:
        rows: Mappings from column to value, a pandas.DataFrame, or a datasets.Dataset. A value is a text, a number, a
            list or a mapping.
        path: The file.
        name: The argument's name, for messages.

    Raises:
        ConfigError: There is no row, one is not a mapping, or a value cannot be written as JSON.
        StoreError: The file cannot be written.
    """
    lines = []
    for number, row in enumerate(_rows(rows, name)):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name}: row {number} is a {type(row).__name__}; each must be a mapping, such as "
                '{"prompt": ..., "answer": ...}'
            )
        try:
            lines.append(json.dumps({str(column): value for column, value in row.items()}, default=_json_value))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: row {number} cannot be written as JSON: {error}; use plain values") from error
    if not lines:
        raise ConfigError(f"{name}: there are none")
    replace_text(path, "\n".join(lines) + "\n", "free space in the temporary folder")


def _rows(rows: Any, name: str) -> Iterable[Any]:
    """The rows of a table or iterable, one by one. Raises ConfigError."""
    if type(rows).__module__.partition(".")[0] == "pandas":
        return (
            {column: value for column, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
            for row in rows.to_dict("records")
        )
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise ConfigError(
            f"{name}: a {type(rows).__name__}; expected a list of mappings, a pandas.DataFrame or a datasets.Dataset"
        )
    return rows


def _json_value(value: Any) -> Any:
    """A value of numpy, pandas or the standard library as JSON knows it. Raises TypeError."""
    for convert in ("tolist", "isoformat"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"{value!r} is a {type(value).__name__}")

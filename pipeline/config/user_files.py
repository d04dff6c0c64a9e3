"""Files that a job names: user code, data sets, models and others. Makes their paths absolute, checks user code by
loading it, and collects code for a submission and for the run's folder.

Code and rows passed as Python objects are files in a temporary folder of this process. A run copies those of its job,
because the folder is deleted when the process ends.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from staleflow.pipeline.config.factories import make_strategies
from staleflow.pipeline.config.knob_tree import value_at, with_values
from staleflow.pipeline.config.schema import TRACKERS, RunConfig
from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.user_tools import TOOLS_KEY
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.source_kinds import SourceType, is_environment, is_installed, kind_of
from staleflow.tasks.training.advantage import ADVANTAGES
from staleflow.tasks.training.loss import LOSSES

CODE_KEYS = (
    "task.source",
    "task.eval_source",
    "task.sampler.name",
    "reward.function",
    "tracking.tracker",
    "rollout.routing.name",
    "training.advantage.name",
    "training.loss.name",
    "training.sft.source",
)
"""Keys of a job that may name user code by file."""
TASK_SOURCE_CODE_KEYS = ("source", "eval_source", "reward", "sampler.name")
"""Keys of one of several task sources that may name user code by file."""
COPIED_KEY_ENDS = (".sampler.name", "rollout.routing.name", "training.advantage.name", "training.loss.name")
"""Ends of keys whose code a run copies into its folder: replays and resumes use the code it started with."""
MODEL_KEYS = ("model.path", "training.kl.reference")
"""Keys that may name a model's folder."""
DATA_KEYS = ("task.source", "task.eval_source", "training.sft.source")
"""Keys that may name a data set."""
TLS_KEYS = ("endpoint.tls_cert", "endpoint.tls_key")
"""Keys that may name a file of the endpoint's certificate."""
OTHER_PATH_KEYS = ("workload.run", "cluster.scheduler_file", *TLS_KEYS)
"""Keys that may name another file or folder."""


def code_keys_of(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of a job that may name user code."""
    tool_keys = (f"{TOOLS_KEY}.{i}" for i in range(len(config.environment.tools)))
    source_keys = (f"task.sources.{name}.{key}" for name in config.task.sources for key in TASK_SOURCE_CODE_KEYS)
    reward_keys = (f"reward.parts.{name}.function" for name in config.reward.parts)
    set_keys = (f"evaluation.sets.{name}.{key}" for name in config.evaluation.sets for key in ("source", "reward"))
    return (*CODE_KEYS, *reward_keys, *tool_keys, *set_keys, *source_keys)


def scoring_code_keys(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of a job whose user code scores responses, or describes tools in their prompts."""
    return tuple(key for key in code_keys_of(config) if key.startswith(("task.", "reward.", "evaluation.", TOOLS_KEY)))


def copied_code_keys(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of a job whose user code is copied into the run folder: rules, and code passed as Python
    objects."""
    return tuple(
        key
        for key in code_keys_of(config)
        if key.endswith(COPIED_KEY_ENDS) or is_temporary(Path(_code_reference(config, key)[0]))
    )


def data_files(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """Yield (key, kind, path) of each data set of the job that is a file or folder, also of the option `rows` of an
    environment whose tasks are rows."""
    set_keys = (f"evaluation.sets.{name}.source" for name in config.evaluation.sets)
    source_keys = (f"task.sources.{name}.{key}" for name in config.task.sources for key in ("source", "eval_source"))
    for source_key in (*DATA_KEYS, *set_keys, *source_keys):
        key, source = source_key, value_at(config, source_key)
        if takes_rows(source):
            key = f"{source_key.removesuffix('source')}options"
            key, source = f"{key}.rows", str(value_at(config, key).get("rows", ""))
        kind, path = split_data_source(source)
        if path is not None:
            yield key, kind, path


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make all paths of a job absolute, because workers of a cluster have other working directories. Resolves
    task.multi_turn = "auto", which loads user code."""
    for key in code_keys_of(config):
        file, name = _code_reference(config, key)
        if file:
            config = _set_code_reference(config, key, str(Path(file).resolve()), name)
    config = with_absolute_models(config)
    for key, kind, path in data_files(config):
        config = with_values(config, {key: f"{kind}:{path.resolve()}"})
    for key in OTHER_PATH_KEYS:
        if path := value_at(config, key):
            config = with_values(config, {key: str(Path(path).resolve())})
    return with_values(with_multi_turn(config), {"runs_dir": str(Path(config.runs_dir).resolve())})


def with_absolute_models(config: RunConfig) -> RunConfig:
    """Make the paths of a job's model folders absolute."""
    for key in MODEL_KEYS:
        if (path := value_at(config, key)) and Path(path).is_dir():
            config = with_values(config, {key: str(Path(path).resolve())})
    return config


def with_multi_turn(config: RunConfig) -> RunConfig:
    """Resolve task.multi_turn = "auto" to yes or no by loading the user code that task sources name. Leaves it
    unchanged if none that can be loaded on this machine has turns, and another cannot be loaded."""
    if config.task.multi_turn != "auto" or not config.has_texts:
        return config
    if not (has_turns := config.has_environment):  # which is also False if a source cannot be loaded
        try:
            for task in config.task.sources_by_name.values():
                is_environment(task.source, "task.source")
        except ConfigError:
            return config
    return with_values(config, {"task.multi_turn": "yes" if has_turns else "no"})


def takes_rows(source: str) -> bool:
    """Whether the tasks of a source are rows of the data set in its option `rows`."""
    kind = kind_of(source)
    return kind is not None and kind.takes_rows


def split_data_source(source: str) -> tuple[str, Path | None]:
    """Split a task source into (kind, path) of its data set. No path: not a local file, such as a data set on the hub.
    Empty kind: not a data set."""
    kind, path = kind_of(source), Path(os.path.expanduser(source.partition(":")[2]))
    if kind is None or kind.type is not SourceType.ROWS:
        return "", None
    return kind.name, path if kind.name_is_path or path.exists() else None


def split_code_reference(reference: str) -> tuple[str, str, str]:
    """Split a reference to user code into (prefix, file or module, name). The prefix, such as `agent:` in
    agent:FILE.py:NAME, is empty except for task sources of a kind."""
    kind = kind_of(reference)
    prefix = f"{kind.name}:" if kind is not None and kind.name_is_code else ""
    location, _, name = reference.removeprefix(prefix).rpartition(":")
    return prefix, location, name


def with_run_dir(config: RunConfig, run_dir: Path) -> RunConfig:
    """Set the run folder of a job."""
    return dataclasses.replace(config, runs_dir=str(run_dir.parent), name=run_dir.name)


def check_user_code(config: RunConfig) -> None:
    """Check the user code of a job's rules, losses, advantage and tracker by loading it. Raises ConfigError.

    Rules and losses are constructed; the advantage is computed on rewards of a batch's shape.
    """
    make_strategies(config)
    if config.tracking.tracker:
        check_tracker(config.tracking.tracker)
    rewards = np.tile(np.linspace(0.0, 1.0, config.batch.group_size), (config.batch.groups_per_step, 1))
    ADVANTAGES.make(config.training.advantage).advantages(rewards, np.ones(rewards.shape, np.bool_))
    LOSSES.make(config.training.loss)


def check_tracker(reference: str) -> None:
    """Raise ConfigError if a tracker's package is not installed, or its class cannot be loaded or lacks a method."""
    if reference not in TRACKERS:
        tracker = user_code.load(reference, "tracking.tracker")
        if isinstance(tracker, type):
            require_tracker_methods(tracker, reference)
    elif not is_installed(reference):
        raise ConfigError(
            f"tracking.tracker = {reference!r}: the package is not installed; pip install 'staleflow[{reference}]'"
        )


def require_tracker_methods(tracker: object, name: str) -> None:
    """Raise ConfigError if a tracker or its class lacks a method that a run calls."""
    if missing := [name for name in ("step", "close") if not callable(getattr(tracker, name, None))]:
        raise ConfigError(
            f"tracking.tracker = {name!r}: has no method {' and no '.join(missing)}; a tracker has "
            "step(step, metrics) and close()"
        )


def collect_code(config: RunConfig, keys: Sequence[str] | None = None) -> tuple[RunConfig, dict[str, str]]:
    """Collect the user code of these keys (by default all) and rows of Python objects. Returns the job with references
    by file name only, and the contents of the files by name. Raises ConfigError for an unreadable file."""
    code: dict[str, str] = {}
    for key in code_keys_of(config) if keys is None else keys:
        file, name = _code_reference(config, key)
        if file:
            prefix = key.split(".")[-2 if key in CODE_KEYS else 0] + "_"
            file_name = prefix + Path(file).name.removeprefix(prefix)
            text = _read_file_at(config, key, Path(file))
            while code.setdefault(file_name, text) != text:  # files of one name, from two folders
                file_name = f"{prefix}{file_name}"
            config = _set_code_reference(config, key, file_name, name)
    for key, kind, path in data_files(config):
        if is_temporary(path):
            code[path.name] = _read_file_at(config, key, path)
            config = with_values(config, {key: f"{kind}:{path.name}"})
    return config, code


def _read_file_at(config: RunConfig, key: str, path: Path) -> str:
    """Read the file that a key of the job names. Raises ConfigError."""
    with raised_as(ConfigError, f"{key} = {value_at(config, key)!r}: cannot be read", OSError, UnicodeDecodeError):
        return path.read_text("utf-8")


def with_code_in(config: RunConfig, folder: Path, code: Mapping[str, str]) -> RunConfig:
    """Return the job with its user code and rows referenced by their paths in `folder`."""
    for key in code_keys_of(config):
        file, name = _code_reference(config, key)
        if file in code:
            config = _set_code_reference(config, key, str(copied_path(folder, file)), name)
    for key, kind, path in data_files(config):
        if str(path) in code:
            config = with_values(config, {key: f"{kind}:{copied_path(folder, str(path))}"})
    return config


def with_copied_code(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the job with references to its run folder's copies of code and rows, and their contents by name. Raises
    ConfigError for an unreadable file."""
    config, code = collect_code(config, copied_code_keys(config))
    return with_code_in(config, config.run_dir / "code", code), code


def copied_path(folder: Path, name: str) -> Path:
    """Return the path of a run's copy of a file of its job: code in `folder`, the run's code folder, rows in its
    parent."""
    return folder / name if name.endswith(".py") else folder.parent / name


def _code_reference(config: RunConfig, key: str) -> tuple[str, str]:
    """Return the file of user code at a key, and the name within it; both empty if there is none."""
    _, file, name = split_code_reference(value_at(config, key))
    return (file, name) if file.endswith(".py") else ("", "")


def _set_code_reference(config: RunConfig, key: str, file: str, name: str) -> RunConfig:
    """Return the job with another file and name of user code at a key."""
    return with_values(config, {key: f"{split_code_reference(value_at(config, key))[0]}{file}:{name}"})


def new_temporary_folder() -> Path:
    """Create an empty folder in the temporary folder of this process. Raises OSError."""
    return Path(tempfile.mkdtemp(dir=_temporary_folder()))


def is_temporary(path: Path) -> bool:
    """Whether a file is deleted with this process."""
    return _temporary_folder.cache_info().currsize > 0 and path.is_relative_to(_temporary_folder())


def with_row_names(message: str) -> str:
    """A message in which rows passed as Python objects have the name of their argument and their index, not their
    temporary file and line."""
    if not _temporary_folder.cache_info().currsize:
        return message
    file = rf"{re.escape(str(_temporary_folder()))}/\w+/(\w+)\.jsonl"
    message = re.sub(rf"{file}, line (\d+)", lambda match: f"{match[1]}[{int(match[2]) - 1}]", message)
    return re.sub(rf"[\w.]+ = 'jsonl:{file}'", r"\1", message)


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name).resolve()

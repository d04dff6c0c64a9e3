"""A run's folder. It is self-contained, and used by one process at a time.

runs/NAME/ contains config.toml (with all values), fingerprints.json, code/ (user code of rules and training, code
passed as Python objects, and all user code of a submitted job), rows.jsonl (rows passed as Python objects), store/,
events.jsonl, evaluations.json, evaluations/ (rewards by prompt), checkpoints/, resume/ (the latest resume points),
tensorboard/, forecast.json, summary.json, summary.png, job.json and job.log (the job's state and log), and for a
submitted job job.txt (its id). A resumed run keeps the job file and the events of each earlier start as config.N.toml
and events.N.jsonl.

Invariants:
- Nothing in the folder is written without its lock.
- A folder can be moved: paths in config.toml into the folder's location at the time of writing are read as paths into
  its current location.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import psutil

from staleflow.pipeline.config import knob_tree, loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError, StoreError, raised_as
from staleflow.stores.files import replace_text
from staleflow.stores.serialization import Codec, parse_json
from staleflow.tasks.settings.source_kinds import kind_of

LOCK_FILE = ".running"
"""Name of the lock file in a run's folder, which contains the process that has the lock."""
JOB_RECORD_FILE = "job.json"
"""Name of the file with the state of the run's job, which the driver writes regularly
(pipeline/recovery/job_record.py)."""
STARTS_FILE = "starts.json"
"""Name of the file with the starts of a run (pipeline/jobs/starts.py)."""
CLOCK_ERROR_S = 60.0
"""Greatest difference between the clocks of a machine and of its file server."""
OTHER_HOST_TIMEOUT_S = 600
"""Seconds without an event or a report after which a process of another machine counts as dead, because its process id
cannot be checked from here."""
DISK_REMEDY = "free space or set runs_dir to another folder"
CODEC = Codec()
Value = TypeVar("Value")


class FolderInUse(ConfigError):
    """Another process uses the folder."""


def require_no_run(run_dir: Path) -> None:
    """Raise ConfigError if the folder has a run, because stored data is never overwritten. Files of a run that was
    killed before it had a store do not count."""
    events = run_dir / "events.jsonl"
    has_data = any((run_dir / name).exists() for name in ("store", "checkpoints", "resume"))
    if has_data or (events.is_file() and events.stat().st_size):
        raise ConfigError(
            f"{run_dir}: already has a run; set another name=..., remove it, or `staleflow resume {run_dir}`"
        )


def require_unused_name(run_dir: Path) -> None:
    """Raise ConfigError if another process uses the folder, or it has a run. For commands that have not locked the
    folder yet."""
    require_unlocked(run_dir)
    require_no_run(run_dir)


def require_unlocked(run_dir: Path) -> None:
    """Raise FolderInUse if another process uses a run's folder."""
    if (run_dir / LOCK_FILE).is_file():
        _open_lock_file(run_dir).close()


def require_run(run_dir: Path) -> None:
    """Raise ConfigError unless the folder has a run."""
    if str(run_dir).startswith("s3:"):  # Path has removed one slash of the URL
        url = str(run_dir).replace("s3:", "s3:/", 1)
        raise ConfigError(f"{url}: a bucket has only the store; name the run's folder")
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no such run; `staleflow store ls` lists runs")


def prepare_run_dir(config: RunConfig, code: Mapping[str, str] | None = None) -> Path:
    """Create a new run's folder with its job file and a copy of the user's code. Requires the folder's lock. Raises
    ConfigError if it has a run, StoreError if it cannot be written. code: contents by file name."""
    require_no_run(config.run_dir)
    _create_folder(config.run_dir)
    write_code(config.run_dir, code or {})
    write_job(config)
    return config.run_dir


def write_job(config: RunConfig) -> None:
    """Write a job to its run's folder atomically. Raises StoreError."""
    replace_text(config.run_dir / "config.toml", knob_tree.to_toml(config), DISK_REMEDY)


def find_checkpoint(run_dir: Path, step: int | None = None) -> tuple[int, Path]:
    """Return the step and the folder of a run's checkpoint. Raises ConfigError if there is none. step: None for the
    newest one."""
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise ConfigError(f"{run_dir}: the run has no checkpoint; let it end, or set training.checkpoint_every")
    if step is not None and step not in checkpoints:
        raise ConfigError(f"--step = {step}: {run_dir} has checkpoints of steps {', '.join(map(str, checkpoints))}")
    step = max(checkpoints) if step is None else step
    return step, checkpoints[step]


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by their number of steps, in order."""
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    numbers = [folder.name.removeprefix("step-") for folder in folders]
    return {int(n): folder for n, folder in zip(numbers, folders, strict=True) if n.isdecimal()}


def load_job(run_dir: Path, overrides: Sequence[str] = (), *, file: str = "config.toml") -> RunConfig:
    """Load the job in a run's folder with its paths adjusted to the folder's current location, then apply overrides.

    Args:
        run_dir: The run's folder.
        overrides: `key=value` each.
        file: Name of the job file; config.N.toml for an earlier start.

    Raises:
        ConfigError: There is no such file, or it is not a valid job.
    """
    tree = loading.read_tree(run_dir / file)
    new_dir, path_parts = run_dir.resolve(), (tree.get("runs_dir", "runs"), tree.get("name", "run"))
    if all(isinstance(part, str) for part in path_parts):  # if not, loading raises the error below
        tree = _move_paths(tree, str(Path(*path_parts)), str(new_dir))
    config = loading.from_tree_with_overrides(tree, overrides, str(run_dir / file))
    return user_files.with_run_dir(config, new_dir)


def _move_paths(node: Any, old_dir: str, new_dir: str) -> Any:
    """Return an unchecked job, or a part of one, with `_move_path` applied to all of its texts."""
    if isinstance(node, dict):
        return {key: _move_paths(value, old_dir, new_dir) for key, value in node.items()}
    if isinstance(node, list):
        return [_move_paths(value, old_dir, new_dir) for value in node]
    return _move_path(node, old_dir, new_dir) if isinstance(node, str) else node


def _move_path(value: str, old_dir: str, new_dir: str) -> str:
    """Replace the folder `old_dir` by `new_dir` in a job's value, if the value is a path inside it.

    >>> _move_path("/runs/one/code/mine.py:f", "/runs/one", "/runs/two")
    '/runs/two/code/mine.py:f'
    >>> _move_path("jsonl:/runs/one-more/p.jsonl", "/runs/one", "/runs/two")
    'jsonl:/runs/one-more/p.jsonl'
    """
    if old_dir not in value:
        return value
    source = kind_of(value)
    kind = "" if source is None else f"{source.name}:"
    file = value.removeprefix(kind)
    return f"{kind}{new_dir}{file[len(old_dir) :]}" if file == old_dir or file.startswith(f"{old_dir}/") else value


@contextlib.contextmanager
def create_and_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run's folder, creating it if necessary. Raises as `lock_folder` does."""
    _create_folder(run_dir)
    with lock_folder(run_dir):
        yield


@contextlib.contextmanager
def lock_folder(run_dir: Path) -> Iterator[None]:
    """Lock a folder. Raises FolderInUse, naming the other process, if one uses it. The lock ends with this process in
    any case."""
    with _open_lock_file(run_dir) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)  # this process may continue without using the folder


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json of a run; empty if its latest start has written none, or it cannot be read."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
        starts = run_dir / STARTS_FILE
        num_starts = len(json.loads(starts.read_text("utf-8"))) if starts.is_file() else 0
        return summary if len(summary.get("starts", ())) >= num_starts else {}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def read_json_file(path: Path, cls: type[Value], remedy: str, codec: Codec = CODEC) -> Value | None:
    """Decode a JSON file of a run's folder; None if there is no such file. Raises StoreError, which ends with the
    remedy."""
    with raised_as(StoreError, f"{path}: cannot be read", OSError, ValueError, remedy=remedy):
        return codec.decode(parse_json(path.read_bytes()), cls) if path.is_file() else None


def is_in_use(run_dir: Path) -> bool:
    """Whether a live process has a folder's lock, according to the lock file. Taking the lock instead could make a
    starting run fail, and would need write access. A process of another machine counts as dead after
    OTHER_HOST_TIMEOUT_S without an event or a report."""
    try:
        _, process, _, host = (run_dir / LOCK_FILE).read_text("utf-8").split()
        if host != socket.gethostname():
            files = [file for name in (LOCK_FILE, JOB_RECORD_FILE, "events.jsonl") if (file := run_dir / name).exists()]
            return time.time() - max(file.stat().st_mtime for file in files) < OTHER_HOST_TIMEOUT_S
        # After a restart of the machine or container, another process may have the number.
        created_at = psutil.Process(int(process)).create_time()
        return bool(created_at <= (run_dir / LOCK_FILE).stat().st_mtime + CLOCK_ERROR_S)
    except psutil.AccessDenied:
        return True
    except (OSError, ValueError, psutil.NoSuchProcess):
        return False


def _open_lock_file(run_dir: Path) -> TextIO:
    """Open and lock the folder's lock file, which stays locked while it is open. Raises FolderInUse, StoreError."""
    path = run_dir / LOCK_FILE
    while True:
        with raised_as(
            StoreError, f"{run_dir}: cannot be written", OSError, remedy="a run's folder is locked while it is in use"
        ):
            file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
            file.close()  # the file was recreated in the meantime, and a lock on a deleted file protects nothing
        except FileNotFoundError:
            file.close()
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise FolderInUse(
                f"{run_dir}: in use by {holder}; wait until it ends, stop it, or set another name=... for a new run"
            ) from None
        except OSError as error:
            file.close()
            raise StoreError(f"{path}: cannot be locked: {error}; use a file system that supports locks") from error


def _create_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written: {error.strerror}; set runs_dir to another folder") from error


def read_job_id(run_dir: Path) -> str:
    """Return the id of the last job submitted for the run; empty if there was none."""
    owner = run_dir / "job.txt"
    return owner.read_text("utf-8").strip() if owner.is_file() else ""


def write_job_id(run_dir: Path, job_id: str, code: Mapping[str, str]) -> None:
    """Record the id of the job that runs the run, and store the code sent with it. Raises StoreError. code: contents by
    file name."""
    replace_text(run_dir / "job.txt", f"{job_id}\n", DISK_REMEDY)
    write_code(run_dir, code)


def write_code(run_dir: Path, code: Mapping[str, str]) -> None:
    """Store user code and rows, by file name, in the run's folder. Raises StoreError."""
    for name, text in code.items():
        replace_text(user_files.copied_path(run_dir / "code", name), text, DISK_REMEDY)


def list_runs(runs_dir: Path) -> list[Path]:
    """Return the folders in `runs_dir` that have a run, sorted by name."""
    return sorted(p.parent for p in runs_dir.glob("*/config.toml"))

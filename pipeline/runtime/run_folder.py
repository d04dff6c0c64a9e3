"""A run's folder: complete in itself, and worked on by one process at a time.

runs/NAME/ holds config.toml (resolved), store/, events.jsonl, evaluations.json, checkpoints/, resume/ (the latest
resume points), tensorboard/, summary.json and summary.png; a submitted job's also job.txt (its id) and code/.

Two promises. Nothing in it is written before its lock is held. And the folder that is named is the one that is worked
on: config.toml says where the run was when it was written, so what it says of its own place, and of files below it, is
read as where the folder is now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from pipeline.config import fields, loading, user_files
from pipeline.config.schema import RunConfig
from stores.errors import ConfigError, StoreError
from stores.files import replace_text

LOCK = ".running"
"""The file in a run's folder that is locked; it says by whom."""
ELSEWHERE = "free space or set runs_dir to another folder"
PATHS = (
    ("model", "path"),
    ("task", "source"),
    ("reward", "function"),
    ("tracking", "tracker"),
    ("workload", "run"),
)
"""Keys of a job that may name a file in the run's own folder."""


class FolderInUse(ConfigError):
    """Another process is at work in the folder."""


def refuse_taken(run_dir: Path) -> None:
    """ConfigError if the folder holds a run already: nothing stored is ever overwritten. What a run leaves that was
    killed before it had a store is no run."""
    events = run_dir / "events.jsonl"
    kept = any((run_dir / name).exists() for name in ("store", "checkpoints", "resume"))
    if kept or (events.is_file() and events.stat().st_size):
        raise ConfigError(f"{run_dir} already holds a run; choose another with --set name=..., or remove it")


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the folder of a new run, with its job file. Only while the folder is held. ConfigError as `refuse_taken`."""
    refuse_taken(config.run_dir)
    _make(config.run_dir)
    write_job(config)
    return config.run_dir


def write_job(config: RunConfig) -> None:
    """Write a job into its run's folder. Raises StoreError."""
    replace_text(config.run_dir / "config.toml", fields.to_toml(config), ELSEWHERE)


def load_job(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The job that a run's folder holds, as it is where the folder is now; then the overrides. Raises ConfigError."""
    tree = loading.read_tree(run_dir / "config.toml")
    here, before = run_dir.resolve(), str(Path(tree.get("runs_dir", "runs")) / tree.get("name", "run"))
    for table, key in PATHS:
        section = tree.get(table)
        if isinstance(section, dict) and isinstance(value := section.get(key), str):
            section[key] = _moved(value, before, str(here))
    config = loading.from_overridden(tree, overrides, str(run_dir / "config.toml"))
    return user_files.placed(config, here)


def _moved(value: str, before: str, here: str) -> str:
    """What a job names, with a path that is in the folder `before` in the folder `here` instead.

    >>> _moved("/runs/one/code/mine.py:f", "/runs/one", "/runs/two")
    '/runs/two/code/mine.py:f'
    >>> _moved("jsonl:/runs/one-more/p.jsonl", "/runs/one", "/runs/two")
    'jsonl:/runs/one-more/p.jsonl'
    """
    kind = "jsonl:" if value.startswith("jsonl:") else ""
    file = value.removeprefix(kind)
    return f"{kind}{here}{file[len(before) :]}" if file == before or file.startswith(f"{before}/") else value


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder, which is made if it is not there. Raises as `only_here` does."""
    _make(run_dir)
    with only_here(run_dir):
        yield


@contextlib.contextmanager
def only_here(run_dir: Path) -> Iterator[None]:
    """Hold a folder. FolderInUse, naming the holder, if another process works there. The lock ends with this process,
    however that ends."""
    with _locked(run_dir) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _locked(run_dir: Path) -> TextIO:
    """The folder's lock file, locked for as long as it is open."""
    path = run_dir / LOCK
    while True:
        try:
            file = path.open("a+")
        except OSError as error:
            raise StoreError(
                f"{run_dir}: cannot be written: {error}; a run's folder is locked while it is used"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
            file.close()  # made anew meanwhile: the lock of a file that is gone keeps nobody out
        except FileNotFoundError:
            file.close()
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise FolderInUse(f"{run_dir}: is running now, in {holder}") from None
        except OSError as error:
            file.close()
            raise StoreError(f"{path}: cannot be locked: {error}; use a file system that has locks") from error


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}; set runs_dir to another folder") from error


def job_id(run_dir: Path) -> str:
    """Of the job that was submitted last to go on with the run here; empty if none was."""
    owner = run_dir / "job.txt"
    return owner.read_text().strip() if owner.is_file() else ""


def write_job_id(run_dir: Path, id: str, code: dict[str, str]) -> None:
    """Note that the run is this job's from now on, with the code that came with it. Raises StoreError."""
    replace_text(run_dir / "job.txt", f"{id}\n", ELSEWHERE)
    for name, text in code.items():
        replace_text(run_dir / "code" / name, text, ELSEWHERE)


def list_runs(runs_dir: Path) -> list[Path]:
    """Folders below `runs_dir` that hold a run, by name."""
    return sorted(p.parent for p in runs_dir.glob("*/config.toml"))

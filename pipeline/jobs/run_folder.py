"""A run's folder: made once, held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.config import fields
from pipeline.config.schema import RunConfig
from pipeline.config.user_files import write_code
from stores.errors import ConfigError, StoreError


def refuse_taken(config: RunConfig) -> None:
    """ConfigError if the run's folder holds a run already: nothing stored is ever overwritten."""
    if (config.run_dir / "store").exists():
        raise ConfigError(f"{config.run_dir} already holds a run; choose another with --set name=..., or remove it")


def prepare_run_dir(config: RunConfig, code: Mapping[str, str] | None = None) -> Path:
    """Make the run's folder. code: of the user's own, that it keeps. ConfigError as `refuse_taken`."""
    refuse_taken(config)
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_code(run_dir / "code", code or {})
        (run_dir / "config.toml").write_text(fields.to_toml(config))
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}; set runs_dir to another folder") from error
    return run_dir


@contextlib.contextmanager
def only_here(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder. ConfigError, naming the holder, if another process runs there. The lock ends with this
    process, however that ends."""
    try:
        lock = (run_dir / ".running").open("a+")
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}; a run's folder is locked while it is used") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(f"{run_dir}: is running now, in {file.read().strip()}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def list_runs(runs_dir: Path) -> list[Path]:
    """Folders below `runs_dir` that hold a run, by name."""
    return sorted(p.parent for p in runs_dir.glob("*/config.toml"))

"""A job's state and log in the run's folder, where they outlive the scheduler.

The driver writes its reports to the run's folder and to the job registry on its scheduler
(pipeline/cluster/job_registry.py), which keeps them only in memory. It writes from the time when it has the folder's
lock: while a job waits in the queue, the folder has no record, or that of the run's previous job.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.cluster.job_lookup import follow_lines
from staleflow.pipeline.cluster.submitted_job import Job
from staleflow.pipeline.recovery.run_folder import DISK_REMEDY, JOB_RECORD_FILE, is_in_use
from staleflow.stores.errors import ConfigError, StoreError, raised_as, strerror
from staleflow.stores.files import replace_text

LOG_FILE = "job.log"
DEFAULT_RECORD = Job(id="", name="", run_dir="", steps=0, submitted_at=0.0).to_plain()
"""A record's keys, which are those of a job in the registry, and their default values."""


def write(run_dir: Path, job_id: str, changes: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Update the record of a job and append lines to its log. Replaces a record of another job, or one that cannot be
    read. Requires the folder's lock. Raises StoreError. changes: new values by key."""
    try:
        record = read(run_dir)
    except ConfigError:
        record = {}
    if record.get("id") != job_id:
        record = DEFAULT_RECORD | {"submitted_at": time.time()}
    record |= dict(changes) | {"id": job_id, "name": run_dir.name, "run_dir": str(run_dir), "reported_at": time.time()}
    with raised_as(
        StoreError, f"{run_dir / LOG_FILE}: cannot be written", OSError, remedy=DISK_REMEDY, describe=strerror
    ):
        if lines:
            with (run_dir / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(f"{' '.join(line.splitlines())}\n" for line in lines))
    replace_text(run_dir / JOB_RECORD_FILE, json.dumps(record), DISK_REMEDY)


def has_record(run_dir: Path) -> bool:
    """Whether a folder has the record of a job."""
    return (run_dir / JOB_RECORD_FILE).is_file()


def read(run_dir: Path) -> dict[str, Any]:
    """Read a job's record from a run's folder, as last written by its driver. Raises ConfigError."""
    with raised_as(ConfigError, f"{run_dir / JOB_RECORD_FILE}: cannot be read", OSError, ValueError):
        record = json.loads((run_dir / JOB_RECORD_FILE).read_text("utf-8"))
    if not isinstance(record, dict):
        raise ConfigError(f"{run_dir / JOB_RECORD_FILE}: not the record of a job")
    return DEFAULT_RECORD | record | {"run_dir": str(run_dir)}


def read_log(run_dir: Path, *, follow: bool = False) -> AsyncIterator[str]:
    """Yield the log's lines; with `follow`, until no process uses the folder. Changes nothing in it. Raises
    ConfigError."""

    async def poll(start: int) -> tuple[int, list[str], bool]:
        has_ended = not is_in_use(run_dir)  # before the lines, so that none is missed
        end, lines = read_log_lines(run_dir, start)
        return end, lines, has_ended

    return follow_lines(poll, follow=follow)


def read_log_lines(run_dir: Path, start_byte: int = 0) -> tuple[int, list[str]]:
    """Return the end of the last complete line of the log, in bytes, and the complete lines from `start_byte` on.
    Raises ConfigError."""
    with raised_as(ConfigError, f"{run_dir / LOG_FILE}: cannot be read", OSError):
        try:
            with (run_dir / LOG_FILE).open("rb") as file:
                file.seek(start_byte)
                data = file.read()
        except FileNotFoundError:
            return start_byte, []
    end = data.rfind(b"\n") + 1
    return start_byte + end, data[:end].decode(errors="replace").split("\n")[:-1]

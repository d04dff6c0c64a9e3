"""A job's state and log in the run's folder, where they outlive the scheduler.

The driver writes its reports to the run's folder and to the job registry on its scheduler
(pipeline/cluster/job_registry.py), which keeps them only in memory. Waiting jobs have no folder yet, so no record.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.cluster.submitted_job import ENDED, Job
from staleflow.pipeline.recovery.run_folder import DISK_REMEDY, is_locked
from staleflow.stores.errors import ConfigError, StoreError, raised_as, strerror
from staleflow.stores.files import replace_text

RECORD, LOG = "job.json", "job.log"
POLL_S = 0.5
"""Seconds between two polls of a log that is followed."""
LOCK_CHECK_EVERY = 10
"""Number of polls per check of the run's lock, which is checked rarely because the check takes the lock."""
DEFAULT_RECORD = Job(id="", name="", run_dir="", steps=0, submitted_at=0.0).to_plain()
"""A record's keys, which are those of a job in the registry, and their default values."""


def write(run_dir: Path, changes: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Update a job's record and append lines to its log. changes: new values by key. Raises StoreError."""
    previous_record = read(run_dir) if has_record(run_dir) else DEFAULT_RECORD | {"submitted_at": time.time()}
    record = (
        previous_record | {"name": run_dir.name, "run_dir": str(run_dir), "reported_at": time.time()} | dict(changes)
    )
    with raised_as(StoreError, f"{run_dir / LOG}: cannot be written", OSError, remedy=DISK_REMEDY, describe=strerror):
        if lines:
            with (run_dir / LOG).open("a", encoding="utf-8") as file:
                file.write("".join(f"{' '.join(line.splitlines())}\n" for line in lines))
    replace_text(run_dir / RECORD, json.dumps(record), DISK_REMEDY)


def has_record(run_dir: Path) -> bool:
    """Whether a folder has the record of a job."""
    return (run_dir / RECORD).is_file()


def read(run_dir: Path) -> dict[str, Any]:
    """Read a job's record from a run's folder, as last written by its driver. Raises ConfigError."""
    with raised_as(ConfigError, f"{run_dir / RECORD}: cannot be read", OSError, ValueError):
        record = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ConfigError(f"{run_dir / RECORD}: not the record of a job")
    return DEFAULT_RECORD | record | {"run_dir": str(run_dir)}


async def read_log(run_dir: Path, *, follow: bool = False) -> AsyncIterator[str]:
    """Yield the log's lines. With `follow`, keep polling until the job has ended or no process holds the folder's
    lock."""
    num_lines = num_polls = 0
    while True:
        has_ended = read(run_dir)["state"] in ENDED or (num_polls % LOCK_CHECK_EVERY == 0 and not is_locked(run_dir))
        num_polls += 1
        lines = log_lines(run_dir, num_lines)
        num_lines += len(lines)
        for line in lines:
            yield line
        if not follow or has_ended:
            return
        await asyncio.sleep(POLL_S)


def log_lines(run_dir: Path, start: int = 0) -> list[str]:
    """Return the complete lines of the log from index `start` on."""
    try:
        text = (run_dir / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.split("\n")[start:-1]

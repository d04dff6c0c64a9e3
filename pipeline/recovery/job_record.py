"""What a run's folder keeps of its job: how it stands, and its log, for when the scheduler that knew both is gone.

The driver writes here what it reports to the board on its scheduler (pipeline/cluster/job_registry.py), which keeps it
in memory only. What the board itself says of a job that waits is not here: such a job has no folder yet.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.cluster.job_registry import ENDED
from staleflow.pipeline.recovery.run_folder import ELSEWHERE, is_locked
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.files import replace_text

RECORD, LOG = "job.json", "job.log"
POLL_S = 0.5
"""Seconds between two looks at a log that is followed."""
LOCK_LOOKS = 10
"""Looks at a log of which one also looks whether its run is alive: that takes the lock for a moment."""
EMPTY: dict[str, Any] = {
    "id": "", "name": "", "run_dir": "", "steps": 0, "submitted_at": 0.0, "state": "waiting", "why": "", "stop": "",
    "status": {}, "reported_at": 0.0, "last": {},
}  # fmt: skip
"""A record's keys, which are those that the board has of a job."""


def write(run_dir: Path, changes: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Note how a job stands, and append to its log. changes: of the record, by key. Raises StoreError."""
    before = read(run_dir) if is_there(run_dir) else EMPTY | {"submitted_at": time.time()}
    record = before | {"name": run_dir.name, "run_dir": str(run_dir), "reported_at": time.time()} | dict(changes)
    try:
        if lines:
            with (run_dir / LOG).open("a", encoding="utf-8") as file:
                file.write("".join(f"{' '.join(line.splitlines())}\n" for line in lines))
    except OSError as error:
        raise StoreError(f"{run_dir / LOG}: cannot be written: {error.strerror}; {ELSEWHERE}") from error
    replace_text(run_dir / RECORD, json.dumps(record), ELSEWHERE)


def is_there(run_dir: Path) -> bool:
    """Whether a folder has a job's record."""
    return (run_dir / RECORD).is_file()


def read(run_dir: Path) -> dict[str, Any]:
    """How the job of a run's folder stood when its driver last wrote. Raises ConfigError."""
    try:
        record = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir / RECORD}: cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{run_dir / RECORD}: is no record of a job")
    return EMPTY | record | {"run_dir": str(run_dir)}


async def followed(run_dir: Path, *, forever: bool = False) -> AsyncIterator[str]:
    """Yield the lines of a job's log; with `forever`, until the job has ended or no process has the folder."""
    num_lines = num_looks = 0
    while True:
        ended = read(run_dir)["state"] in ENDED or (num_looks % LOCK_LOOKS == 0 and not is_locked(run_dir))
        num_looks += 1
        lines = log_lines(run_dir, num_lines)
        num_lines += len(lines)
        for line in lines:
            yield line
        if not forever or ended:
            return
        await asyncio.sleep(POLL_S)


def log_lines(run_dir: Path, after: int = 0) -> list[str]:
    """Lines of a job's log, from number `after` on; one that is being written is left for later."""
    try:
        text = (run_dir / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.split("\n")[after:-1]

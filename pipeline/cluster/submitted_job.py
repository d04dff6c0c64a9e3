"""A submitted job, as the registry stores it and clients see it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from staleflow.pipeline.cluster.gang import Needs

ENDED = ("done", "stopped", "failed")
"""States of jobs that have ended."""
MAX_LINES = 10_000
"""Maximum number of log lines kept per job, the latest ones."""
PlainDict = dict[str, Any]
"""Values that msgpack can encode: numbers, strings, and lists and dicts of them."""


@dataclass(slots=True)
class Job:
    """One submitted job. state: waiting, running, done, stopped or failed."""

    id: str
    name: str
    run_dir: str
    steps: int
    submitted_at: float
    state: str = "waiting"
    why: str = ""
    """Reason why a job waits, stopped or failed."""
    stop: str = ""
    """Reason of a request to stop; empty if there is none."""
    retirements: list[str] = field(default_factory=list)
    """Addresses of workers that the job should retire, until its driver has received them."""
    status: PlainDict = field(default_factory=dict)
    """What the run does at its latest report; empty before the first."""
    history: dict[int, PlainDict] = field(default_factory=dict)
    """Metrics of each training step."""
    reported_at: float = 0.0
    client_id: str = ""
    """Dask's id of the client of the job's driver, or of the submitting process before that; empty if there is none."""
    needs: Needs | None = None
    """The workers that a submitted job needs. It enters the queue once its task has arrived."""
    wait_limit_s: float = 0.0
    driver_worker: str = ""
    """Address of the worker that the driver of a submitted job is to run on; empty while it waits."""
    num_lines: int = 0
    """Number of all log lines, including those that are not kept any more."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def log(self, line: str) -> None:
        """Append a line to the log."""
        self.lines.append(f"{time.strftime('%H:%M:%S')}  {line}")
        self.num_lines += 1

    @property
    def last_metrics(self) -> PlainDict:
        """Metrics of its last step; empty if it has none."""
        return next(reversed(self.history.values()), {})

    def to_plain(self) -> PlainDict:
        """Convert the job to plain values, with the metrics of its last step instead of its history."""
        names = ("id", "name", "run_dir", "steps", "submitted_at", "state", "why", "stop", "status", "reported_at")
        return {name: getattr(self, name) for name in names} | {"last": self.last_metrics}

"""Detects drivers of submitted jobs that do not report any more, so that their jobs can be started again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed.scheduler import heartbeat_interval

from staleflow.pipeline.cluster.submitted_job import ENDED, Job

MIN_SILENCE_LIMIT_S = 60.0
"""Minimum seconds without a heartbeat of a job's driver after which it counts as lost. Its Dask client sends them from
the event loop that does all of the driver's work. Dask itself waits for five minutes."""
CLIENT_COUNT_WINDOW_S = 900.0
"""Seconds for which the largest number of clients counts: a driver keeps the interval that it has until its next
heartbeat."""
MISSED_HEARTBEATS = 3
"""Number of intervals between heartbeats that must also have passed. The first interval of a client is
distributed.client.heartbeat; then the scheduler sets it: 5 seconds for up to 10 clients, 30 for 400, and so on."""
FIRST_REQUEST_S = 300.0
"""Minimum seconds from a job's admission to the first request of its driver after which that counts as lost. It imports
this package and connects to the scheduler meanwhile."""
CHECK_INTERVAL_S = 5.0
"""Seconds between two checks."""


def silence_limit_s(num_clients: int) -> float:
    """Seconds without a heartbeat after which a driver counts as lost. num_clients: of the scheduler.

    >>> silence_limit_s(10), silence_limit_s(1000)
    (60.0, 180.0)
    """
    first_interval_s = parse_timedelta(dask.config.get("distributed.client.heartbeat"), default="ms")
    interval_s: float = max(first_interval_s, 10 * heartbeat_interval(num_clients))  # 10: as Scheduler.client_heartbeat
    return max(MIN_SILENCE_LIMIT_S, MISSED_HEARTBEATS * interval_s)


class DriverWatch:
    """Watches the drivers of one scheduler's jobs. on_silent: called with each job whose driver counts as lost and
    the seconds after which it does, again each time they have passed."""

    def __init__(self, scheduler: Any, jobs: Mapping[str, Job], on_silent: Callable[[Job, float], None]) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._on_silent = on_silent
        self._client_counts: deque[tuple[float, int]] = deque()

    async def run(self) -> None:
        """Check all drivers, until cancelled."""
        awake_since_s = checked_at_s = time.time()
        reported_at: dict[str, float] = {}
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now = time.time()
            if now - checked_at_s > 2 * CHECK_INTERVAL_S:  # this process itself was stopped and received no heartbeats
                awake_since_s = now
            checked_at_s = now
            for job, limit_s in self.jobs_with_silent_driver(now, awake_since_s):
                if now - reported_at.get(job.id, 0.0) > limit_s:
                    reported_at[job.id] = now
                    self._on_silent(job, limit_s)

    def jobs_with_silent_driver(self, now: float, awake_since_s: float) -> list[tuple[Job, float]]:
        """Return the submitted jobs whose driver counts as lost, each with the seconds after which it does. Drivers
        without a nanny are left out: nothing can end them, so two drivers could run at once. awake_since_s: time since
        which heartbeats could be received."""
        clients, workers, usual_limit_s = self._scheduler.clients, self._scheduler.workers, self._silence_limit_s(now)
        silent = []
        for job in self._jobs.values():
            worker, client = workers.get(job.driver_worker), clients.get(job.client_id)
            if job.state in ENDED or worker is None or not worker.nanny or (job.client_id and client is None):
                continue
            # Before it begins, a driver has no client, and the last that is known of it is its admission.
            seen_at, limit_s = job.reported_at, max(usual_limit_s, FIRST_REQUEST_S)
            if client:
                seen_at, limit_s = client.last_seen, usual_limit_s
            if now - max(seen_at, awake_since_s) > limit_s:
                silent.append((job, limit_s))
        return silent

    def _silence_limit_s(self, now: float) -> float:
        """Seconds without a heartbeat after which a driver counts as lost, by the most clients of the last minutes."""
        counts = self._client_counts
        counts.append((now, len(self._scheduler.clients)))
        while now - counts[0][0] > CLIENT_COUNT_WINDOW_S:
            counts.popleft()
        return silence_limit_s(max(count for _, count in counts))

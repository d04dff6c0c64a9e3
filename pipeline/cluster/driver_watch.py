"""Detects drivers of submitted jobs that do not report any more, so that their jobs can be started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.pipeline.cluster.submitted_job import ENDED, Job

LEASE_S = 60.0
"""Seconds without a heartbeat of a job's driver after which it counts as lost. Its Dask client sends one every five
seconds, from the event loop that does all of the driver's work. Dask itself waits for five minutes."""
CHECK_S = 5.0
"""Seconds between two checks."""


class DriverWatch:
    """Watches the drivers of one scheduler's jobs. on_silent: called once for each driver that counts as lost."""

    def __init__(self, scheduler: Any, jobs: Mapping[str, Job], on_silent: Callable[[Job], None]) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._on_silent = on_silent

    async def run(self) -> None:
        """Check all drivers, until cancelled."""
        awake_since = checked_at = time.time()
        reported_clients: set[str] = set()
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.time()
            if now - checked_at > 2 * CHECK_S:  # this process itself was stopped and received no heartbeats
                awake_since = now
            checked_at = now
            for job in self.silent_drivers(now, awake_since):
                if job.client not in reported_clients:
                    reported_clients.add(job.client)
                    self._on_silent(job)

    def silent_drivers(self, now: float, awake_since: float) -> list[Job]:
        """Return the submitted jobs whose driver counts as lost. Only drivers with a nanny, which can end them, because
        otherwise two drivers could run at once. awake_since: time since which heartbeats could be received."""
        clients, workers = self._scheduler.clients, self._scheduler.workers
        return [
            job
            for job in self._jobs.values()
            if job.state not in ENDED
            and (client := clients.get(job.client)) is not None
            and (worker := workers.get(job.driver_worker)) is not None
            and worker.nanny
            and now - max(client.last_seen, awake_since) > LEASE_S
        ]

"""What a soak knows of its run, from outside: the registry on the scheduler says how far it is, the scheduler who runs
where."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soaking.job import NAME
from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import ClusterAddress

ANSWER_S = 2.0
"""Seconds the scheduler may take to answer; it may be stopped."""
ACTOR = re.compile(rf"staleflow-{NAME}-(.+?)-(\d+)$")
"""The key of an actor's task: the actor's name, and the number of its placement."""


def _places(dask_scheduler: Any) -> dict[str, tuple[str, int]]:
    """Worker (name, process) of each task, by key. Runs on the scheduler."""
    results = {}
    for key, task in dask_scheduler.tasks.items():
        worker = task.processing_on or next(iter(task.who_has or ()), None)
        if worker is not None:
            results[str(key)] = (str(worker.name), int(worker.pid))
    return results


@dataclass(slots=True)
class Watch:
    """The run as seen last. steps: reports of a training step not reported before. places: process of each actor, and
    of a submitted run's driver, by name."""

    file: Path
    run_dir: Path
    steps: int = 0
    step_at: float = 0.0
    job: dict[str, Any] = field(default_factory=dict)
    """The newest job in the registry; empty if there is none, or no scheduler."""
    places: dict[str, int] = field(default_factory=dict)
    answers: bool = False
    """Whether the scheduler answered."""
    _client: Any = None
    _reported: set[tuple[float, float]] = field(default_factory=set)

    async def look(self) -> None:
        """Ask the scheduler."""
        self.answers = False
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._client is None:
                    self._client = await ClusterAddress(scheduler_file=str(self.file)).connect(within_s=ANSWER_S)
                jobs = await job_registry.ask(self._client, "jobs")
                self.places = _by_name(await self._client.run_on_scheduler(_places))
        except Exception:  # noqa: BLE001  it is down or stopped, by our own hand
            await self.close()
            self.job = {}
            return
        self.answers = True
        self.job = max(jobs, key=lambda job: float(job["submitted_at"]), default={})
        last = self.job.get("last") or {}
        if last and (seen := (last["step"], last["elapsed_s"])) not in self._reported:
            self._reported.add(seen)
            self.steps += 1
            self.step_at = time.monotonic()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ANSWER_S):
                    await client.close(timeout=0.5)

    @property
    def step(self) -> int:
        """The newest training step that was reported; -1 before the first."""
        last = self.job.get("last") or {}
        return int(last.get("step", -1))

    def actors(self, role: str) -> dict[str, int]:
        """Processes of the actors of a role, by name: trainer, server, reward, rollout; driver if it was submitted."""
        return {name: pid for name, pid in self.places.items() if name == role or name.startswith(f"{role}-")}


def _by_name(tasks: dict[str, tuple[str, int]]) -> dict[str, int]:
    newest: dict[str, tuple[int, int]] = {}
    for key, (_, pid) in tasks.items():
        if match := ACTOR.match(key):
            newest[match[1]] = max(newest.get(match[1], (-1, 0)), (int(match[2]), pid))
    places = {name: pid for name, (_, pid) in newest.items()}
    driver = next((pid for key, (_, pid) in tasks.items() if key.startswith(job_registry.TASK_KEY_PREFIX)), None)
    return places | ({"driver": driver} if driver is not None else {})

"""The board on a Dask scheduler: its jobs, and which worker belongs to which job.

A worker process belongs to at most one job. A job keeps the workers it claims until it releases them or until the
client that claimed them is gone. In that case they may still hold its actors (engines that decode, a server that may
commit), so they are restarted before any job, including the same one after a restart, gets them again.

All calls run one after another on the scheduler's event loop, so a claim needs no lock. The board lives in the
scheduler's memory; what must outlive the scheduler is in the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import SchedulerPlugin

KEY = "staleflow-job-"
"""Prefix of the keys of the tasks that drive jobs."""
OPERATION = "staleflow"
"""Name of the scheduler's remote procedure that calls the board."""
JOBS_KEPT = 200
"""Number of jobs above which the oldest ended ones are dropped."""
LINES_KEPT = 10_000
"""Latest log lines kept per job."""
ENDED = ("done", "stopped", "failed")
RESTART_S = 30.0
"""Seconds a worker may take to restart before the board gives up on it."""

Plain = dict[str, Any]
"""Values that msgpack carries: numbers, strings, and lists and dicts of them."""


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
    status: Plain = field(default_factory=dict)
    history: dict[int, Plain] = field(default_factory=dict)
    """Metrics of each training step."""
    reported_at: float = 0.0
    num_lines: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))

    def plain(self) -> Plain:
        """The job as plain values, with the metrics of its last step instead of its history."""
        names = ("id", "name", "run_dir", "steps", "submitted_at", "state", "why", "stop", "status", "reported_at")
        return {name: getattr(self, name) for name in names} | {"last": next(reversed(self.history.values()), {})}


@dataclass(frozen=True, slots=True)
class Claim:
    """A client's claim to a worker. owner: Dask's id of the client. run: folder of the run whose actors it holds."""

    owner: str
    run: str


class Board(SchedulerPlugin):  # type: ignore[misc]  # untyped
    """Jobs and claims of one scheduler; pipeline/scheduler/plugin.py registers it there."""

    name = "staleflow"
    idempotent = True

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.claims: dict[str, Claim] = {}
        self.dirty: dict[str, Claim] = {}
        """Workers whose claiming client is gone and that have not been restarted yet."""
        self._restarts: set[asyncio.Future[None]] = set()

    async def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.handlers[OPERATION] = self.asked

    def asked(self, verb: str, **arguments: Any) -> Any:
        """Dispatch a client's call. Raises ValueError for an unknown verb, which only a newer client sends."""
        verbs: dict[str, Callable[..., Any]] = {
            "claim": self.claim, "release": self.release, "taken": self.taken, "dirty": self.dirty_of,
            "slot": self.slot, "submit": self.submit, "report": self.report, "stop": self.ask_to_stop,
            "jobs": self.all_jobs, "lines": self.lines, "known": self.known,
        }  # fmt: skip
        if verb not in verbs:
            raise ValueError(f"the scheduler's staleflow has no call {verb!r}; install the same version everywhere")
        return verbs[verb](**arguments)

    # -- workers -------------------------------------------------------------------------------------------------

    def claim(self, owner: str, run: str, address: str) -> bool:
        """Claim a worker. False if another client holds it or it is gone. Idempotent."""
        held = self.claims.get(address)
        if held is not None:
            return held.owner == owner
        if address in self.dirty or address not in self._scheduler.workers:
            return False
        self.claims[address] = Claim(owner, run)
        return True

    def release(self, owner: str, addresses: Sequence[str]) -> None:
        """Release workers. The owner must have left no actors on them."""
        for address in addresses:
            if address in self.claims and self.claims[address].owner == owner:
                del self.claims[address]

    def taken(self, owner: str) -> list[str]:
        """Workers that this client cannot claim."""
        return [a for a, claim in self.claims.items() if claim.owner != owner] + list(self.dirty)

    def dirty_of(self, run: str) -> list[str]:
        """Workers that may still hold actors of a run whose driver is gone."""
        return [a for a, claim in self.dirty.items() if claim.run == run]

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Restart the workers that a departed client had not released."""
        left = [a for a, claim in self.claims.items() if claim.owner == client]
        for address in left:
            self.dirty[address] = self.claims.pop(address)
        if left:
            restart = asyncio.ensure_future(self._restart(left))
            self._restarts.add(restart)
            restart.add_done_callback(self._restarts.discard)

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.claims.pop(worker, None)
        self.dirty.pop(worker, None)
        for id in self.jobs:  # a task restricted to workers that are gone would never run
            if (task := scheduler.tasks.get(KEY + id)) is not None:
                task.worker_restrictions = None

    def slot(self, id: str, address: str) -> bool:
        """Whether a job's driver may stay on its worker. If not, it goes to a free one when it is rescheduled."""
        taken = {*self.claims, *self.dirty}
        if address in taken:
            free = {a for a in self._scheduler.workers if a not in taken}
            self._scheduler.tasks[KEY + id].worker_restrictions = free or None
            job = self.jobs[id]
            job.state, job.reported_at = "waiting", time.time()
            job.why = f"its driver needs a free worker process; all {len(taken)} belong to runs"
            return False
        return True

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Mark a job as failed if its task failed in Dask: its workers died too often, or it could not be loaded."""
        if finish == "erred" and isinstance(key, str) and key.startswith(KEY):
            job, task = self.jobs.get(key.removeprefix(KEY)), self._scheduler.tasks.get(key)
            if job is not None and job.state not in ENDED:
                job.state, job.why = "failed", str(getattr(task, "exception_text", "")) or "its task failed"

    async def _restart(self, addresses: Sequence[str]) -> None:
        # Workers without a nanny are shut down; only whoever started them can start them again.
        with contextlib.suppress(Exception):
            await self._scheduler.restart_workers(
                list(addresses), timeout=RESTART_S, wait_for_workers=False, on_error="return",
                stimulus_id="staleflow-restart",
            )  # fmt: skip

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit(self, id: str, name: str, run_dir: str, steps: int) -> None:
        """Add a job. Idempotent; replaces an ended job with the same id."""
        if id not in self.jobs or self.jobs[id].state in ENDED:
            self.jobs.pop(id, None)
            self.jobs[id] = Job(id, name, run_dir, steps, time.time(), why="no worker has taken its driver yet")
            ended = [one.id for one in self.jobs.values() if one.state in ENDED]
            for old in ended[: max(0, len(self.jobs) - JOBS_KEPT)]:
                del self.jobs[old]

    def known(self, key: str) -> bool:
        """Whether the scheduler has a task of that key."""
        return key in self._scheduler.tasks

    def report(
        self,
        id: str,
        state: str,
        why: str,
        status: Mapping[str, Any],
        steps: Sequence[Mapping[str, float]],
        lines: Sequence[str],
    ) -> str:
        """Store a driver's report: new steps and log lines. Returns why the job must stop; empty if it need not."""
        job = self.jobs.get(id)
        if job is None:  # dropped, or the scheduler was restarted: nobody asks for it here
            return ""
        for step in steps:
            job.history[int(step["step"])] = dict(step)
        if steps and (task := self._scheduler.tasks.get(KEY + id)) is not None:
            task.suspicious = 0  # Dask's count of worker deaths starts again after progress
        job.state, job.why, job.reported_at = state, why, time.time()
        if status:
            job.status = dict(status)
        job.lines.extend(lines)
        job.num_lines += len(lines)
        return job.stop

    def ask_to_stop(self, id: str, why: str) -> str:
        """Ask a job to stop at its next step; returns its present state."""
        job = self.jobs[id]
        job.stop = job.stop or why
        return job.state

    def all_jobs(self) -> list[Plain]:
        return [job.plain() for job in self.jobs.values()]

    def lines(self, id: str, after: int) -> tuple[int, list[str]]:
        """The number of the next log line, and the lines from number `after` on that are still kept."""
        job = self.jobs[id]
        missing = max(0, min(job.num_lines - after, len(job.lines)))
        return job.num_lines, list(job.lines)[len(job.lines) - missing :]


async def ask(client: Any, verb: str, **arguments: Any) -> Any:
    """Call the board on the scheduler that a Dask client is connected to."""
    return await getattr(client.scheduler, OPERATION)(verb=verb, **arguments)

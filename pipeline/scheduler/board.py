"""The board on a Dask scheduler: which jobs there are, and which worker belongs to which.

A worker process belongs to one job at a time. What a job claims, it has for itself until it gives it back, or until the
client that claimed it is gone; then the workers still hold what died with it (engines that decode, a server that may
commit), and are started anew before anyone, the same job restarted included, gets them again.

Everything happens on the scheduler's event loop, one call after another, so a claim needs no lock. Its memory is the
scheduler's: a run's own folder holds what must outlive it.
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
"""How the tasks are named that drive jobs."""
OPERATION = "staleflow"
"""The scheduler's remote procedure that leads here."""
JOBS_KEPT = 200
"""Beyond that the oldest of those that have ended are forgotten."""
LINES_KEPT = 10_000
"""Lines of a job's log: the latest."""
ENDED = ("done", "stopped", "failed")
RESTART_S = 30.0
"""Longest a worker may take to end before it is given up."""

Plain = dict[str, Any]
"""What msgpack carries: numbers, strings, lists and dicts of them."""


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
    """Of a job that waits, stopped or failed."""
    stop: str = ""
    """Why it was asked to stop; empty while it was not."""
    status: Plain = field(default_factory=dict)
    history: dict[int, Plain] = field(default_factory=dict)
    """Metrics of each training step."""
    reported_at: float = 0.0
    num_lines: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))

    def plain(self) -> Plain:
        names = ("id", "name", "run_dir", "steps", "submitted_at", "state", "why", "stop", "status", "reported_at")
        return {name: getattr(self, name) for name in names} | {"last": next(reversed(self.history.values()), {})}


@dataclass(frozen=True, slots=True)
class Claim:
    """owner: Dask's id of the client that claimed. run: folder of the run whose actors the worker holds."""

    owner: str
    run: str


class Board(SchedulerPlugin):  # type: ignore[misc]  # untyped
    """The board itself; pipeline/scheduler/plugin.py puts it on a scheduler."""

    name = "staleflow"
    idempotent = True

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.claims: dict[str, Claim] = {}
        self.dirty: dict[str, Claim] = {}
        """Workers whose claimant is gone, until they are started anew."""
        self._restarts: set[asyncio.Future[None]] = set()

    async def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.handlers[OPERATION] = self.asked

    def asked(self, verb: str, **arguments: Any) -> Any:
        """A call from a client. Unknown verbs are a newer client's: it is told so."""
        verbs: dict[str, Callable[..., Any]] = {
            "claim": self.claim, "release": self.release, "taken": self.taken, "dirty": self.dirty_of,
            "slot": self.slot, "submit": self.submit, "report": self.report, "stop": self.ask_to_stop,
            "jobs": self.all_jobs, "lines": self.lines, "known": self.known,
        }  # fmt: skip
        if verb not in verbs:
            raise ValueError(f"the scheduler's staleflow knows no {verb!r}; install the same version everywhere")
        return verbs[verb](**arguments)

    # -- workers -------------------------------------------------------------------------------------------------

    def claim(self, owner: str, run: str, address: str) -> bool:
        """Have a worker for oneself; false if it is another's, or not there. Twice is once."""
        held = self.claims.get(address)
        if held is not None:
            return held.owner == owner
        if address in self.dirty or address not in self._scheduler.workers:
            return False
        self.claims[address] = Claim(owner, run)
        return True

    def release(self, owner: str, addresses: Sequence[str]) -> None:
        """Give workers back, with nothing of one's own left in them."""
        for address in addresses:
            if address in self.claims and self.claims[address].owner == owner:
                del self.claims[address]

    def taken(self, owner: str) -> list[str]:
        """Workers that are not to be had by this client."""
        return [a for a, claim in self.claims.items() if claim.owner != owner] + list(self.dirty)

    def dirty_of(self, run: str) -> list[str]:
        """Workers that still hold something of a run whose driver is gone."""
        return [a for a, claim in self.dirty.items() if claim.run == run]

    def remove_client(self, scheduler: Any, client: str) -> None:
        """A client is gone. What it had not given back is started anew."""
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
        for id in self.jobs:  # a task that may only run on workers that are gone would never run again
            if (task := scheduler.tasks.get(KEY + id)) is not None:
                task.worker_restrictions = None

    def slot(self, id: str, address: str) -> bool:
        """Whether a job's driver may stay on the worker it has come to. If not, it is sent to a free one once it asks
        to be rescheduled."""
        taken = {*self.claims, *self.dirty}
        if address in taken:
            free = {a for a in self._scheduler.workers if a not in taken}
            self._scheduler.tasks[KEY + id].worker_restrictions = free or None
            job = self.jobs[id]
            job.state, job.reported_at = "waiting", time.time()
            job.why = f"its driver needs a free worker process; all {len(taken)} there are belong to runs"
            return False
        return True

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """A driver's task that failed as a task: its workers died too often, or it could not even be loaded."""
        if finish == "erred" and isinstance(key, str) and key.startswith(KEY):
            job, task = self.jobs.get(key.removeprefix(KEY)), self._scheduler.tasks.get(key)
            if job is not None and job.state not in ENDED:
                job.state, job.why = "failed", str(getattr(task, "exception_text", "")) or "its task failed"

    async def _restart(self, addresses: Sequence[str]) -> None:
        # Those without a nanny are shut down: whoever started them can start them again.
        with contextlib.suppress(Exception):
            await self._scheduler.restart_workers(
                list(addresses), timeout=RESTART_S, wait_for_workers=False, on_error="return",
                stimulus_id="staleflow-restart",
            )  # fmt: skip

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit(self, id: str, name: str, run_dir: str, steps: int) -> None:
        """Enter a job. Twice is once; a run of the same name that has ended makes place."""
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
        """What a job's driver has to say: steps and lines since it last said something. Answers with why it is to stop,
        empty if it is not."""
        job = self.jobs.get(id)
        if job is None:  # forgotten, or the scheduler is another one by now: nobody asks for it here
            return ""
        for step in steps:
            job.history[int(step["step"])] = dict(step)
        if steps and (task := self._scheduler.tasks.get(KEY + id)) is not None:
            task.suspicious = 0  # workers that died under it before it came further are forgiven
        job.state, job.why, job.reported_at = state, why, time.time()
        if status:
            job.status = dict(status)
        job.lines.extend(lines)
        job.num_lines += len(lines)
        return job.stop

    def ask_to_stop(self, id: str, why: str) -> str:
        """Ask a job to stop at its next step; answers with the state it is in."""
        job = self.jobs[id]
        job.stop = job.stop or why
        return job.state

    def all_jobs(self) -> list[Plain]:
        return [job.plain() for job in self.jobs.values()]

    def lines(self, id: str, after: int) -> tuple[int, list[str]]:
        """Log lines from number `after` on, as far as they are kept, and the number that comes next."""
        job = self.jobs[id]
        missing = max(0, min(job.num_lines - after, len(job.lines)))
        return job.num_lines, list(job.lines)[len(job.lines) - missing :]


async def ask(client: Any, verb: str, **arguments: Any) -> Any:
    """Ask the board of the scheduler that a Dask client is connected to."""
    return await getattr(client.scheduler, OPERATION)(verb=verb, **arguments)

"""What the trajectory server has to store, told to it in the order decided, and how far training may be ahead of it.

Invariants:
- Retirements and steps reach the server in the order in which they were put here, one after the other.
- At most MAX_UNCOMMITTED trained steps are not stored: a further one begins only when there is room for it. So one of
  the resume points that are kept (stores/weights/resume_points.py) is always of a version that the store has reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination.commands import Discard
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.errors import ActorFailed, ActorLost
from staleflow.stores.trajectories.records import StepRecord
from staleflow.stores.weights.resume_points import KEPT

MAX_UNCOMMITTED = KEPT - 1
"""Trained steps that may be unstored: the versions of all resume points but the oldest that is kept."""
SUBJECTS = {"end": "the run's end", "refusal": "that an instance is out of service"}
"""What commits of other kinds than steps store."""
LOOK_S = 2.0
"""Seconds between two looks whether the server tries a commit again."""


class CommitQueue:
    """The queue of one run's retirements and commits. stored: is told each record and the metrics of its batch. say:
    is told how long a commit has taken, whenever that is another deadlines.call_s, and why the store's bucket fails."""

    def __init__(
        self,
        actors: Actors,
        deadlines: DeadlineConfig,
        stored: Callable[[StepRecord, dict[str, float]], None],
        say: Callable[[str], None],
    ) -> None:
        self._actors = actors
        self._deadlines = deadlines
        self._stored = stored
        self._say = say
        self._queue: asyncio.Queue[Discard | StepRecord] = asyncio.Queue()
        self._num_uncommitted = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether a further training step has to wait."""
        return not self._room.is_set()

    def put(self, item: Discard | StepRecord) -> None:
        """Queue how trajectories ended, or a record to commit."""
        if isinstance(item, StepRecord):
            self._count(+1)
        self._queue.put_nowait(item)

    async def wait_for_room(self) -> None:
        """Wait until a further step may be trained."""
        await self._room.wait()

    async def work(self) -> None:
        """Tell the server what is queued, for ever."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Discard):
                await self._actors.ask("server", "retire", item.endings, item.versions)
            else:
                self._stored(item, await self._commit(item))
                self._count(-1)
            self._queue.task_done()

    async def finished(self) -> None:
        """Wait until everything that was put is stored."""
        await self._queue.join()

    def _count(self, change: int) -> None:
        self._num_uncommitted += change
        if self._num_uncommitted < MAX_UNCOMMITTED:
            self._room.set()
        else:
            self._room.clear()

    async def _commit(self, record: StepRecord) -> dict[str, float]:
        slow = asyncio.ensure_future(self._report_slow(record))
        try:
            metrics: dict[str, float] = await self._actors.ask("server", "commit", record, deadline="commit_s")
            return metrics
        finally:
            slow.cancel()

    async def _report_slow(self, record: StepRecord) -> None:
        """Say how long a commit takes every deadlines.call_s, and why as soon as the store's bucket fails."""
        call_s, taken_s, said_s, outage = self._deadlines.call_s, 0.0, 0.0, ""
        subject = f"step {record.step}" if record.kind == "step" else SUBJECTS[record.kind]
        while True:
            await asyncio.sleep(min(LOOK_S, call_s - (taken_s - said_s)))
            taken_s += min(LOOK_S, call_s - (taken_s - said_s))
            before, outage = outage, await self._outage()
            if taken_s - said_s < call_s and bool(outage) == bool(before):
                continue
            said_s = taken_s
            goes_on = f"sampling goes on within the staleness bound, training up to {MAX_UNCOMMITTED} steps ahead"
            why = f": {outage}; it is tried again" if outage else ""
            self._say(
                f"committing {subject} for {taken_s:g} s{why} (deadlines.commit_s allows "
                f"{self._deadlines.commit_s:g}); {goes_on}"
            )

    async def _outage(self) -> str:
        """Why the server tries a commit again; empty if it does not, or does not answer."""
        try:
            return str(await self._actors.ask_once("server", "outage"))
        except (ActorLost, ActorFailed):
            return ""

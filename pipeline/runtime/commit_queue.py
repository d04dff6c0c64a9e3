"""What the trajectory server has to store, told to it in the order decided, and how far training may be ahead of it.

Invariants:
- Retirements and steps reach the server in the order in which they were put here, one after the other.
- At most MOST_UNCOMMITTED trained steps are not stored: a further one begins only when there is room for it. So one of
  the resume points that are kept (stores/weights/resume_points.py) is always of a version that the store has reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination.commands import Retire
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.trajectories.records import StepRecord
from staleflow.stores.weights.resume_points import KEPT

MOST_UNCOMMITTED = KEPT - 1
"""Trained steps that may be unstored: the versions of all resume points but the oldest that is kept."""


class Commits:
    """The queue of one run's retirements and commits. stored: is told each record and the metrics of its batch. say:
    is told how long a commit has taken, whenever that is another deadlines.call_s."""

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
        self._queue: asyncio.Queue[Retire | StepRecord] = asyncio.Queue()
        self._num_uncommitted = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether a further training step has to wait."""
        return not self._room.is_set()

    def put(self, item: Retire | StepRecord) -> None:
        """Queue how trajectories ended, or a record to commit."""
        if isinstance(item, StepRecord):
            self._count(+1)
        self._queue.put_nowait(item)

    async def room(self) -> None:
        """Wait until a further step may be trained."""
        await self._room.wait()

    async def work(self) -> None:
        """Tell the server what is queued, for ever."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Retire):
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
        if self._num_uncommitted < MOST_UNCOMMITTED:
            self._room.set()
        else:
            self._room.clear()

    async def _commit(self, record: StepRecord) -> dict[str, float]:
        telling = asyncio.ensure_future(self._tell_slow(record))
        try:
            metrics: dict[str, float] = await self._actors.ask("server", "commit", record, deadline="commit_s")
            return metrics
        finally:
            telling.cancel()

    async def _tell_slow(self, record: StepRecord) -> None:
        taken_s = 0.0
        while True:
            await asyncio.sleep(self._deadlines.call_s)
            taken_s += self._deadlines.call_s
            what = f"step {record.step}" if record.kind == "step" else "the run's end"
            self._say(
                f"committing {what} for {taken_s:g} s (deadlines.commit_s allows {self._deadlines.commit_s:g}); "
                f"training goes on up to {MOST_UNCOMMITTED} steps ahead"
            )

"""What the trajectory server has to store, told to it in the order decided.

Invariant: retirements and steps reach the server in the order in which they were put here, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.coordination.commands import Retire
from pipeline.runtime.actors import Actors
from stores.base import StepRecord


class Commits:
    """The queue of one run's retirements and commits. stored: is told each record and the metrics of its batch."""

    def __init__(self, actors: Actors, stored: Callable[[StepRecord, dict[str, float]], None]) -> None:
        self._actors = actors
        self._stored = stored
        self._queue: asyncio.Queue[Retire | StepRecord] = asyncio.Queue()

    def put(self, item: Retire | StepRecord) -> None:
        """Queue how trajectories ended, or a record to commit."""
        self._queue.put_nowait(item)

    async def work(self) -> None:
        """Tell the server what is queued, for ever."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Retire):
                await self._actors.ask("server", "retire", item.endings, item.versions)
            else:
                self._stored(item, await self._actors.ask("server", "commit", item))
            self._queue.task_done()

    async def finished(self) -> None:
        """Wait until everything that was put is stored."""
        await self._queue.join()

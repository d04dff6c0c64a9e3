"""Runs the spool's operations in one thread beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import Entry
from staleflow.stores.trajectory import GroupId
from staleflow.stores.weights.resume_points import ResumePoints


class AsyncSpool:
    """Runs the operations of one spool in a thread, in the order of the calls."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    def append(self, entries: Sequence[Entry]) -> asyncio.Future[bool]:
        """Write entries. Returns a future of the result of `Spool.append`."""
        loop = asyncio.get_running_loop()
        if entries:
            return loop.run_in_executor(self._thread, self._spool.append, entries)
        written: asyncio.Future[bool] = loop.create_future()
        written.set_result(True)
        return written

    async def mark_stored(self, step: int, groups: Iterable[GroupId]) -> None:
        """Forget the entries of groups that are stored; see `Spool.mark_stored`."""
        await self._run(lambda: self._spool.mark_stored(step, groups))

    async def forget_committed(self, step: int, groups: Iterable[GroupId], resume_points: ResumePoints) -> None:
        """Forget the entries of a commit's groups, and remove the spool's files that none of the latest resume points
        needs."""

        def prune() -> None:
            self._spool.mark_stored(step, groups)
            self._spool.rotate(min(resume_points.latest(), default=None))

        await self._run(prune)

    async def clear(self) -> None:
        """Forget all entries."""
        await self._run(self._spool.clear)

    def close(self) -> None:
        """Wait until all entries are written, and end the thread."""
        self._thread.shutdown(wait=True)

    async def _run(self, operation: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, operation)

"""Runs operations of the store, and of the spool, each in a thread beside an event loop. Operations of the store are
retried while its bucket fails.

A bucket that returns errors, does not reply or rejects expired credentials may work again in minutes. Until then a
commit waits, and everything else continues. Each attempt of a commit reads the credentials again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import Entry
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, GroupId
from staleflow.stores.weights.resume_points import ResumePoints

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
"""Seconds between two attempts: the first, doubled each time up to the longest. Icechunk itself tries for half a minute
before an attempt fails, if the bucket is busy or resets connections, and not at all if it refuses the credentials."""


async def retry_while_bucket_fails(
    attempt: Callable[[], Awaitable[T]], timeout_s: float, on_failure: Callable[[str], None]
) -> T:
    """Retry an operation while the store's bucket fails. Raises StoreError with the cause if it still fails after
    `timeout_s` seconds. on_failure: called with the cause of each failure."""
    now_s = asyncio.get_running_loop().time
    started_s, pause_s = now_s(), FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except StoreUnavailable as error:
            on_failure(str(error))
            remaining_s = timeout_s - (now_s() - started_s)
            if remaining_s <= 0:
                raise StoreError(
                    f"{error}; tried again for {timeout_s:g} s (deadlines.commit_s); earlier commits are intact: "
                    "check the bucket and its credentials, and resume the run"
                ) from error
        await asyncio.sleep(min(pause_s, remaining_s))
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class StoreThread:
    """Runs the operations of one store in one thread. commit_s: seconds for which an operation is retried while the
    bucket fails."""

    def __init__(self, store: VersionedStore, commit_s: float) -> None:
        self._store = store
        self._commit_s = commit_s
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._failures: dict[Callable[[], object], str] = {}
        """Why the bucket failed each request that is being retried."""

    @property
    def outage(self) -> str:
        """Why the bucket failed a request that is being retried; empty if there is none."""
        return next(iter(self._failures.values()), "")

    async def commit(self, record: CommitRecord, rows: Sequence[EndedTrajectory]) -> None:
        """Store a commit. Raises StoreError."""
        await self._run(lambda: self._store.commit(record, rows))

    async def consumed_rows(self, step: int) -> list[EndedTrajectory]:
        """Return the rows that a stored step consumed, in its order. Raises StoreError."""
        return await self._run(lambda: list(self._store.trajectories(step)))

    async def chain_entry(self, step: int) -> str:
        """Return the entry of a stored step in the run's chain. Raises StoreError."""
        return await self._run(lambda: self._store.chain_entry(step))

    def close(self) -> None:
        """Wait for running operations, and end the thread."""
        self.executor.shutdown(wait=True)

    async def _run(self, request: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()

        def record_failure(cause: str) -> None:
            if not self._failures:
                logger.warning("%s; it is tried again for %g s (deadlines.commit_s)", cause, self._commit_s)
            self._failures[request] = cause

        try:
            return await retry_while_bucket_fails(
                lambda: loop.run_in_executor(self.executor, request), self._commit_s, record_failure
            )
        finally:
            self._failures.pop(request, None)


class AsyncSpool:
    """Runs the operations of one spool in a thread, in the order of the calls."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    def append(self, entries: Sequence[Entry]) -> asyncio.Future[bool]:
        """Write entries. Returns a future of the result of `Spool.append`, which is done after all earlier writes, even
        without entries: a repeated call has none, but those of the first call may not be written yet."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._spool.append, entries)

    async def mark_stored(self, step: int, groups: Iterable[GroupId]) -> None:
        """Record that the entries of groups are stored; see `Spool.mark_stored`."""
        await self._run(lambda: self._spool.mark_stored(step, groups))

    async def forget_committed(
        self, step: int, groups: Iterable[GroupId], resume_points: ResumePoints, first_version: int | None
    ) -> None:
        """Record that the entries of a commit's groups are stored, and remove the spool's files that none of the latest
        resume points needs. first_version: the version to resume from before there is a point; None if there will be
        none."""

        def prune() -> None:
            self._spool.mark_stored(step, groups)
            self._spool.rotate(min(resume_points.latest_versions(), default=first_version))

        await self._run(prune)

    async def clear(self) -> None:
        """Forget all entries."""
        await self._run(self._spool.clear)

    def close(self) -> None:
        """Wait until all entries are written, and end the thread."""
        self._thread.shutdown(wait=True)

    async def _run(self, operation: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, operation)

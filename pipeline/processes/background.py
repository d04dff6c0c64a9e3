"""Concurrent tasks: background tasks of a run, several calls whose results are awaited together, and cleanups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """Background tasks of one run. on_failure: called with the error of each task that fails."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task. name: its name in the log if it fails."""

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("%s failed", name, exc_info=error)
                self._on_failure(error)

        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(on_done)


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Run all coroutines concurrently. Returns their results in order. At the first failure, cancels the others and
    raises it."""
    tasks = [asyncio.ensure_future(w) for w in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def run_to_end(cleanup: Awaitable[None]) -> None:
    """Run a cleanup to its end, and ignore cancellations meanwhile: the caller raises the first one afterwards."""
    task = asyncio.ensure_future(cleanup)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()

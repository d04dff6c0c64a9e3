"""Work that runs side by side: that of a run which nobody waits for, and several calls whose results are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """The tasks of one run that work beside its main loop. failed: is told the error of each that fails."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task. what: for the log, should it fail."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("%s failed", name, exc_info=error)
                self._failed(error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(ended)


async def gather_or_cancel(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all of these at once; returns their results in order. At the first failure cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

"""Runs coroutines from synchronous code, in a thread with its own event loop, because a notebook's loop is already
running."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def call(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Returns its result and raises its errors."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """Yield the items of an asynchronous iterator, which is cancelled when the iteration is abandoned."""
    ready: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()

    async def pump() -> None:
        async for item in items:
            ready.put((item,))

    def work() -> None:
        try:
            loop.run_until_complete(task)
            ready.put(None)
        except BaseException as error:  # noqa: BLE001  raised where the items are read
            ready.put(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())

    task = loop.create_task(pump())
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)  # changes nothing if it has ended
        thread.join()
        loop.close()

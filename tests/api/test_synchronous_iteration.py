"""Asynchronous iterators used by synchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import TypeVarTuple

import pytest

from staleflow.pipeline.api.submitting import iterate_async

Arguments = TypeVarTuple("Arguments")


async def numbers() -> AsyncIterator[int]:
    for i in range(3):
        yield i


class LateLoop(asyncio.SelectorEventLoop):
    """An event loop that receives calls as late as possible, after it is closed if it is closed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        self.closed.wait(0.5)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_an_exhausted_iterator_does_not_call_a_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", LateLoop)
    assert list(iterate_async(numbers())) == [0, 1, 2]


def test_abandoning_an_iterator_cancels_the_asynchronous_iterator() -> None:
    ended = threading.Event()

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            ended.set()

    for item in iterate_async(endless()):
        assert item == 1
        break
    assert ended.wait(10.0)


def test_an_error_of_an_asynchronous_iterator_is_raised() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(iterate_async(broken()))

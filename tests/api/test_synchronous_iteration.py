"""Asynchronous iterators used by synchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import Context
from typing import TypeVarTuple

import pytest

from staleflow.pipeline.api.submitting import iterate_async

Arguments = TypeVarTuple("Arguments")


async def numbers() -> AsyncGenerator[int, None]:
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

    async def endless() -> AsyncGenerator[int, None]:
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


def test_abandoning_an_iterator_leaves_its_context_managers_in_order(caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []

    @contextlib.asynccontextmanager
    async def context(name: str) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            left.append(name)

    async def endless() -> AsyncGenerator[int, None]:
        async with context("outer"), context("inner"):
            while True:
                yield 1

    for _ in iterate_async(endless()):
        break
    assert (left, caplog.messages) == (["inner", "outer"], [])


def test_an_error_of_an_asynchronous_iterator_is_raised() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(iterate_async(broken()))

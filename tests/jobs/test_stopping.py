"""Requests to stop a run: signals and calls from other threads."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import NoReturn

import pytest

from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest, stopped_by_signals


async def ignore_cancellation() -> None:
    """Await code that ignores a cancellation, as new connections may."""
    signal.raise_signal(signal.SIGINT)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


def stop_at_once() -> NoReturn:
    raise AssertionError("one signal does not end the process at once")


def test_a_signal_whose_cancellation_was_swallowed_stops_the_run_later() -> None:
    async def run() -> tuple[list[str], list[str]]:
        received: list[str] = []
        stopped: list[str] = []
        with StopRequest() as request, stopped_by_signals(request, received.append, stop_at_once):
            await ignore_cancellation()
            request.set_handler(stopped.append)
        return received, stopped

    received, stopped = asyncio.run(run())
    assert received == ["interrupted: stopping; Ctrl-C again ends at once"]
    assert stopped == ["interrupted"]


def test_a_signal_before_the_run_ends_the_context() -> None:
    async def run() -> None:
        with StopRequest() as request, stopped_by_signals(request, lambda _: None, stop_at_once):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(StoppedBeforeStart, match="terminated"):
        asyncio.run(run())


def test_a_signal_during_a_run_stops_it() -> None:
    async def run() -> str:
        with StopRequest() as request, stopped_by_signals(request, lambda _: None, stop_at_once):
            stopped = asyncio.get_running_loop().create_future()
            request.set_handler(stopped.set_result)
            signal.raise_signal(signal.SIGINT)
            return str(await stopped)

    assert asyncio.run(run()) == "interrupted"


def test_a_request_from_another_thread_stops_the_run_and_a_second_one_at_once() -> None:
    request = StopRequest()

    async def run() -> list[str]:
        with request:
            requests: list[str] = []
            twice = asyncio.Event()

            def stop(reason: str) -> None:
                requests.append(reason)
                if len(requests) == 2:
                    twice.set()

            request.set_handler(stop)

            def ask_twice() -> None:
                request.stop("enough")
                request.stop("now")

            thread = threading.Thread(target=ask_twice)
            thread.start()
            await twice.wait()
            thread.join()
            return requests

    assert asyncio.run(run()) == ["enough", "enough"]


def test_a_request_before_the_run_ends_it_and_one_after_it_changes_nothing() -> None:
    request = StopRequest()
    request.stop("never mind")

    async def run() -> None:
        with request:
            await asyncio.sleep(60)

    with pytest.raises(StoppedBeforeStart, match="never mind"):
        asyncio.run(run())
    request.stop("too late")
    assert request.reason == "never mind"

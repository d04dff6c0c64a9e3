"""Signals by which a run is stopped from where it was started."""

from __future__ import annotations

import asyncio
import signal

import pytest

from staleflow.pipeline.jobs.stopping import Interrupted, Signals


async def swallowing() -> None:
    """Await what ignores a cancellation, as connections that come up just then may."""
    signal.raise_signal(signal.SIGINT)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


def at_once() -> None:
    raise AssertionError("one signal does not end the process at once")


def test_a_signal_whose_cancellation_was_ignored_stops_the_run_once_there_is_one() -> None:
    async def run() -> tuple[list[str], list[str]]:
        told: list[str] = []
        stopped: list[str] = []
        with Signals(told.append, at_once) as signals:
            await swallowing()
            signals.attend(stopped.append)
        return told, stopped

    told, stopped = asyncio.run(run())
    assert told == ["interrupted: stopping; Ctrl-C again ends at once"]
    assert stopped == ["interrupted"]


def test_a_signal_before_there_is_a_run_ends_the_context() -> None:
    async def run() -> None:
        with Signals(lambda _: None, at_once):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(Interrupted, match="terminated"):
        asyncio.run(run())


def test_a_signal_in_a_run_stops_it() -> None:
    async def run() -> str:
        with Signals(lambda _: None, at_once) as signals:
            stopped = asyncio.get_running_loop().create_future()
            signals.attend(stopped.set_result)
            signal.raise_signal(signal.SIGINT)
            return str(await stopped)

    assert asyncio.run(run()) == "interrupted"

"""Local worker processes: cancelled starts and interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from distributed import LocalCluster, Nanny
from distributed.core import Status

from staleflow.pipeline.processes import local_cluster


def cluster_made() -> bool:
    return bool(clusters())


def clusters() -> list[LocalCluster]:
    return [each for each in LocalCluster._instances if isinstance(each, LocalCluster) and each.status != Status.closed]


def nanny_made() -> bool:
    return bool(nannies())


def nannies() -> list[Nanny]:
    return [each for each in Nanny._instances if each.status != Status.closed]


def process_made() -> bool:
    return any(nanny.pid is not None for nanny in nannies())


@pytest.mark.parametrize(("reached", "times"), [(cluster_made, 1), (nanny_made, 2), (process_made, 1)])
def test_a_cancelled_start_leaves_no_process(reached: Callable[[], bool], times: int) -> None:
    async def started_and_cancelled() -> None:
        starting = asyncio.ensure_future(local_cluster.start(2, 1, preload_modules=(), dashboard=False))
        while not reached():
            assert not starting.done()
            await asyncio.sleep(0)
        pids = [nanny.pid for nanny in nannies() if nanny.pid is not None]
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not nannies()
        assert not clusters()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    asyncio.run(started_and_cancelled())


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupt_during_the_fork_server_start_is_deferred(others: int) -> None:
    """Other threads do not block the signal, and the system may deliver it to any of them."""
    reached, ended = [], threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(others)]

    def interrupted() -> None:
        with local_cluster._sigint_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # until another thread has been interrupted
            reached.append("the end")

    # What a shell starts in the background ignores interrupts, and so may this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)
    assert reached


def test_the_fork_server_and_workers_ignore_interrupts() -> None:
    """They are in the process group of the terminal, and the caller ends them."""

    async def ignored() -> list[str]:
        cluster = await local_cluster.start(1, 1, preload_modules=(), dashboard=False)
        try:
            (pid,) = [nanny.pid for nanny in nannies()]
            values = [
                line
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line[:6] in ("SigBlk", "SigIgn")
            ]
            return [line.split()[1] for line in values]
        finally:
            await cluster.close()

    blocked, ignored_ = (int(mask, 16) for mask in asyncio.run(ignored()))
    bit = 1 << (signal.SIGINT - 1)
    assert not blocked & bit
    assert ignored_ & bit

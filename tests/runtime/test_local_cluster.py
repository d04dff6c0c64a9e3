"""Worker processes on this machine: what is left of a start that was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest
from distributed import LocalCluster, Nanny
from distributed.core import Status

from pipeline.runtime import local_cluster


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


@pytest.mark.parametrize("reached", [cluster_made, nanny_made, process_made])
def test_a_start_that_is_cancelled_leaves_no_process(reached: Callable[[], bool]) -> None:
    async def started_and_cancelled() -> None:
        starting = asyncio.ensure_future(local_cluster.start(2, 1, modules=(), dashboard=False))
        while not reached():
            assert not starting.done()
            await asyncio.sleep(0)
        pids = [nanny.pid for nanny in nannies() if nanny.pid is not None]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not nannies()
        assert not clusters()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    asyncio.run(started_and_cancelled())

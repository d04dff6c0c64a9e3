"""Store operations off the event loop are retried while the bucket fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.tasks.actors.store_thread import MAX_PAUSE_S, StoreThread
from tests.support import virtual_time

RUN = virtual_time.run


class FailingStore:
    """A store whose bucket fails until `back_s` on the clock of the loop."""

    def __init__(self, back_s: float) -> None:
        self._back_s = back_s
        self.tried_s: list[float] = []

    def chain_entry(self, step: int) -> str:
        self.tried_s.append(asyncio.get_running_loop().time())
        if self.tried_s[-1] < self._back_s:
            raise StoreUnavailable("503 Slow Down")
        return f"entry {step}"

    def trajectories(self, step: int) -> list[Any]:
        return []


async def test_a_failed_operation_is_retried_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    bucket: Any = FailingStore(60.0)
    thread = StoreThread(bucket, commit_s=600.0)
    entry = asyncio.ensure_future(thread.chain_entry(3))
    await asyncio.sleep(50.0)
    assert thread.outage == "503 Slow Down"
    assert await thread.consumed_rows(0) == []
    assert thread.outage == "503 Slow Down", "an operation still waits"
    assert await entry == "entry 3"
    assert thread.outage == ""
    assert bucket.tried_s == pytest.approx([0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 30.5, 45.5, 60.5])
    assert MAX_PAUSE_S == 15.0
    assert caplog.messages == ["503 Slow Down; it is tried again for 600 s (deadlines.commit_s)"]
    thread.close()


@pytest.mark.parametrize(("commit_s", "last_s"), [(7.5, 7.5), (7.4, 7.4)])
async def test_an_operation_fails_after_commit_s_of_retries(commit_s: float, last_s: float) -> None:
    bucket: Any = FailingStore(60.0)
    thread = StoreThread(bucket, commit_s)
    with pytest.raises(StoreError, match=rf"503 Slow Down; tried again for {commit_s:g} s .*resume the run"):
        await thread.chain_entry(0)
    assert bucket.tried_s[-1] == last_s
    thread.close()

"""Operations of the spool thread run in the order of the calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import Entry
from staleflow.stores.trajectory import GroupId, PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors.store_thread import AsyncSpool


async def test_a_commit_marks_groups_as_stored_and_rotates_the_spool(tmp_path: Path) -> None:
    done: list[Any] = []

    class NotedSpool(Spool):
        def mark_stored(self, step: int, groups: Any) -> None:
            done.append((step, groups))

        def rotate(self, oldest: int | None) -> None:
            done.append(oldest)

    spool, points = AsyncSpool(NotedSpool(tmp_path, group_size=4)), ResumePoints(tmp_path / "resume", 2)
    await spool.forget_committed(0, [], points, 0)
    await spool.forget_committed(0, [], points, None)
    with points.writing(PolicyVersion(2)) as part:
        part.touch()
    await spool.forget_committed(1, [GroupId(3)], points, 0)
    for version in (3, 4, 5):
        with points.writing(PolicyVersion(version)) as part:
            part.touch()
    await spool.forget_committed(2, [], points, 0)
    spool.close()
    assert points.versions() == [2, 3, 4, 5]
    assert done[:4] == [(0, []), 0, (0, []), None], "before the first point, a run resumes from version 0"
    assert done[4:] == [(1, [GroupId(3)]), 2, (2, []), 3], "entries since a point that is kept for good are not needed"


async def test_operations_run_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """The first operation blocks until all others were called; none may start before it has finished."""
    asked, done = threading.Event(), list[str]()

    class SlowSpool(Spool):
        def append(self, entries: Sequence[Entry]) -> bool:
            assert asked.wait(60)
            done.append("append")
            return True

        def mark_stored(self, step: int, groups: Any) -> None:
            done.append("stored")

        def clear(self) -> None:
            done.append("clear")

    spool = AsyncSpool(SlowSpool(tmp_path, group_size=4))
    entry: Any = object()
    pending: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(spool.append([entry])),
        asyncio.ensure_future(spool.append([])),
        asyncio.ensure_future(spool.mark_stored(0, [GroupId(0)])),
        asyncio.ensure_future(spool.clear()),
    ]
    # A second thread would run the others now. It cannot be awaited, so give it time.
    for _ in range(100):
        await asyncio.sleep(0)
    await asyncio.wait(pending[1:], timeout=0.2)
    early = list(done)
    asked.set()
    await asyncio.gather(*pending)
    spool.close()
    assert early == []
    assert done == ["append", "append", "stored", "clear"]

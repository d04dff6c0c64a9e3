"""The task cache keeps the records of groups in flight only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from staleflow.stores.trajectory import GroupId
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.emulation.workload import RandomWorkload, WorkloadConfig
from staleflow.tasks.sources.prompts import EmulatedPrompts


async def test_the_record_of_a_group_that_ends_while_records_are_read_is_not_kept() -> None:
    """It was added again after the group was forgotten, and stayed until the run's end."""
    tasks = {GroupId(0): (0, 0), GroupId(1): (0, 1)}

    def tasks_of(groups: Iterable[GroupId]) -> dict[GroupId, tuple[int, int]]:
        return {group: tasks[group] for group in groups if group in tasks}

    workload = RandomWorkload(WorkloadConfig(), members_per_group=2, max_tokens=100, seed=0)
    cache = TaskCache(EmulatedPrompts(workload), (), tasks_of)
    reading = asyncio.ensure_future(cache.records(list(tasks)))
    await asyncio.sleep(0)  # the records are being read in a thread
    del tasks[GroupId(1)]
    cache.forget([GroupId(1)])
    assert set(await reading) == {0, 1}
    assert set(cache._records) == {0}
    cache.close()

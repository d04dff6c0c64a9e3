"""The tasks of a run's groups, trained on or evaluated: their prompts and records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from staleflow.stores.trajectory import GroupId, IntArray, is_evaluation
from staleflow.tasks.rendering.task_source import Record, Task
from staleflow.tasks.sources.evaluation_items import EvaluationItem, EvaluationItems, ItemView
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.prompts import HeldOut, Prompts

T = TypeVar("T")


class DrawnPrompt(NamedTuple):
    """An encoded prompt. tokens: [tokens] int32 token ids. row: its dataset row; see Task."""

    tokens: IntArray
    row: int


class TaskCache:
    """Draws tasks from their source in a thread of its own, and keeps the records of live groups for the verifier."""

    def __init__(self, prompts: Prompts, sets: Sequence[EvaluationSet]) -> None:
        self._prompts = prompts
        self._items = EvaluationItems(prompts, sets)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._records: dict[GroupId, Record] = {}

    async def draw(self, start: int, num_groups: int) -> list[DrawnPrompt]:
        """Return the prompts of groups `start`, start + 1, ..."""

        def encode() -> list[tuple[Record, DrawnPrompt]]:
            tasks = self._prompts.tasks(range(start, start + num_groups))
            return [(task.record, self._encoded(task)) for task in tasks]

        drawn = await self._in_thread(encode)
        self._records |= {GroupId(group): record for group, (record, _) in enumerate(drawn, start)}
        return [prompt for _, prompt in drawn]

    async def records(self, groups: Iterable[GroupId]) -> dict[GroupId, Record]:
        """Return the records of groups. Those that an earlier process drew come from the source again."""
        needed = set(groups)
        records = {group: self._records[group] for group in needed if group in self._records}
        if missing := sorted(needed - set(records)):
            drawn = await self._in_thread(lambda: self._recalled(missing))
            self._records |= drawn
            records |= drawn
        return records

    async def items(self) -> list[ItemView]:
        """Return the items of each evaluation: one per response to sample."""
        return await self._in_thread(self._items.views)

    async def evaluated(self, groups: Iterable[GroupId]) -> dict[GroupId, EvaluationItem]:
        """Return the evaluation item of each group."""
        return await self._in_thread(lambda: {group: self._items.item(group) for group in groups})

    def _recalled(self, groups: Sequence[GroupId]) -> dict[GroupId, Record]:
        drawn = [group for group in groups if not is_evaluation(group)]
        records = {group: task.record for group, task in zip(drawn, self._prompts.tasks(drawn), strict=True)}
        return records | {group: self._items.item(group).record for group in groups if is_evaluation(group)}

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Drop the records of groups that have ended."""
        for group in groups:
            self._records.pop(group, None)

    async def held_out(self, count: int) -> list[HeldOut]:
        """Return the first `count` held-out prompts without duplicates; fewer if some are equal or the source has
        fewer."""

        def encode() -> list[HeldOut]:
            return [HeldOut(tokens=self._prompts.encode(t), record=t.record) for t in self._prompts.held_out(count)]

        return await self._in_thread(encode)

    def prompt(self, group: GroupId) -> DrawnPrompt:
        """Return a group's prompt."""
        return self._encoded(self._prompts.task(group))

    def _encoded(self, task: Task) -> DrawnPrompt:
        return DrawnPrompt(np.asarray(self._prompts.encode(task), np.int32), task.row)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

"""The tasks of the groups that a run draws, or evaluates the model on: their prompts and records, from their source."""

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
    """A prompt as it is sampled from. tokens: [tokens] its ids; row: see Task."""

    tokens: IntArray
    row: int


class TaskCache:
    """Draws the tasks of groups from a source, in a thread of its own, and keeps the records of live ones for their
    verifier."""

    def __init__(self, prompts: Prompts, sets: Sequence[EvaluationSet]) -> None:
        self._prompts = prompts
        self._items = EvaluationItems(prompts, sets)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._records: dict[GroupId, Record] = {}

    async def draw(self, first: int, num_groups: int) -> list[DrawnPrompt]:
        """The prompts of groups `first`, first + 1, ..."""

        def encode() -> list[tuple[Record, DrawnPrompt]]:
            tasks = self._prompts.tasks(range(first, first + num_groups))
            return [(task.record, self._encoded(task)) for task in tasks]

        drawn = await self._in_thread(encode)
        self._records |= {GroupId(group): record for group, (record, _) in enumerate(drawn, first)}
        return [prompt for _, prompt in drawn]

    async def records(self, groups: Iterable[GroupId]) -> dict[GroupId, Record]:
        """The records of groups: of those drawn by an earlier process, from the source again."""
        asked = set(groups)
        found = {group: self._records[group] for group in asked if group in self._records}
        if unknown := sorted(asked - set(found)):
            drawn = await self._in_thread(lambda: self._recalled(unknown))
            self._records |= drawn
            found |= drawn
        return found

    async def items(self) -> list[ItemView]:
        """What each evaluation asks for."""
        return await self._in_thread(self._items.views)

    async def evaluated(self, groups: Iterable[GroupId]) -> dict[GroupId, EvaluationItem]:
        """The items that these groups of evaluations answer."""
        return await self._in_thread(lambda: {group: self._items.item(group) for group in groups})

    def _recalled(self, groups: Sequence[GroupId]) -> dict[GroupId, Record]:
        drawn = [group for group in groups if not is_evaluation(group)]
        found = {group: task.record for group, task in zip(drawn, self._prompts.tasks(drawn), strict=True)}
        return found | {group: self._items.item(group).record for group in groups if is_evaluation(group)}

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Drop the records of groups that have ended."""
        for group in groups:
            self._records.pop(group, None)

    async def held_out(self, count: int) -> list[HeldOut]:
        """The first `count` held-out prompts without duplicates; fewer if some are equal or the source has fewer."""

        def encode() -> list[HeldOut]:
            return [HeldOut(tokens=self._prompts.encode(t), record=t.record) for t in self._prompts.held_out(count)]

        return await self._in_thread(encode)

    def prompt(self, group: GroupId) -> DrawnPrompt:
        """A group's prompt."""
        return self._encoded(self._prompts.task(group))

    def _encoded(self, task: Task) -> DrawnPrompt:
        return DrawnPrompt(np.asarray(self._prompts.encode(task), np.int32), task.row)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

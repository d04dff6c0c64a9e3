"""The tasks of a run's groups, in training and evaluation: their prompts and records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from staleflow.stores.trajectory import GroupId, IntArray, is_evaluation
from staleflow.tasks.rendering.task_source import Record, Task
from staleflow.tasks.sources.evaluation_items import EvaluationItem, EvaluationItems, ItemSummary
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.prompts import Prompts

T = TypeVar("T")


class EncodedPrompt(NamedTuple):
    """A prompt as token ids. tokens: [tokens] int32 token ids. row: its dataset row; see Task."""

    tokens: IntArray
    row: int


class TaskCache:
    """Draws tasks from their source in a thread, and keeps the records of live groups for the verifier."""

    def __init__(
        self,
        prompts: Prompts,
        eval_sets: Sequence[EvaluationSet],
        tasks_of: Callable[[Iterable[GroupId]], Mapping[GroupId, tuple[int, int]]],
    ) -> None:
        """tasks_of: returns (source, task) of groups in flight."""
        self._prompts, self._tasks_of = prompts, tasks_of
        self._items = EvaluationItems(prompts, eval_sets)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._records: dict[GroupId, Record] = {}

    async def draw(self, start: int, draws: Sequence[tuple[int, int]]) -> list[EncodedPrompt]:
        """Return the prompts of groups `start`, start + 1, ... draws: (source, task) of each, as in GroupDrawn."""

        def encode() -> list[tuple[Record, EncodedPrompt]]:
            return [
                (task.record, self._encode(task)) for task in self._draw_tasks(range(start, start + len(draws)), draws)
            ]

        encoded_tasks = await self._in_thread(encode)
        self._records |= {GroupId(group): record for group, (record, _) in enumerate(encoded_tasks, start)}
        return [prompt for _, prompt in encoded_tasks]

    async def records(self, groups: Iterable[GroupId]) -> dict[GroupId, Record]:
        """Return the records of groups. Records that are not in memory, because an earlier process drew them, are read
        from the source."""
        wanted_groups = set(groups)
        records = {group: self._records[group] for group in wanted_groups if group in self._records}
        if missing_groups := sorted(wanted_groups - set(records)):
            tasks = self._tasks_of(missing_groups)
            drawn = await self._in_thread(lambda: self._read_records(missing_groups, tasks))
            live_groups = self._tasks_of(missing_groups)  # some may have ended meanwhile
            self._records |= {group: record for group, record in drawn.items() if group in live_groups}
            records |= drawn
        return records

    async def item_summaries(self) -> list[ItemSummary]:
        """Return the items of each evaluation, one per response."""
        return await self._in_thread(self._items.summaries)

    async def evaluation_items(self, groups: Iterable[GroupId]) -> dict[GroupId, EvaluationItem]:
        """Return the evaluation item of each group."""
        return await self._in_thread(lambda: {group: self._items.item(group) for group in groups})

    def _read_records(
        self, groups: Sequence[GroupId], tasks: Mapping[GroupId, tuple[int, int]]
    ) -> dict[GroupId, Record]:
        training_groups = [group for group in groups if not is_evaluation(group)]
        group_tasks = self._draw_tasks(training_groups, [tasks[group] for group in training_groups])
        records = {group: task.record for group, task in zip(training_groups, group_tasks, strict=True)}
        return records | {group: self._items.item(group).record for group in groups if is_evaluation(group)}

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Drop the records of groups that have ended."""
        for group in groups:
            self._records.pop(group, None)

    async def held_out(self, count: int) -> list[tuple[int, ...]]:
        """Return the token ids of the first `count` held-out prompts without duplicates; fewer if some are equal or the
        source has fewer."""
        return await self._in_thread(lambda: [self._prompts.encode(task) for task in self._prompts.held_out(count)])

    def prompt(self, group: GroupId, source: int, task: int) -> EncodedPrompt:
        """Return a group's prompt. source, task: as in GroupDrawn."""
        (group_task,) = self._draw_tasks([group], [(source, task)])
        return self._encode(group_task)

    def _draw_tasks(self, groups: Sequence[int], draws: Sequence[tuple[int, int]]) -> list[Task]:
        """Draw the tasks of groups. Tasks of one source are drawn in one call."""
        tasks: dict[int, Task] = {}
        for source in sorted({source for source, _ in draws}):
            numbers = {
                group: group if task < 0 else task
                for group, (drawn_from, task) in zip(groups, draws, strict=True)
                if drawn_from == source
            }
            tasks |= zip(numbers, self._prompts.tasks(list(numbers.values()), source), strict=True)
        return [tasks[group] for group in groups]

    def _encode(self, task: Task) -> EncodedPrompt:
        return EncodedPrompt(np.asarray(self._prompts.encode(task), np.int32), task.row)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

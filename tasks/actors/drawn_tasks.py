"""The tasks of the groups that a run draws: their prompts and records, from the task source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stores.trajectory import GroupId, Trajectory, TrajectoryId
from tasks.prompts import HeldOut, Prompts
from tasks.task_source import Record

T = TypeVar("T")


class DrawnTasks:
    """Draws the tasks of groups from a source, in a thread of its own, and keeps the records of live ones for their
    verifier."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._records: dict[GroupId, Record] = {}

    async def draw(self, first: int, num_groups: int) -> list[tuple[int, ...]]:
        """The prompts' token ids of groups `first`, first + 1, ..."""

        def encode() -> list[tuple[Record, tuple[int, ...]]]:
            tasks = self._prompts.tasks(range(first, first + num_groups))
            return [(task.record, self._prompts.encode(task)) for task in tasks]

        drawn = await self._in_thread(encode)
        self._records |= {GroupId(group): record for group, (record, _) in enumerate(drawn, first)}
        return [tokens for _, tokens in drawn]

    async def records(self, groups: Iterable[GroupId]) -> dict[GroupId, Record]:
        """The records of groups: of those drawn by an earlier process, from the source again."""
        asked = set(groups)
        found = {group: self._records[group] for group in asked if group in self._records}
        if unknown := sorted(asked - set(found)):
            tasks = await self._in_thread(lambda: self._prompts.tasks(unknown))
            drawn = {group: task.record for group, task in zip(unknown, tasks, strict=True)}
            self._records |= drawn
            found |= drawn
        return found

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Drop the records of groups that have ended."""
        for group in groups:
            self._records.pop(group, None)

    async def held_out(self, count: int) -> list[HeldOut]:
        """The first `count` held-out prompts without duplicates; fewer if some are equal or the source has fewer."""

        def encode() -> list[HeldOut]:
            return [HeldOut(tokens=self._prompts.encode(t), record=t.record) for t in self._prompts.held_out(count)]

        return await self._in_thread(encode)

    async def unsampled(self, trajectories: Sequence[TrajectoryId], members: int) -> list[Trajectory]:
        """Trajectories that have nothing but their prompts. members: of a group."""

        def encode() -> list[Trajectory]:
            groups = {GroupId(i // members) for i in trajectories}
            prompts = {group: self.prompt(group) for group in groups}
            return [
                Trajectory(id=i, group=GroupId(i // members), prompt_tokens=prompts[GroupId(i // members)])
                for i in trajectories
            ]

        return await self._in_thread(encode)

    def prompt(self, group: GroupId) -> npt.NDArray[np.int32]:
        """The token ids of a group's prompt, [tokens]."""
        return np.asarray(self._prompts.encode(self._prompts.task(group)), np.int32)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

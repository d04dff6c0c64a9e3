"""Which rollout instances a run has: they join, are lost, and are replaced.

Invariants:
- The coordinator hears of each instance that it joined, and once at most that it was lost.
- A lost instance is an event and is replaced; any other failure of its link, such as the loss of the trajectory server
  that it asked, is not its own and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pipeline.config.schema import RunConfig
from pipeline.coordination.events import Event, InstanceJoined, InstanceLost
from pipeline.profiling.fit import CostWatch
from pipeline.runtime.actors import Actors, InstanceHandle
from pipeline.runtime.background import Background
from pipeline.runtime.base import NoFreeWorker
from pipeline.runtime.instance_link import InstanceLink
from stores import errors
from stores.trajectory import PolicyVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Membership:
    """The rollout instances of one run, each with its link. tell: called with every event, and with the error that ends
    the run. elapsed_s: seconds of the run so far."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        costs: CostWatch,
        background: Background,
        tell: Callable[[Event | BaseException], None],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._actors = actors
        self._costs = costs
        self._background = background
        self._tell = tell
        self._elapsed_s = elapsed_s
        self._resting = True

    def join_all(self) -> None:
        """Start the links of all instances that are placed, and place those that are missing."""
        self._resting = False
        for instance in list(self._actors.instances.values()):
            self._join(instance)
        placed = {instance.index for instance in self._actors.instances.values()}
        for index in set(range(self._config.rollout.instances)) - placed:
            self._background.spawn(self._replace(index), "replace")

    def rest(self) -> None:
        """Stop all links: from now on the instances answer somebody else."""
        self._resting = True
        for task in self.tasks():
            task.cancel()

    async def while_resting(self, index: int, work: Callable[[InstanceHandle], Awaitable[T]]) -> T:
        """Have instance `index` do something while the links rest; if it is lost, its replacement, or another one if
        there is no worker for it. Raises ActorLost after too many losses, NoFreeWorker if too few instances are left.
        """
        while True:
            instance = await self._present(index)
            try:
                return await work(instance)
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if not self._is_lost(instance, lost):
                    raise
                if instance.id in self._actors.instances:
                    self._actors.lose(instance.placed.name, lost, self._elapsed_s())

    async def pull_all(self, version: PolicyVersion) -> None:
        """Load a version, while the links rest, on every instance that serves another."""

        async def pull(instance: InstanceHandle) -> None:
            if instance.version != version:
                await self._actors.pull(instance, version)

        for instance in list(self._actors.instances.values()):
            await self.while_resting(instance.index, pull)

    async def _present(self, index: int) -> InstanceHandle:
        """Instance `index`, placed if it is missing, or any other if there is no worker for it."""
        for instance in self._actors.instances.values():
            if instance.index == index:
                return instance
        try:
            return await self._actors.place_instance(index)
        except NoFreeWorker as error:
            self._refuse_too_few(error)
            return next(iter(self._actors.instances.values()))

    @staticmethod
    def _is_lost(instance: InstanceHandle, lost: errors.ActorLost | errors.ActorFailed) -> bool:
        """Whether it is the instance that is lost, and not one that it asked. Parameter servers come back by
        themselves, except from a process that is gone."""
        return lost.who == instance.id or lost.who.startswith("parameters-")

    def tasks(self) -> list[asyncio.Task[None]]:
        """What the links run."""
        return [task for instance in self._actors.instances.values() for task in instance.tasks]

    def _join(self, instance: InstanceHandle) -> None:
        """Start an instance's link and report the instance to the coordinator, unless the links rest."""
        if self._resting:
            return
        config = self._config
        link = InstanceLink(instance, self._actors, config.deadlines, config.time_scale, self._costs, self._tell)
        for work in link.work():
            instance.tasks.append(asyncio.ensure_future(self._guard(instance, work)))
        engine = config.rollout.engine
        self._tell(
            InstanceJoined(
                instance=instance.id,
                version=instance.version,
                kv_capacity=engine.kv_tokens,
                max_running=engine.max_running,
            )
        )

    async def _guard(self, instance: InstanceHandle, work: Coroutine[Any, Any, None]) -> None:
        """A lost instance is an event and is replaced; any other failure ends the run."""
        try:
            try:
                await work
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if not self._is_lost(instance, lost):
                    raise
                if instance.id in self._actors.instances:  # else another of its tasks saw it first
                    for task in instance.tasks:
                        if task is not asyncio.current_task():
                            task.cancel()
                    self._tell(InstanceLost(instance=instance.id, why=str(lost)))
                    self._actors.lose(instance.placed.name, lost, self._elapsed_s())
                    self._background.spawn(self._replace(instance.index), "replace")
        except Exception as error:  # noqa: BLE001  carried to the main loop, which raises it
            self._tell(error)

    async def _replace(self, index: int) -> None:
        """Place a lost instance again, as soon as there is a worker for it. Raises NoFreeWorker if there is none for
        start_s and too few instances are left."""
        while True:
            try:
                self._join(await self._actors.place_instance(index))
                return
            except NoFreeWorker as error:
                self._refuse_too_few(error)

    def _refuse_too_few(self, error: NoFreeWorker) -> None:
        """Raise the error if too few instances are left."""
        left, rollout = len(self._actors.instances), self._config.rollout
        if left < rollout.min_instances:
            raise error
        logger.warning("the run goes on with %d of %d instances: %s", left, rollout.instances, error)

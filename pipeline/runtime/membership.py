"""Which rollout instances a run has: they join, are lost, and are replaced.

Invariants:
- The coordinator hears of each instance that it joined, and once at most that it was lost.
- A lost instance is an event and is replaced; any other failure of its link, such as the loss of the trajectory server
  that it asked, is not its own and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.coordination.events import Event, InstanceJoined, InstanceLost
from pipeline.profiling.fit import CostWatch
from pipeline.runtime.actors import Actors, InstanceHandle
from pipeline.runtime.background import Background
from pipeline.runtime.base import NoFreeWorker
from pipeline.runtime.instance_link import InstanceLink
from stores import errors

logger = logging.getLogger(__name__)


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

    def join_all(self) -> None:
        """Start the links of all instances that are placed."""
        for instance in list(self._actors.instances.values()):
            self._join(instance)

    def rest(self) -> None:
        """Stop all links: from now on the instances answer somebody else."""
        for task in self.tasks():
            task.cancel()

    def tasks(self) -> list[asyncio.Task[None]]:
        """What the links run."""
        return [task for instance in self._actors.instances.values() for task in instance.tasks]

    def _join(self, instance: InstanceHandle) -> None:
        """Start an instance's link and report the instance to the coordinator."""
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
                if lost.who != instance.id and not lost.who.startswith("parameters-"):
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
        rollout = self._config.rollout
        while True:
            try:
                self._join(await self._actors.place_instance(index))
                return
            except NoFreeWorker as error:
                left = len(self._actors.instances)
                if left < rollout.min_instances:
                    raise
                logger.warning("the run goes on with %d of %d instances: %s", left, rollout.instances, error)

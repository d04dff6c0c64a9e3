"""Which rollout instances a run has: they join, are lost, are replaced, and are retired.

A run begins with rollout.instances. Those are its places 0 and up; a place whose instance is lost or retired waits for
a free worker. Up to rollout.max_instances further places are taken by workers that are spare; a further place that
finds no worker any more is given up.

Invariants:
- No place has two instances, and none is placed twice at once.
- A retired instance has handed over all tokens of what it ran before it is closed. It is no loss.
- The coordinator hears of each instance that it joined, and once at most that it was lost.
- A lost instance is an event and is replaced; any other failure of its link, such as that of the trajectory server that
  it asked, is not its own and ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import Event, InstanceJoined, InstanceLeaving, InstanceLost
from staleflow.pipeline.processes.background import Background
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actors import SERVER, Actors
from staleflow.pipeline.runtime.instance_link import InstanceLink
from staleflow.stores import errors
from staleflow.stores.trajectory import InstanceId

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROW_S = 2.0
"""Seconds between two looks for a spare worker."""
EMPTY_S = 0.1
"""Seconds between two looks whether an instance that leaves is empty."""
SAVE_S = 10.0
"""Seconds in which instances deliver what they run, when a run stops."""


class Membership:
    """The rollout instances of one run, each with its link. emit: called with every event, and with the error that ends
    the run. has_left: whether the coordinator has emptied an instance that leaves. elapsed_s: seconds of the run so
    far."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        background: Background,
        emit: Callable[[Event | BaseException], None],
        has_left: Callable[[InstanceId], bool],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._actors = actors
        self._background = background
        self._emit = emit
        self._has_left = has_left
        self._elapsed_s = elapsed_s
        self._resting = True
        self._missing: set[int] = set()
        """Places for which an instance is being placed, or waits for a worker."""
        self._retiring: set[int] = set()

    @property
    def line(self) -> str:
        """How many instances the run has, and how many it misses, for people."""
        rollout, have = self._config.rollout, len(self._actors.instances)
        max_instances = max(rollout.instances, rollout.max_instances)
        line = f"{have} of {rollout.instances} instances" + (
            f", at most {max_instances}" if max_instances > rollout.instances else ""
        )
        placed = {instance.index for instance in self._actors.instances.values()}
        if missing := sorted(self._missing - placed):
            line += f"; waiting for {', '.join(f'rollout-{i}' for i in missing)}"
        if self._retiring:
            line += f"; retiring {', '.join(f'rollout-{i}' for i in sorted(self._retiring))}"
        return line

    async def grow(self) -> None:
        """Take further places, for ever, while there are spare workers."""
        rollout = self._config.rollout
        while True:
            await asyncio.sleep(GROW_S)
            used_indices = self._missing | self._retiring | {i.index for i in self._actors.instances.values()}
            further = next((i for i in range(rollout.instances, rollout.max_instances) if i not in used_indices), None)
            if further is not None and not self._resting and await self._actors.has_spare_worker():
                self._fill(further)

    def retire(self, worker: str) -> str:
        """Have the instance on a worker go: its trajectories go on elsewhere, then it closes and its worker leaves the
        cluster. worker: the instance's name, or the name or address of its worker. Returns what keeps it from going;
        empty if nothing does. Idempotent."""
        for instance in self._actors.instances.values():
            if worker in (instance.id, instance.placed.worker, instance.placed.address):
                break
        else:
            return f"{worker}: no rollout instance of this run is there; it has {', '.join(self._actors.instances)}"
        if instance.index in self._retiring:
            return ""
        if self._resting:
            return f"{worker}: the run does not train at the moment; ask again once it does"
        least = self._config.rollout.min_instances
        if len(self._actors.instances) - len(self._retiring) <= least:
            return f"{worker}: the run has no more than {least} instances (rollout.min_instances); start a worker first"
        self._retiring.add(instance.index)
        self._background.spawn(self._retire(instance), "retire")
        return ""

    async def _retire(self, instance: InstanceHandle) -> None:
        self._emit(InstanceLeaving(instance=instance.id))
        while not self._has_left(instance.id):
            await asyncio.sleep(EMPTY_S)
        self._retiring.discard(instance.index)
        if instance.id not in self._actors.instances or self._resting:
            return  # it was lost meanwhile, or the run ends
        for task in instance.tasks:
            task.cancel()
        self._emit(InstanceLost(instance=instance.id, why="it was retired"))
        await self._actors.retire(instance)
        logger.warning("%s on %s was retired", instance.id, instance.placed.address)
        if instance.index < self._config.rollout.instances:
            self._fill(instance.index)

    def _fill(self, index: int) -> None:
        """Place an instance that is missing, in the background."""
        self._missing.add(index)
        self._background.spawn(self._replace(index), "replace")

    def join_all(self) -> None:
        """Start the links of all instances that are placed, and place those that are missing."""
        self._resting = False
        for instance in list(self._actors.instances.values()):
            self._join(instance)
        placed = {instance.index for instance in self._actors.instances.values()}
        for index in set(range(self._config.rollout.instances)) - placed:
            self._fill(index)

    def stop_links(self) -> None:
        """Stop all links: from now on the instances answer somebody else."""
        self._resting = True
        for task in self.tasks():
            task.cancel()

    async def save_all(self) -> None:
        """Have the trajectory server given the tokens of all that is running. What an instance does not deliver in time
        starts again where it was last delivered."""

        async def flush(instance: InstanceHandle) -> None:
            with contextlib.suppress(errors.ActorLost, errors.ActorFailed):
                await self._actors.ask(instance.placed.name, "flush", SERVER, within_s=SAVE_S)

        await asyncio.gather(*(flush(instance) for instance in self._actors.instances.values()))

    @staticmethod
    def _is_lost(instance: InstanceHandle, lost: errors.ActorLost | errors.ActorFailed) -> bool:
        """Whether it is the instance that is lost, and not one that it asked. Parameter servers come back by
        themselves, except from a process that is gone."""
        return lost.actor == instance.id or lost.actor.startswith("parameters-")

    def tasks(self) -> list[asyncio.Task[None]]:
        """What the links run."""
        return [task for instance in self._actors.instances.values() for task in instance.tasks]

    def _join(self, instance: InstanceHandle) -> None:
        """Start an instance's link and report the instance to the coordinator, unless the links rest."""
        if self._resting:
            return
        config = self._config
        engine = config.rollout.engine
        link = InstanceLink(
            instance, self._actors, config.deadlines, config.rollout.engine.time_scale, self._emit,
            drafts=engine.speculation.num_speculative_tokens > 0,
        )  # fmt: skip
        for work in link.work():
            instance.tasks.append(asyncio.ensure_future(self._guard(instance, work)))
        self._emit(
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
                    self._emit(InstanceLost(instance=instance.id, why=str(lost)))
                    self._actors.record_loss(instance.placed.name, lost, self._elapsed_s())
                    self._fill(instance.index)
        except Exception as error:  # noqa: BLE001  carried to the main loop, which raises it
            self._emit(error)

    async def _replace(self, index: int) -> None:
        """Place an instance that is missing, as soon as there is a worker for it. Raises NoFreeWorker if there is none
        for start_s and too few instances are left, ActorLost if it is lost too often."""
        while True:
            try:
                instance = await self._actors.place_instance(index)
            except NoFreeWorker as error:
                self._refuse_too_few(error)
                if index < self._config.rollout.instances:
                    continue
            except (errors.ActorLost, errors.ActorFailed) as lost:
                up = next((i for i in self._actors.instances.values() if i.index == index), None)
                if lost.actor.partition(".")[0] != f"rollout-{index}" and (up is None or not self._is_lost(up, lost)):
                    raise
                self._actors.record_loss(
                    lost.actor if up is None else up.id, lost, self._elapsed_s()
                )  # while it came up
                continue
            else:
                self._join(instance)
            self._missing.discard(index)
            return

    def _refuse_too_few(self, error: NoFreeWorker) -> None:
        """Raise the error if too few instances are left."""
        num_instances, rollout = len(self._actors.instances), self._config.rollout
        if num_instances < rollout.min_instances:
            raise error
        logger.warning("the run goes on with %d of %d instances: %s", num_instances, rollout.instances, error)

"""The rollout instances of a run: they join, are lost, are replaced, and are retired.

The instance with index N is named rollout-N. Indices below rollout.instances are required: if such an instance is lost
or retired, the run waits for a free worker to replace it. Indices from there to rollout.max_instances - 1 are optional:
they are filled while there are spare workers, and dropped if no worker is left for them.

Invariants:
- There is at most one instance per index, and at most one attempt to place it.
- A retired instance has delivered all sampled tokens before it is closed. Retiring is not a loss.
- The coordinator receives one InstanceJoined per instance, and at most one InstanceLost.
- A lost instance is replaced. Any other failure of its link ends the run, such as a failure of the trajectory server
  that the instance called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import Event, InstanceJoined, InstanceLeaving, InstanceLost
from staleflow.pipeline.processes.background import BackgroundTasks
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import SERVER
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.instance_link import InstanceLink
from staleflow.stores import errors
from staleflow.stores.trajectory import InstanceId

logger = logging.getLogger(__name__)

SPARE_CHECK_S = 2.0
"""Seconds between two checks for a spare worker."""
DRAINED_CHECK_S = 0.1
"""Seconds between two checks whether a retiring instance is drained."""
FLUSH_TIMEOUT_S = 10.0
"""Seconds that instances have to deliver sampled tokens when a run stops."""


class InstanceMembership:
    """The rollout instances of one run, each with its link.

    Args:
        emit: Called with every event, and with the error that ends the run.
        is_drained: Whether an instance is gone, or is leaving and runs nothing any more.
    """

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        background: BackgroundTasks,
        emit: Callable[[Event | BaseException], None],
        is_drained: Callable[[InstanceId], bool],
    ) -> None:
        self._config = config
        self._actors = actors
        self._background = background
        self._emit = emit
        self._is_drained = is_drained
        self._links_stopped = True
        self._indices_being_placed: set[int] = set()
        """Indices of instances that are being placed or wait for a worker."""
        self._retiring_indices: set[int] = set()
        """Indices of instances that are being retired."""

    @property
    def summary_line(self) -> str:
        """One line for display: the number of instances, and which are missing or retiring."""
        rollout, num_instances = self._config.rollout, len(self._actors.instances)
        max_instances = max(rollout.instances, rollout.max_instances)
        line = f"{num_instances} of {rollout.instances} instances" + (
            f", at most {max_instances}" if max_instances > rollout.instances else ""
        )
        placed = {instance.index for instance in self._actors.instances.values()}
        if missing_indices := sorted(self._indices_being_placed - placed):
            line += f"; waiting for {', '.join(f'rollout-{i}' for i in missing_indices)}"
        if self._retiring_indices:
            line += f"; retiring {', '.join(f'rollout-{i}' for i in sorted(self._retiring_indices))}"
        return line

    async def place_optional_instances(self) -> None:
        """Place optional instances while there are spare workers. Runs until cancelled."""
        rollout = self._config.rollout
        while True:
            await asyncio.sleep(SPARE_CHECK_S)
            used_indices = self._indices_being_placed | {i.index for i in self._actors.instances.values()}
            additional_index = next(
                (i for i in range(rollout.instances, rollout.max_instances) if i not in used_indices), None
            )
            if additional_index is not None and not self._links_stopped and await self._actors.has_spare_worker():
                self._start_placing(additional_index)

    def retire(self, worker: str) -> str:
        """Start retiring an instance: its trajectories continue elsewhere, then it is closed and its worker leaves the
        cluster. Idempotent.

        Args:
            worker: The instance's name, or the name or address of its worker.

        Returns:
            The reason why the instance cannot be retired; empty if it can.
        """
        for instance in self._actors.instances.values():
            if worker in (instance.id, instance.placed_actor.worker, instance.placed_actor.address):
                break
        else:
            return f"{worker}: no rollout instance of this run is there; it has {', '.join(self._actors.instances)}"
        if instance.index in self._retiring_indices:
            return ""
        if instance.index in self._indices_being_placed:
            return f"{worker}: {instance.id} is still being placed; retry when it has joined"
        if self._links_stopped:
            return f"{worker}: the run does not train at the moment; retry when it does"
        min_instances = self._config.rollout.min_instances
        if len(self._actors.instances) - len(self._retiring_indices) <= min_instances:
            bound = f"{min_instances} instances (rollout.min_instances)"
            return f"{worker}: the run has no more than {bound}; start a worker first"
        self._retiring_indices.add(instance.index)
        self._background.spawn(self._retire(instance), "retire")
        return ""

    async def _retire(self, instance: InstanceHandle) -> None:
        self._emit(InstanceLeaving(instance=instance.id))
        while not self._is_drained(instance.id):
            await asyncio.sleep(DRAINED_CHECK_S)
        self._retiring_indices.discard(instance.index)
        if self._links_stopped:
            return  # the run ends
        if instance.id not in self._actors.instances:
            worker = instance.placed_actor.worker
            logger.warning(
                "%s was lost before it was retired; if %s is still there, retire it again", instance.id, worker
            )
            return
        for task in instance.tasks:
            task.cancel()
        self._emit(InstanceLost(instance=instance.id, why="it was retired"))
        await self._actors.retire(instance)
        logger.warning("%s on %s was retired", instance.id, instance.placed_actor.address)
        if instance.index < self._config.rollout.instances:
            self._start_placing(instance.index)

    def _start_placing(self, index: int) -> None:
        """Start placing a missing instance in the background."""
        self._indices_being_placed.add(index)
        self._background.spawn(self._place(index), "place")

    def start_links(self) -> None:
        """Start the links of all placed instances, and start placing the missing ones."""
        self._links_stopped = False
        for instance in list(self._actors.instances.values()):
            self._start_link(instance)
        placed = {instance.index for instance in self._actors.instances.values()}
        for index in set(range(self._config.rollout.instances)) - placed:
            self._start_placing(index)

    def stop_links(self) -> None:
        """Stop all links at the end of the run."""
        self._links_stopped = True
        for task in self.tasks():
            task.cancel()

    async def flush_all(self) -> None:
        """Make all instances deliver their sampled tokens to the trajectory server. A trajectory whose tokens do not
        arrive in time continues from its last delivery."""

        async def flush(instance: InstanceHandle) -> None:
            with contextlib.suppress(errors.ActorLost, errors.ActorFailed):
                await self._actors.ask_once(instance.placed_actor.name, "flush", SERVER, within_s=FLUSH_TIMEOUT_S)

        await asyncio.gather(*(flush(instance) for instance in self._actors.instances.values()))

    @staticmethod
    def _is_own_loss(instance: InstanceHandle, loss_error: errors.ActorLost | errors.ActorFailed) -> bool:
        """Whether the instance itself is lost, not an actor that it called. An error that a parameter server raised
        counts as a loss of the instance, wherever that server is: a replacement may be on another host."""
        return loss_error.actor == instance.id or loss_error.actor.startswith("parameters-")

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of all links."""
        return [task for instance in self._actors.instances.values() for task in instance.tasks]

    def _start_link(self, instance: InstanceHandle) -> None:
        """Start an instance's link and report the instance to the coordinator, unless links are stopped."""
        if self._links_stopped:
            return
        config = self._config
        engine = config.rollout.engine
        link = InstanceLink(
            instance, self._actors, config.deadlines, config.rollout.engine.time_scale, self._emit,
            reports_decode_stats=engine.speculation.num_speculative_tokens > 0,
        )  # fmt: skip
        for coroutine in link.coroutines():
            instance.tasks.append(asyncio.ensure_future(self._guard(instance, coroutine)))
        self._emit(
            InstanceJoined(
                instance=instance.id,
                version=instance.version,
                kv_capacity=engine.kv_tokens,
                max_running=engine.max_running,
            )
        )

    async def _guard(self, instance: InstanceHandle, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task of an instance's link. Replaces the instance if it is lost; any other failure ends the run."""
        try:
            try:
                await coroutine
            except (errors.ActorLost, errors.ActorFailed) as loss_error:
                if not self._is_own_loss(instance, loss_error):
                    raise
                if instance.id in self._actors.instances:  # else another of its tasks has handled the loss
                    for task in instance.tasks:
                        if task is not asyncio.current_task():
                            task.cancel()
                    self._emit(InstanceLost(instance=instance.id, why=str(loss_error)))
                    self._actors.record_loss(instance.placed_actor.name, loss_error)
                    self._start_placing(instance.index)
        except Exception as error:  # noqa: BLE001  carried to the main loop, which raises it
            self._emit(error)

    async def _place(self, index: int) -> None:
        """Place a missing instance as soon as there is a worker for it.

        Raises:
            NoFreeWorker: There was no worker for start_s, and too few instances are left.
            ActorLost: The instance was lost too often.
        """
        while True:
            try:
                instance = await self._actors.place_instance(index)
            except NoFreeWorker as error:
                self._raise_if_too_few(error)
                if index < self._config.rollout.instances:
                    continue
            except (errors.ActorLost, errors.ActorFailed) as loss_error:
                placed = next((i for i in self._actors.instances.values() if i.index == index), None)
                is_own_loss = placed is not None and self._is_own_loss(placed, loss_error)
                if loss_error.actor.partition(".")[0] != f"rollout-{index}" and not is_own_loss:
                    raise
                self._actors.record_loss(loss_error.actor if placed is None else placed.id, loss_error)
                continue
            else:
                self._start_link(instance)
            self._indices_being_placed.discard(index)
            return

    def _raise_if_too_few(self, error: NoFreeWorker) -> None:
        """Raise the error if fewer than rollout.min_instances are left; otherwise log that the run continues."""
        num_instances, rollout = len(self._actors.instances), self._config.rollout
        if num_instances < rollout.min_instances:
            raise error
        logger.warning("the run continues with %d of %d instances: %s", num_instances, rollout.instances, error)

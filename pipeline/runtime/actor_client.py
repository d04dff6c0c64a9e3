"""Calls the actors of a run from the driver, with deadlines and retries, and records lost actors.

Invariants:
- Every call has a deadline; waiting for a turn on shared GPUs has none. The call of a lost actor raises ActorLost,
  which names the deadline if one was missed.
- If a call passes an actor as an argument (ActorArg), its deadline call_s is extended by call_s. The nested call then
  times out first, and the nested actor, not the caller, is reported lost. The deadline of a commit is extended too: the
  trajectory server itself stops retrying after commit_s and names the cause. A slow actor that answers again is not
  treated as lost.
- The trainer and the trajectory server have state. If they are lost they are restored (role_recovery.py), and callers
  wait and then retry. Once a loss is recorded no call returns what the lost process answers: it may only be silent, and
  its successor would not have what it does then.
- Each role, and each instance, may be lost MAX_REPLACEMENTS times within REPLACEMENT_WINDOW_S; one loss more ends the
  run. The losses of an instance's replacements count as its own; retirements do not count.
- With shared GPUs the trainer computes only while all instances are asleep, and no instance
  wakes or is built meanwhile. The coordinator orders sleeps and pulls so that calls rarely wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes import trainer_group
from staleflow.pipeline.processes.clock import RunClock, now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import ActorArg, Workers
from staleflow.pipeline.recovery.role_recovery import RoleRecovery
from staleflow.stores.errors import ActorFailed, ActorLost
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.actors.actor_calls import call_actor

logger = logging.getLogger(__name__)

MAX_REPLACEMENTS, REPLACEMENT_WINDOW_S = 3, 3600.0
"""Number of replacements that one instance or role may have within this many seconds. One more loss ends the run. Older
losses do not count, since long runs lose actors now and then."""
MAX_FALSE_SERVER_LOSSES = 3
"""Number of times that an actor may report the trajectory server lost in the attempts of one call, although the driver
can reach it, before the actor itself counts as lost. EnvironmentHosts counts the reports of a host's steps, which come
as outcomes."""
DeadlineKey = Literal["start_s", "call_s", "sample_s", "train_s", "silent_s", "commit_s"]
"""The key in [deadlines] whose seconds limit a call."""
SERVER = ActorArg("server")
"""The trajectory server, as an argument of calls."""


class ActorClient:
    """Calls the placed actors of one run by name."""

    recovery: RoleRecovery

    def __init__(self, config: RunConfig, workers: Workers) -> None:
        self._config = config
        self._workers = workers
        self.clock = RunClock()
        self._device_turns = DeviceTurns(shares_gpus=config.shares_gpus)
        self._loss_times: dict[str, list[float]] = {}
        """Seconds of the run at which each actor was lost, by its name without its replacement number."""
        self._loss_futures: dict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        """By role, futures that get ActorLost when it is lost, to abort its pending calls."""
        self.instances: dict[InstanceId, InstanceHandle] = {}
        self._former_instances: list[InstanceHandle] = []
        """Instances that were lost or retired."""
        self.loss_messages: list[str] = []

    @property
    def is_restoring(self) -> bool:
        """Whether the trainer or the trajectory server is being restored, and each call of that has a deadline."""
        return self.recovery.is_restoring and not self._device_turns.is_trainer_waiting

    @property
    def lacks_role(self) -> bool:
        """Whether all rollout instances, all reward workers and environment hosts, or all teachers are lost. One is
        being placed, which has a deadline."""
        roles = {"rollout", "reward", *(["teacher"] if self._config.teachers else [])}
        return not roles <= {actor.role for actor in self._workers.placed.values()}

    @property
    def all_instances(self) -> list[InstanceHandle]:
        """The rollout instances, with those that were lost or retired, whose work counts too."""
        return [*self._former_instances, *self.instances.values()]

    def _remove_instance(self, id: InstanceId) -> None:
        if (instance := self.instances.pop(id, None)) is not None:
            self._former_instances.append(instance)

    def actor(self, name: str) -> Any:
        """The actor `name`, for use as an argument of calls to other actors. Raises ActorLost if it is not placed."""
        if name not in self._workers.placed:
            raise ActorLost(f"{name} is gone", name)
        return self._workers.placed[name].actor

    async def ask(
        self,
        name: str,
        method: str,
        *args: Any,
        deadline: DeadlineKey | None = None,
        within_s: float | None = None,
        is_restore_call: bool = False,
    ) -> Any:
        """Call a method of an actor. If the lost actor can be restored, waits and retries. Also retries up to
        MAX_FALSE_SERVER_LOSSES times if the actor reports the server lost although it answers. Otherwise raises
        ActorLost.

        Args:
            deadline: Key of the deadline that limits the call, by default call_s. Errors name it.
            within_s: Overrides the seconds of that deadline. Without `deadline` these are never extended, and errors
                name no key.
            is_restore_call: Whether the call is a part of restoring the actor, whose loss is raised then.
        """
        num_false_server_losses = 0
        while True:
            if not is_restore_call:
                await self.recovery.wait_while_restoring(name)
            called_s = now_s()
            try:
                return await self.ask_once(name, method, *args, deadline=deadline, within_s=within_s)
            except ActorLost as error:
                loss_error = error
            if loss_error.actor == "server" and name != "server" and await self.server_answers():
                logger.warning("%s: %s; it answers now", name, loss_error)
                if num_false_server_losses < MAX_FALSE_SERVER_LOSSES:
                    num_false_server_losses += 1
                    continue
                loss_error = ActorLost(f"{name} does not reach the server, which answers: {loss_error}", name)
            if is_restore_call and trainer_group.restored_actor(loss_error.actor) == name:
                raise loss_error
            await self.recovery.wait_until_restored(loss_error, called_s)

    async def server_answers(self) -> bool:
        """Whether the trajectory server answers a call within deadlines.call_s. The call changes nothing. It is sent
        even while the server is being restored: a caller that waited would take a loss for a false one."""
        try:
            await self.ask_once("server", "held_out_notice")
        except ActorLost:
            return False
        return True

    async def ask_once(
        self, name: str, method: str, *args: Any, deadline: DeadlineKey | None = None, within_s: float | None = None
    ) -> Any:
        """Like `ask`, but raises every ActorLost instead of retrying."""
        if name == trainer_group.TRAINER and method in GPU_METHODS:
            async with self._device_turns.training():
                return await self._call(name, method, *args, deadline=deadline, within_s=within_s)
        return await self._call(name, method, *args, deadline=deadline, within_s=within_s)

    async def _call(
        self, name: str, method: str, *args: Any, deadline: DeadlineKey | None, within_s: float | None
    ) -> Any:
        """Call a method of an actor that is placed."""
        key = deadline or "call_s"
        limit_name = f"deadlines.{key}" if deadline or within_s is None else ""
        allowed_s: float = getattr(self._config.deadlines, key) if within_s is None else within_s
        if key == "commit_s" or (limit_name and key == "call_s" and any(isinstance(arg, ActorArg) for arg in args)):
            allowed_s += self._config.deadlines.call_s
        arguments = [self.actor(arg.name) if isinstance(arg, ActorArg) else arg for arg in args]
        request = call_actor(
            self.actor(name), method, *arguments, timeout_s=allowed_s, actor_name=name, timeout_setting=limit_name
        )
        role = trainer_group.restored_actor(name)
        return await (self._result_or_loss(role, request) if role in ("trainer", "server") else request)

    async def _result_or_loss(self, role: str, request: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the result of a call. Raises ActorLost as soon as the loss of the role's actor is recorded: another,
        shorter call may notice it first."""
        futures = self._loss_futures[role]
        loss: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        result = asyncio.ensure_future(request)
        futures.add(loss)
        try:
            done, _ = await asyncio.wait({result, loss}, return_when=asyncio.FIRST_COMPLETED)
            return (result if result in done else loss).result()
        finally:
            futures.discard(loss)
            result.cancel()
            await asyncio.gather(result, return_exceptions=True)

    def record_loss(self, name: str, loss_error: ActorLost | ActorFailed) -> None:
        """Record the loss of an actor now, and release its worker. Raises ActorLost if it and its predecessors were
        lost more than MAX_REPLACEMENTS times within REPLACEMENT_WINDOW_S."""
        base_name, now = name.partition(".")[0], self.clock.elapsed_s
        self._loss_times.setdefault(base_name, []).append(now)
        recent_times = [loss_s for loss_s in self._loss_times[base_name] if now - loss_s < REPLACEMENT_WINDOW_S]
        self.loss_messages.append(f"{now:.1f} s: {loss_error}")
        logger.warning("%s; replacing it", loss_error)
        self._remove_instance(InstanceId(name))
        self._device_turns.mark_asleep(name)
        for member in trainer_group.list_lost_together(name, self._workers.placed):
            self._workers.mark_lost(member)
        for future in self._loss_futures[name]:
            if not future.done():
                future.set_exception(ActorLost(str(loss_error), loss_error.actor))
        if len(recent_times) > MAX_REPLACEMENTS:
            raise ActorLost(
                f"{base_name} was lost {len(recent_times)} times within an hour, last: {loss_error}"
            ) from loss_error


GPU_METHODS = frozenset({"train", "publish_initial", "fine_tune", "logprobs"})
"""Methods of the trainer that need its GPUs. Between such calls it has freed them."""


class DeviceTurns:
    """Which actors are on the shared GPUs. shares_gpus: if not, no call waits."""

    def __init__(self, *, shares_gpus: bool) -> None:
        self.shares_gpus = shares_gpus
        self._awake: set[str] = set()
        self._is_training = False
        self.is_trainer_waiting = False
        """Whether the trainer waits until all instances are asleep. This has no deadline."""
        self._changed = asyncio.Event()

    async def wait_and_mark_awake(self, instance: str) -> None:
        """Wait until the trainer is not computing, and mark an instance as awake."""
        while self.shares_gpus and self._is_training:
            await self._wait()
        if self.shares_gpus:
            self._awake.add(instance)

    def mark_asleep(self, instance: str) -> None:
        """Mark an instance as asleep or gone."""
        self._awake.discard(instance)
        self._changed.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context manager: waits until no instance is awake, and lets none wake inside the block."""
        try:
            while self.shares_gpus and (self._awake or self._is_training):
                self.is_trainer_waiting = True
                await self._wait()
        finally:
            self.is_trainer_waiting = False
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

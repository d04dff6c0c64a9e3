"""Sends environment steps to the run's environment hosts, and emits their outcomes as events.

Invariant: every queued step gets an outcome or is closed. A lost host is replaced, and its pending steps are sent
again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import CloseEnvironment, StepEnvironment
from staleflow.pipeline.coordination.events import EnvironmentFailed, EnvironmentStepped, Event, TrajectoryScored
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import MAX_FALSE_SERVER_LOSSES, SERVER
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.actors.environment_host import EnvStepItem, EnvStepOutcome

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds that a host waits for outcomes before it returns an empty list."""
FAILURE_WINDOW = 100
"""Number of ended episodes in the share of failures that environment.max_failed_share limits."""
RETRY_S = 0.5
"""Seconds before a step is sent again whose host could not reach the trajectory server."""


@dataclass(slots=True)
class _Host:
    """An environment host. pending_steps: steps without an outcome. placement_number:
    incremented with each replacement or move."""

    name: str
    outbox: asyncio.Queue[StepEnvironment | CloseEnvironment] = field(default_factory=asyncio.Queue)
    pending_steps: dict[TrajectoryId, StepEnvironment] = field(default_factory=dict)
    placement_number: int = 0
    num_false_server_losses: int = 0
    """Consecutive attempts in which it reported the trajectory server lost although the driver reaches it."""
    last_false_server_loss_s: float = -math.inf
    """Time of the last such report, on the loop's clock."""
    replace_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentHostView:
    """The current state of an environment host, for display. num_in_environment: number of trajectories that wait for
    it. slots: number of steps that it runs at once."""

    host: str
    num_in_environment: int
    slots: int


class EnvironmentHosts:
    """The environment hosts of one run. emit: called with every outcome."""

    def __init__(self, config: RunConfig, actors: Actors, emit: Callable[[Event], None]) -> None:
        self._config = config
        self._actors = actors
        self._emit = emit
        count = config.environment.hosts if config.has_environment else 0
        self._hosts = [_Host(f"environment-{i}") for i in range(count)]
        self._has_logged_failure = False
        self._latest_failures: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        """Whether each of the latest episodes to end failed."""

    def put(self, command: StepEnvironment | CloseEnvironment) -> None:
        """Queue an environment step, or the closing of an environment. All steps of an episode go to one host."""
        host = self._hosts[command.trajectory % len(self._hosts)]
        if isinstance(command, StepEnvironment):
            host.pending_steps[command.trajectory] = command
        else:
            host.pending_steps.pop(command.trajectory, None)
        host.outbox.put_nowait(command)

    @property
    def is_busy(self) -> bool:
        """Whether a host is replaced or moved. Both have deadlines."""
        return any(host.replace_lock.locked() for host in self._hosts)

    @property
    def views(self) -> list[EnvironmentHostView]:
        """The current state of each host, for display."""
        slots = self._config.environment.concurrency
        return [
            EnvironmentHostView(host=host.name, num_in_environment=len(host.pending_steps), slots=slots)
            for host in self._hosts
        ]

    def coroutines(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run concurrently until cancelled: for each host one that sends and one that receives."""
        return [coroutine for host in self._hosts for coroutine in (self._send(host), self._receive_outcomes(host))]

    async def _send(self, host: _Host) -> None:
        """Send a host its commands in order."""
        while True:
            commands = [await host.outbox.get()]
            while not host.outbox.empty():
                commands.append(host.outbox.get_nowait())
            steps = [
                c for c in commands if isinstance(c, StepEnvironment) and host.pending_steps.get(c.trajectory) is c
            ]
            closed_episodes = tuple(c.trajectory for c in commands if isinstance(c, CloseEnvironment))
            placement_number = host.placement_number
            try:
                if closed_episodes:
                    await self._actors.ask(host.name, "close_episodes", closed_episodes)
                if steps:
                    items = tuple(
                        EnvStepItem(
                            trajectory=step.trajectory, route_number=step.route_number, truncated=step.truncated
                        )
                        for step in steps
                    )
                    await self._actors.ask(host.name, "start_steps", SERVER, items)
            except (errors.ActorLost, errors.ActorFailed) as error:
                if error.actor != host.name:
                    raise
                await self._replace(host, placement_number, error)

    async def _receive_outcomes(self, host: _Host) -> None:
        """Emit the outcomes of a host's steps."""
        while True:
            placement_number = host.placement_number
            try:
                outcomes: list[EnvStepOutcome] = await self._actors.ask(
                    host.name,
                    "next_outcomes",
                    POLL_S,
                    deadline="call_s",
                    within_s=POLL_S + self._config.deadlines.call_s,
                )
            except (errors.ActorLost, errors.ActorFailed) as error:
                if error.actor != host.name:
                    raise
                await self._replace(host, placement_number, error)
                continue
            if placement_number == host.placement_number and any(outcome.server_lost for outcome in outcomes):
                await self._count_false_server_loss(host, placement_number)
            elif outcomes:
                host.num_false_server_losses = 0
            for outcome in outcomes:
                step = host.pending_steps.get(outcome.trajectory)
                if step is None or step.route_number != outcome.route_number:
                    continue
                if outcome.server_lost:
                    asyncio.get_running_loop().call_later(RETRY_S, host.outbox.put_nowait, step)
                    continue
                del host.pending_steps[outcome.trajectory]
                self._emit(self._make_event(outcome))
                self._check_failures(outcome)

    async def _count_false_server_loss(self, host: _Host, placement_number: int) -> None:
        """Count a false report that the trajectory server is lost; replace the host after more than
        MAX_FALSE_SERVER_LOSSES. Reports of several steps within RETRY_S count once."""
        now = asyncio.get_running_loop().time()
        if now < host.last_false_server_loss_s + RETRY_S or not await self._actors.server_answers():
            return
        host.last_false_server_loss_s = now
        host.num_false_server_losses += 1
        if host.num_false_server_losses > MAX_FALSE_SERVER_LOSSES:
            error = errors.ActorLost(f"{host.name} does not reach the server, which answers", host.name)
            await self._replace(host, placement_number, error)

    async def _replace(self, host: _Host, placement_number: int, error: errors.ActorLost | errors.ActorFailed) -> None:
        """Replace a lost host and send it all pending steps. Does nothing if it was replaced since
        `placement_number`."""
        async with host.replace_lock:
            if host.placement_number != placement_number:
                return
            self._actors.record_loss(host.name, error)
            await self._actors.replace_stateless(host.name)
            self._resend_pending(host)

    async def move(self, name: str) -> None:
        """Move a host to a Dask worker that other actors of the run use; does nothing if it is moving already. Pending
        steps are sent again: repeatable environments are replayed up to the turn, and other episodes restart. A host
        that is lost, or finds no free worker, is replaced."""
        host = next(host for host in self._hosts if host.name == name)
        if host.replace_lock.locked():
            return
        async with host.replace_lock:
            try:
                await self._actors.move_reward_actor(name)
            except (errors.ActorLost, errors.ActorFailed) as error:
                if error.actor != name:
                    raise
                self._actors.record_loss(name, error)
                await self._actors.replace_stateless(name)
            except NoFreeWorker as error:  # the next call to it replaces it
                logger.warning("%s", error)
            self._resend_pending(host)

    def _resend_pending(self, host: _Host) -> None:
        """Queue all pending steps for a host that was replaced or moved."""
        host.placement_number += 1
        host.num_false_server_losses = 0
        for step in host.pending_steps.values():
            host.outbox.put_nowait(step)

    def _check_failures(self, outcome: EnvStepOutcome) -> None:
        """Raise TooManyFailedEnvironments if too many of the latest episodes failed. Each attempt counts. Those that
        were lost with their host do not: all of them restart at once."""
        if outcome.host_lost or not (outcome.ended or outcome.restart_reason):
            return
        self._latest_failures.append(bool(outcome.restart_reason))
        max_share = self._config.environment.max_failed_share
        if (
            outcome.restart_reason
            and len(self._latest_failures) == FAILURE_WINDOW
            and sum(self._latest_failures) / FAILURE_WINDOW > max_share
        ):
            raise errors.TooManyFailedEnvironments(
                f"environments failed in {sum(self._latest_failures)} of their latest {FAILURE_WINDOW} episodes, "
                f"environment.max_failed_share allows {max_share:g}; last: {outcome.restart_reason}"
            )

    def _make_event(self, outcome: EnvStepOutcome) -> Event:
        trajectory, route_number = outcome.trajectory, outcome.route_number
        if outcome.restart_reason:  # only the first failure is a warning; the loss of a host has one of its own
            level = logging.DEBUG if self._has_logged_failure or outcome.host_lost else logging.WARNING
            logger.log(level, "trajectory %d: environment failed: %s", trajectory, outcome.restart_reason)
            self._has_logged_failure |= not outcome.host_lost
            return EnvironmentFailed(
                trajectory=trajectory, route_number=route_number, error=outcome.restart_reason, lost=outcome.host_lost
            )
        if outcome.ended:
            return TrajectoryScored(
                trajectory=trajectory, reward=outcome.reward, error=outcome.reward_error, seconds=outcome.seconds
            )
        return EnvironmentStepped(
            trajectory=trajectory, route_number=route_number, tokens=outcome.num_tokens, seconds=outcome.seconds
        )

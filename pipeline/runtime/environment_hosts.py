"""The environments of a run: acts are sent to its environment hosts, and their outcomes told as events.

Invariant: every act that was put here is told an outcome or is dismissed; a host that is lost is replaced, and what it
had under way is asked for again.
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
from staleflow.pipeline.runtime.actors import MAX_FALSE_LOSSES, SERVER, Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.actors.environment_host import ActItem, EnvStepOutcome

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds that a host may wait for an outcome before it says that there is none."""
LATEST = 100
"""Outcomes of which only a share may be failures, once there are so many."""
AGAIN_S = 0.5
"""Seconds until acts are asked for again whose host found no trajectory server."""


@dataclass(slots=True)
class _Host:
    """An environment host. pending: acts without an outcome yet. number: how many hosts there were before it."""

    name: str
    outbox: asyncio.Queue[StepEnvironment | CloseEnvironment] = field(default_factory=asyncio.Queue)
    pending: dict[TrajectoryId, StepEnvironment] = field(default_factory=dict)
    number: int = 0
    num_doubts: int = 0
    """How many attempts in a row it lost the trajectory server in, which answers."""
    doubted_s: float = -math.inf
    """When that was last found, on the loop's clock."""
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What an environment host does now. num_acting: trajectories that wait for it. places: steps that it takes at
    once."""

    host: str
    num_acting: int
    places: int


class EnvironmentHosts:
    """The environment hosts of one run. tell: called with every outcome. elapsed_s: seconds of the run so far."""

    def __init__(
        self, config: RunConfig, actors: Actors, tell: Callable[[Event], None], elapsed_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._actors = actors
        self._tell = tell
        self._elapsed_s = elapsed_s
        count = config.environment.hosts if config.acts else 0
        self._hosts = [_Host(f"environment-{i}") for i in range(count)]
        self._failure_said = False
        self._latest: deque[bool] = deque(maxlen=LATEST)
        """Whether the latest outcomes were failures."""

    def put(self, command: StepEnvironment | CloseEnvironment) -> None:
        """Queue an act, or the end of one. A trajectory's episode stays on one host."""
        host = self._hosts[command.trajectory % len(self._hosts)]
        if isinstance(command, StepEnvironment):
            host.pending[command.trajectory] = command
        else:
            host.pending.pop(command.trajectory, None)
        host.outbox.put_nowait(command)

    @property
    def view(self) -> list[HostView]:
        places = self._config.environment.concurrency
        return [HostView(host=host.name, num_acting=len(host.pending), places=places) for host in self._hosts]

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Endless coroutines, to be run side by side."""
        return [work for host in self._hosts for work in (self._send(host), self._hear(host))]

    async def _send(self, host: _Host) -> None:
        """Hand a host its commands, in order."""
        while True:
            commands = [await host.outbox.get()]
            while not host.outbox.empty():
                commands.append(host.outbox.get_nowait())
            acts = [c for c in commands if isinstance(c, StepEnvironment) and host.pending.get(c.trajectory) is c]
            ended = tuple(c.trajectory for c in commands if isinstance(c, CloseEnvironment))
            number = host.number
            try:
                if ended:
                    await self._actors.ask(host.name, "dismiss", ended)
                if acts:
                    items = tuple(
                        ActItem(trajectory=a.trajectory, route_number=a.route_number, cut=a.truncated) for a in acts
                    )
                    await self._actors.ask(host.name, "act", SERVER, items)
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if lost.actor != host.name:
                    raise
                await self._replace(host, number, lost)

    async def _hear(self, host: _Host) -> None:
        """Tell what comes of a host's acts."""
        while True:
            number = host.number
            try:
                outcomes: list[EnvStepOutcome] = await self._actors.ask(
                    host.name, "outcomes", POLL_S, deadline="call_s", within_s=POLL_S + self._config.deadlines.call_s
                )
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if lost.actor != host.name:
                    raise
                await self._replace(host, number, lost)
                continue
            if number == host.number and any(outcome.server_lost for outcome in outcomes):
                await self._count_false_loss(host, number)
            elif outcomes:
                host.num_doubts = 0
            for outcome in outcomes:
                act = host.pending.get(outcome.trajectory)
                if act is None or act.route_number != outcome.route_number:
                    continue
                if outcome.server_lost:
                    asyncio.get_running_loop().call_later(AGAIN_S, host.outbox.put_nowait, act)
                    continue
                del host.pending[outcome.trajectory]
                self._tell(self._event(outcome))
                self._check_failures(outcome)

    async def _count_false_loss(self, host: _Host, number: int) -> None:
        """Note that a host says that the trajectory server is lost; replace the host if it is the one that is cut
        off. What many acts of one attempt say counts once."""
        now = asyncio.get_running_loop().time()
        if now < host.doubted_s + AGAIN_S or not await self._actors.server_answers():
            return
        host.doubted_s = now
        host.num_doubts += 1
        if host.num_doubts > MAX_FALSE_LOSSES:
            lost = errors.ActorLost(f"{host.name} does not reach the server, which answers", host.name)
            await self._replace(host, number, lost)

    async def _replace(self, host: _Host, number: int, lost: errors.ActorLost | errors.ActorFailed) -> None:
        """Place a host anew, unless that was done since `number`, and ask it for all that is pending."""
        async with host.replacing:
            if host.number != number:
                return
            self._actors.record_loss(host.name, lost, self._elapsed_s())
            await self._actors.place_environment(host.name)
            self._ask_again(host)

    async def move(self, name: str) -> None:
        """Move a host to a process that the run shares; does nothing if it is being moved. It is asked again for all
        that is pending: repeatable environments are set back, the episodes of others begin again."""
        host = next(host for host in self._hosts if host.name == name)
        if host.replacing.locked():
            return
        async with host.replacing:
            try:
                await self._actors.move_reward_actor(name)
            except errors.ActorLost as lost:  # its next call finds it gone, and replaces it
                logger.warning("%s", lost)
                return
            self._ask_again(host)

    def _ask_again(self, host: _Host) -> None:
        """Ask a host that was placed anew for all that is pending."""
        host.number += 1
        host.num_doubts = 0
        for act in host.pending.values():
            host.outbox.put_nowait(act)

    def _check_failures(self, outcome: EnvStepOutcome) -> None:
        """Raise TooManyFailedEnvironments if too many of the latest outcomes are failures."""
        self._latest.append(bool(outcome.failed))
        allowed = self._config.environment.max_failed_share
        if outcome.failed and len(self._latest) == LATEST and sum(self._latest) > allowed * LATEST:
            raise errors.TooManyFailedEnvironments(
                f"environments failed in {sum(self._latest)} of their latest {LATEST} answers, "
                f"environment.max_failed_share allows {allowed:g}; last: {outcome.failed}"
            )

    def _event(self, outcome: EnvStepOutcome) -> Event:
        trajectory, route_number = outcome.trajectory, outcome.route_number
        if outcome.failed:  # the first in full, as of rewards
            level = logging.DEBUG if self._failure_said else logging.WARNING
            logger.log(level, "trajectory %d: environment failed: %s", trajectory, outcome.failed)
            self._failure_said = True
            return EnvironmentFailed(trajectory=trajectory, route_number=route_number, error=outcome.failed)
        if outcome.ended:
            return TrajectoryScored(
                trajectory=trajectory, reward=outcome.reward, error=outcome.error, seconds=outcome.seconds
            )
        return EnvironmentStepped(
            trajectory=trajectory, route_number=route_number, tokens=outcome.tokens, seconds=outcome.seconds
        )

"""The driver's link to one rollout instance: sends commands in order, receives results, and detects that it is lost.

Invariants:
- Commands are executed one after the other in the order of the outbox; a Route after a Pull uses the new weights.
  Consecutive commands of one class may be sent in one call.
- Every result of the instance is emitted exactly once, with the route number that it belongs to.
- A lost instance raises ActorLost with its name within a deadline: if its process answers no call (deadlines.call_s),
  if its engine reports an error, or if its engine stops sampling although the process answers (deadlines.sample_s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination import commands, events
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.runtime.actor_client import SERVER
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.errors import ActorLost
from staleflow.tasks.actors.rollout_instance import RequestOutcome
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.engines.base import EngineLoad

SamplingEvent = TypeVar("SamplingEvent", events.TrajectorySampled, events.TrajectoryInterrupted)
POLL_S, REPORT_S = 0.5, 0.5
"""Seconds that an instance waits for results in one poll, unless a request ends, and between two reports of its
progress; see `interval_factor`."""
FULL_RATE_INSTANCES = 128
"""Number of instances up to which each is polled and reports at these intervals."""


def interval_factor(num_instances: int) -> float:
    """The factor by which the intervals of polls and reports grow with the fleet. Beyond `FULL_RATE_INSTANCES`
    instances the driver's messages per second stay constant, apart from those with results."""
    return max(1.0, num_instances / FULL_RATE_INSTANCES)


class InstanceLink:
    """Sends commands to one instance and emits its events. All coroutines raise ActorLost when the instance must be
    replaced. emit: called with every event."""

    def __init__(
        self,
        instance: InstanceHandle,
        actors: Actors,
        deadlines: DeadlineConfig,
        time_scale: float,
        emit: Callable[[events.Event], None],
        *,
        reports_decode_stats: bool = False,
    ) -> None:
        """reports_decode_stats: whether to report the duration of decode steps, which the coordinator needs if
        instances draft tokens."""
        self._instance = instance
        self._name = instance.placed_actor.name
        self._actors = actors
        self._deadlines = deadlines
        self._time_scale = time_scale
        self._emit = emit
        self._reports_decode_stats = reports_decode_stats
        self._stall_detector = StallDetector(deadlines.sample_s)

    def coroutines(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return three coroutines to run concurrently until the instance is lost."""
        return self._send(), self._receive_results(), self._watch()

    async def _send(self) -> None:
        """Execute commands in order. Consecutive ones of one kind are sent together, except pulls."""
        outbox = self._instance.outbox
        next_command: commands.Command | None = None
        while True:
            command = next_command or await outbox.get()
            next_command = None
            batch = [command]
            if not isinstance(command, commands.Pull):
                while not outbox.empty():
                    following_command = outbox.get_nowait()
                    if type(following_command) is not type(command):
                        next_command = following_command
                        break
                    batch.append(following_command)
            await self._execute(batch)

    async def _execute(self, batch: list[commands.Command]) -> None:
        match batch[0]:
            case commands.Route():
                items = tuple(
                    RouteItem(trajectory=c.trajectory, route_number=c.route_number, version=c.version)
                    for c in batch
                    if isinstance(c, commands.Route)
                )
                await self._actors.ask(self._name, "route", SERVER, items)
            case commands.Abort() | commands.ReleaseCache():
                ids = tuple(c.trajectory for c in batch if isinstance(c, commands.Abort | commands.ReleaseCache))
                await self._actors.ask(self._name, "abort", ids)
            case commands.Interrupt():
                ids = tuple(c.trajectory for c in batch if isinstance(c, commands.Interrupt))
                for outcome in await self._actors.ask(self._name, "interrupt", SERVER, ids):
                    self._emit(_sampling_event(events.TrajectoryInterrupted, outcome))
            case commands.Pull(instance=instance, version=version):
                loaded_version = await self._actors.pull(self._instance, version)
                self._emit(events.PullFinished(instance=instance, version=loaded_version))
            case commands.Sleep(instance=instance, step=step):
                await self._actors.put_to_sleep(self._instance)
                self._emit(events.InstanceSlept(instance=instance, step=step))

    async def _receive_results(self) -> None:
        """Emit the results of finished requests."""
        while True:
            poll_s = POLL_S * self._interval_factor()
            within_s = self._deadlines.call_s + poll_s  # the actor argument adds call_s for the call to the server
            outcomes: list[RequestOutcome] = await self._actors.ask(
                self._name, "next_events", SERVER, poll_s, deadline="call_s", within_s=within_s
            )
            for outcome in outcomes:
                event: events.Event = _sampling_event(events.TrajectorySampled, outcome)
                if outcome.error:
                    event = events.TrajectoryFailed(
                        trajectory=outcome.trajectory, route_number=outcome.route_number, error=outcome.error
                    )
                self._emit(event)

    async def _watch(self) -> None:
        """Report progress, measure how busy the engine is, and detect a stalled engine."""
        instance = self._instance
        initial_load: EngineLoad = await self._actors.ask(self._name, "report")
        instance.initial_load = previous_load = initial_load
        while True:
            await asyncio.sleep(REPORT_S * self._interval_factor())
            load: EngineLoad = await self._actors.ask(self._name, "report")
            stalled_s = self._stall_detector.observe(load, now_s(), loading=instance.is_loading)
            if stalled_s:
                raise ActorLost(
                    f"{self._name} has {load.running} trajectories to sample and has sampled nothing for "
                    f"{stalled_s:.0f} s; deadlines.sample_s allows {self._deadlines.sample_s:g}",
                    self._name,
                )
            decode_stats, previous_load = self._decode_stats(previous_load, load), load
            instance.busy_s = load.busy_s - initial_load.busy_s
            instance.tokens_sampled = load.tokens_sampled
            instance.load = load
            reported_stats = decode_stats if self._reports_decode_stats else None
            self._emit(
                events.InstanceReported(
                    instance=instance.id, progress=load.progress, delivered=load.delivered, steps=reported_stats
                )
            )

    def _interval_factor(self) -> float:
        return interval_factor(len(self._actors.instances))

    def _decode_stats(self, previous_load: EngineLoad, load: EngineLoad) -> events.DecodeStats:
        """Compute the statistics of the decode steps between two reports of the engine."""
        return events.DecodeStats(
            running=max(0, load.running - load.waiting),
            kv_tokens=load.kv_tokens,
            seconds=(load.busy_s - previous_load.busy_s) * self._time_scale,
            tokens=load.tokens_sampled - previous_load.tokens_sampled,
            drafts=load.drafts - previous_load.drafts,
            drafted_tokens=load.drafted_tokens - previous_load.drafted_tokens,
            accepted_tokens=load.accepted_tokens - previous_load.accepted_tokens,
        )


def _sampling_event(kind: type[SamplingEvent], outcome: RequestOutcome) -> SamplingEvent:
    """Return the event of a request whose sampling has ended or was interrupted."""
    return kind(
        trajectory=outcome.trajectory,
        route_number=outcome.route_number,
        tokens=outcome.num_tokens,
        drafted_tokens=outcome.drafted_tokens,
        accepted_tokens=outcome.accepted_tokens,
    )


class StallDetector:
    """Detects that an engine with work makes no progress. allowed_s: seconds without progress that are allowed."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._last_progress: object = None
        self._progress_s = 0.0

    def observe(self, load: EngineLoad, now: float, *, loading: bool = False) -> float:
        """Return the seconds without progress if they exceed the allowed ones, else 0. Loading weights, and starting or
        ending a request, count as progress. loading: whether the engine is loading weights."""
        progress = (load.version, load.tokens_sampled, load.progress)
        if progress != self._last_progress or not load.running or loading:
            self._last_progress, self._progress_s = progress, now
        stalled_s = now - self._progress_s
        return stalled_s if stalled_s > self._allowed_s else 0.0

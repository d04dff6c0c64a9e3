"""The driver's link to one rollout instance: sends commands in order, receives results, and detects that it is lost.

Invariants:
- Commands are carried out one after the other in the order given; a Route after a Pull finds the new weights. Several
  of a kind in a row may travel in one call.
- Every result that the instance gives is passed on exactly once, and only under the route number it was given for.
- An instance that is gone shows within a deadline as ActorLost that names it. Its process answers no call
  (deadlines.call_s); its engine is broken and says so; or the process is well and the engine stands still, which shows
  only in what it samples (deadlines.sample_s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination.commands import (
    Abort,
    Command,
    Interrupt,
    Pull,
    ReleaseCache,
    Route,
    SetDraftLength,
    Sleep,
)
from staleflow.pipeline.coordination.events import (
    DecodeStats,
    Event,
    InstanceReported,
    InstanceSlept,
    PullFinished,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
)
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.runtime.actors import SERVER, Actors
from staleflow.stores.errors import ActorLost
from staleflow.tasks.actors.rollout_instance import RequestOutcome
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.engines.base import EngineLoad

POLL_S = 0.5
"""Seconds that a poll for results waits at an instance at most; it returns at once when something ended."""
REPORT_S = 0.5
"""Seconds between two reports of an instance's progress."""


class InstanceLink:
    """Sends commands to one instance and emits its events. All coroutines raise ActorLost when the instance must be
    replaced. emit: called with every event."""

    def __init__(
        self,
        instance: InstanceHandle,
        actors: Actors,
        deadlines: DeadlineConfig,
        time_scale: float,
        emit: Callable[[Event], None],
        *,
        drafts: bool = False,
    ) -> None:
        """drafts: whether instances draft tokens, in which case the coordinator needs the duration of steps."""
        self._instance = instance
        self._name = instance.placed.name
        self._actors = actors
        self._deadlines = deadlines
        self._time_scale = time_scale
        self._emit = emit
        self._drafts = drafts
        self._stillness = StallDetector(deadlines.sample_s)

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Three coroutines, to be run concurrently until the instance is lost."""
        return self._send(), self._listen(), self._watch()

    async def _send(self) -> None:
        """Carry out commands in order; consecutive ones of a kind travel together, pulls alone."""
        outbox = self._instance.outbox
        pending: Command | None = None
        while True:
            command = pending or await outbox.get()
            pending = None
            batch = [command]
            if not isinstance(command, Pull):
                while not outbox.empty():
                    following = outbox.get_nowait()
                    if type(following) is not type(command):
                        pending = following
                        break
                    batch.append(following)
            await self._execute(batch)

    async def _execute(self, batch: list[Command]) -> None:
        match batch[0]:
            case Route():
                items = tuple(
                    RouteItem(trajectory=c.trajectory, route_number=c.route_number, version=c.version)
                    for c in batch
                    if isinstance(c, Route)
                )
                await self._actors.ask(self._name, "route", SERVER, items)
            case Abort() | ReleaseCache():
                ids = tuple(c.trajectory for c in batch if isinstance(c, Abort | ReleaseCache))
                await self._actors.ask(self._name, "abort", ids)
            case SetDraftLength():
                await self._actors.ask(
                    self._name, "set_draft_length", [c.length for c in batch if isinstance(c, SetDraftLength)][-1]
                )
            case Interrupt():
                ids = tuple(c.trajectory for c in batch if isinstance(c, Interrupt))
                for o in await self._actors.ask(self._name, "interrupt", SERVER, ids):
                    drafts = {"drafted_tokens": o.drafted_tokens, "accepted_tokens": o.accepted_tokens}
                    self._emit(
                        TrajectoryInterrupted(
                            trajectory=o.trajectory, route_number=o.route_number, tokens=o.tokens, **drafts
                        )
                    )
            case Pull(instance=instance, version=version):
                await self._actors.pull(self._instance, version)
                self._emit(PullFinished(instance=instance, version=version))
            case Sleep(instance=instance, step=step):
                await self._actors.put_to_sleep(self._instance)
                self._emit(InstanceSlept(instance=instance, step=step))

    async def _listen(self) -> None:
        """Pass on the results of requests that ended."""
        within_s = self._deadlines.call_s + POLL_S  # and as much again for its own call to the server
        while True:
            outcomes: list[RequestOutcome] = await self._actors.ask(
                self._name, "next_events", SERVER, POLL_S, deadline="call_s", within_s=within_s
            )
            for o in outcomes:
                drafts = {"drafted_tokens": o.drafted_tokens, "accepted_tokens": o.accepted_tokens}
                event: Event = TrajectorySampled(
                    trajectory=o.trajectory, route_number=o.route_number, tokens=o.tokens, **drafts
                )
                if o.error:
                    event = TrajectoryFailed(trajectory=o.trajectory, route_number=o.route_number, error=o.error)
                self._emit(event)

    async def _watch(self) -> None:
        """Report progress, measure how busy the engine is, and notice when it stands still."""
        instance = self._instance
        started_s: EngineLoad = await self._actors.ask(self._name, "report")
        instance.before, before = started_s, started_s
        while True:
            await asyncio.sleep(REPORT_S)
            load: EngineLoad = await self._actors.ask(self._name, "report")
            stalled_s = self._stillness.observe(load, now_s(), loading=instance.loading)
            if stalled_s:
                raise ActorLost(
                    f"{self._name} has {load.running} trajectories to sample and has sampled nothing for "
                    f"{stalled_s:.0f} s; deadlines.sample_s allows {self._deadlines.sample_s:g}",
                    self._name,
                )
            stats, before = self._decode_stats(before, load), load
            instance.busy_s = load.busy_s - started_s.busy_s
            instance.tokens_sampled = load.tokens_sampled
            instance.load = load
            reported_steps = stats if self._drafts else None
            self._emit(
                InstanceReported(
                    instance=instance.id, progress=load.progress, delivered=load.delivered, steps=reported_steps
                )
            )

    def _decode_stats(self, before: EngineLoad, load: EngineLoad) -> DecodeStats:
        """What the engine has decoded between two loads."""
        return DecodeStats(
            running=max(0, load.running - load.waiting),
            kv_tokens=load.kv_tokens,
            seconds=(load.busy_s - before.busy_s) * self._time_scale,
            tokens=load.tokens_sampled - before.tokens_sampled,
            drafts=load.drafts - before.drafts,
            drafted_tokens=load.drafted_tokens - before.drafted_tokens,
            accepted_tokens=load.accepted_tokens - before.accepted_tokens,
        )


class StallDetector:
    """Detects that an engine with work makes no progress. allowed_s: seconds without progress that are allowed."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._last_sign: object = None
        self._since_s = 0.0

    def observe(self, load: EngineLoad, now: float, *, loading: bool = False) -> float:
        """Seconds without progress once they exceed the allowed ones, else 0. Loading weights, and starting or ending a
        request, count as progress. loading: whether the engine is loading weights."""
        sign = (load.version, load.tokens_sampled, load.progress)
        if sign != self._last_sign or not load.running or loading:
            self._last_sign, self._since_s = sign, now
        stalled_s = now - self._since_s
        return stalled_s if stalled_s > self._allowed_s else 0.0

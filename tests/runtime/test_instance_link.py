"""The link to one rollout instance: order of commands, results, timeouts and stalled engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from staleflow.pipeline.coordination.commands import Abort, Interrupt, Pull, Route
from staleflow.pipeline.coordination.events import (
    InstanceReported,
    PullFinished,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
)
from staleflow.pipeline.runtime.instance_link import InstanceLink, StallDetector
from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import EngineLoad
from tests.support import virtual_time
from tests.support.bodies import Body, Stage
from tests.support.driver_runs import IN_RUN
from tests.support.in_process import Fault
from tests.support.scripted import World

RUN = virtual_time.run


def load(tokens: int, **changes: Any) -> EngineLoad:
    values: dict[str, Any] = {
        "version": PolicyVersion(0), "running": 2, "kv_tokens": 9, "busy_s": 1.0, "tokens_sampled": tokens,
        "progress": ((TrajectoryId(0), tokens),),
    }  # fmt: skip
    return EngineLoad(**(values | changes))


def test_only_a_busy_engine_without_progress_counts_as_stalled() -> None:
    watch = StallDetector(10.0)
    assert watch.observe(load(5), 0.0) == 0
    assert watch.observe(load(5), 9.0) == 0
    assert watch.observe(load(6), 11.0) == 0, "it sampled"
    assert watch.observe(load(6, version=PolicyVersion(1)), 20.0) == 0, "it loaded weights"
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 29.0) == 0, "one ended"
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 39.0) == 0
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 39.5) == 10.5
    assert watch.observe(load(6, running=0, progress=()), 99.0) == 0, "it has nothing to do"
    assert watch.observe(load(6), 108.0) == 0, "its requests are new"
    assert watch.observe(load(6), 150.0, loading=True) == 0, "it loads weights"
    assert watch.observe(load(6), 159.0) == 0
    assert watch.observe(load(6), 161.0) == 11.0


# -- the link, with real instances in virtual time -----------------------------------------------------------------

A, B, C, D = (TrajectoryId(i) for i in range(4))
V0, V1 = PolicyVersion(0), PolicyVersion(1)
ONE = InstanceId("rollout-0")


def route(trajectory: TrajectoryId, version: PolicyVersion = V0, route_number: int = 1) -> Route:
    return Route(trajectory=trajectory, route_number=route_number, instance=ONE, version=version)


def abort(trajectory: TrajectoryId) -> Abort:
    return Abort(trajectory=trajectory, instance=ONE)


def interrupt(trajectory: TrajectoryId) -> Interrupt:
    return Interrupt(trajectory=trajectory, instance=ONE)


def pull(version: PolicyVersion) -> Pull:
    return Pull(instance=ONE, version=version)


@dataclass
class Linked:
    """A running instance and the events of its link."""

    stage: Stage
    link: Any
    tasks: list[asyncio.Task[None]]
    timed_events: list[tuple[float, Any]] = field(default_factory=list)

    def give(self, *commands: Any) -> None:
        for command in commands:
            self.stage.actors.instances[ONE].outbox.put_nowait(command)

    def events(self, *types: type[Any]) -> list[Any]:
        return [event for _, event in self.timed_events if isinstance(event, types)]

    def sent(self, *but: str) -> list[str]:
        """Return the methods called after the initial pull."""
        begun = [m for m in self.stage.workers.methods(ONE) if m not in ("next_events", "report", "logprobs")]
        return [m for m in begun[1:] if m not in but]

    async def lost(self) -> ActorLost:
        """Return the error that ends the link."""
        done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, ActorLost)
        return error

    def engine(self) -> Any:
        return self.stage.workers.actor(ONE).engine


@contextlib.asynccontextmanager
async def linked(body: Body, *, reports_decode_stats: bool = False, **kwargs: Any) -> AsyncIterator[Linked]:
    """Link the only instance of a run. Two groups of two are drawn, and version 1 is published."""
    async with body.placed("rollout.instances=1", **kwargs) as stage:
        await stage.actors.ask("server", "draw", 0, 2)
        stage.publish(V1)
        time = asyncio.get_running_loop().time
        one: Linked
        link = InstanceLink(
            stage.actors.instances[ONE], stage.actors, stage.config.deadlines, 1.0,
            lambda event: one.timed_events.append((time(), event)), reports_decode_stats=reports_decode_stats,
        )  # fmt: skip
        tasks = [asyncio.ensure_future(work) for work in link.coroutines()]
        one = Linked(stage, link, tasks)
        try:
            yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_commands_are_sent_in_order_and_grouped_by_kind(body: Body) -> None:
    async with linked(body) as link:
        link.give(route(A), route(B), route(C), abort(A), interrupt(B), interrupt(C), pull(V1), pull(V1), route(D, V1))
        await asyncio.sleep(1.0)
        assert link.sent() == ["route", "abort", "interrupt", "pull", "pull", "route"]
        calls = [c for c in link.stage.workers.calls if c.actor == ONE and c.method in ("route", "interrupt", "abort")]
        routed = [[i.trajectory for i in c.args[1]] for c in calls if c.method == "route"]
        assert routed == [[A, B, C], [D]]
        assert [c.args[-1] for c in calls if c.method != "route"] == [(A,), (B, C)]
        assert [e.trajectory for e in link.events(TrajectoryInterrupted)] == [B, C]


async def test_a_command_waits_for_the_reply_to_the_previous_one(body: Body) -> None:
    """A Route after a Pull needs the new weights: an instance rejects one that comes early."""
    async with linked(body, faults=[Fault(actor=ONE, method="pull", nth=2, late_s=2.5)]) as link:
        link.give(pull(V1), route(A, V1))
        await asyncio.sleep(2.0)
        assert link.sent() == ["pull"]
        await asyncio.sleep(1.0)
        assert link.sent() == ["pull", "route"]
        ((at, finished),) = [(at, e) for at, e in link.timed_events if isinstance(e, PullFinished)]
        assert finished == PullFinished(instance=ONE, version=V1)
        routed = next(c.at_s for c in link.stage.workers.calls if c.method == "route")
        assert at <= routed
        await asyncio.sleep(2.0)
        assert [e.trajectory for e in link.events(TrajectorySampled)] == [A]


async def test_the_version_that_was_loaded_is_passed_on(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load_newest(*_: Any) -> PolicyVersion:
        return V1

    async with linked(body) as link:
        monkeypatch.setattr(link.stage.actors, "pull", load_newest)
        link.give(pull(V0))
        await asyncio.sleep(0.1)
        assert link.events(PullFinished) == [PullFinished(instance=ONE, version=V1)]


async def test_every_result_is_passed_on_once_with_its_route_number(body: Body) -> None:
    async with linked(body) as link:
        link.give(route(A, route_number=3), route(B, route_number=1), route(C, route_number=2))
        await asyncio.sleep(5.0)
        sampled = {(e.trajectory, e.route_number, e.tokens) for e in link.events(TrajectorySampled)}
        assert sampled == {(A, 3, 8), (B, 1, 13), (C, 2, 18)}
        assert len(link.events(TrajectorySampled)) == 3


@pytest.mark.parametrize(
    "change", [lambda a: a[::-1], lambda a: [*a, *a], lambda a: a[:1]], ids=["turned", "twice", "cut"]
)
async def test_late_repeated_and_reordered_results_are_passed_on(body: Body, change: Any) -> None:
    """The coordinator detects late, repeated and reordered results by their route numbers."""
    values: list[Any] = []

    def noted(answer: Any) -> Any:
        values.extend(change(answer))
        return change(answer)

    async with linked(
        body, world=World(length=lambda _: 9), faults=[Fault(actor=ONE, method="next_events", nth=0, change=noted)]
    ) as link:
        link.give(route(A), route(B), route(C))
        await asyncio.sleep(3.0)
        assert [e.trajectory for e in link.events(TrajectorySampled)] == [o.trajectory for o in values]
        assert values


async def test_drafted_token_counts_are_passed_on(body: Body) -> None:
    def drafted(answer: Any) -> Any:
        return [dataclasses.replace(o, drafted_tokens=7, accepted_tokens=4) for o in answer]

    faults = [Fault(actor=ONE, method=method, nth=0, change=drafted) for method in ("next_events", "interrupt")]
    async with linked(body, faults=faults) as link:
        link.give(route(A), route(D))
        await asyncio.sleep(0.5)
        link.give(interrupt(D))
        await asyncio.sleep(1.5)
        ended = [*link.events(TrajectorySampled), *link.events(TrajectoryInterrupted)]
        assert [(e.trajectory, e.drafted_tokens, e.accepted_tokens) for e in ended] == [(A, 7, 4), (D, 7, 4)]


async def test_a_failed_request_is_passed_on_with_its_error(body: Body) -> None:
    def failing(answer: Any) -> Any:
        return [dataclasses.replace(o, error="out of memory") for o in answer]

    async with linked(body, faults=[Fault(actor=ONE, method="next_events", nth=0, change=failing)]) as link:
        link.give(route(A, route_number=4))
        await asyncio.sleep(2.0)
        assert link.events(TrajectoryFailed) == [TrajectoryFailed(trajectory=A, route_number=4, error="out of memory")]
        assert link.events(TrajectorySampled) == []


async def test_an_interrupted_response_is_passed_on_with_its_tokens(body: Body) -> None:
    async with linked(body) as link:
        link.give(route(D))
        await asyncio.sleep(0.5)
        link.give(interrupt(D))
        await asyncio.sleep(0.5)
        (event,) = link.events(TrajectoryInterrupted)
        assert (event.trajectory, event.route_number) == (D, 1)
        assert 5 <= event.tokens < 23
        assert link.events(TrajectorySampled) == []


async def test_progress_and_engine_busy_time_are_reported(body: Body) -> None:
    async with linked(body) as link:
        await asyncio.sleep(1.6)
        link.give(route(D))
        await asyncio.sleep(1.0)
        reports = link.events(InstanceReported)
        assert len(reports) == 5
        assert reports[0].progress == ()
        ((trajectory, tokens),) = reports[-1].progress
        assert (trajectory, 0 < tokens < 23) == (D, True)
        instance = link.stage.actors.instances[ONE]
        assert instance.tokens_sampled == tokens
        assert 2.0 < instance.busy_s < 2.6


async def test_each_decode_step_is_in_one_report(body: Body) -> None:
    async with linked(body, reports_decode_stats=True) as link:
        link.give(route(D))
        await asyncio.sleep(2.6)
        reports, instance = link.events(InstanceReported), link.stage.actors.instances[ONE]
        assert sum(report.steps.tokens for report in reports) == instance.tokens_sampled == 23
        assert sum(report.steps.seconds for report in reports) == pytest.approx(instance.busy_s)


async def test_the_intervals_of_messages_grow_with_the_fleet(body: Body) -> None:
    async with linked(body) as link:
        instances, calls = link.stage.actors.instances, link.stage.workers.calls
        instances |= {InstanceId(f"rollout-{i}"): instances[ONE] for i in range(1, 2048)}
        await asyncio.sleep(1.0)  # until the waits of before are over
        begin = len(calls)
        await asyncio.sleep(160.0)
        methods = [c.method for c in calls[begin:]]
        assert methods.count("report") == 20, "320 in a small fleet"
        assert methods.count("next_events") < 50, "320 in a small fleet; a delivery every 10 s ends a wait, too"


SILENT = {
    "route": (6.0, "rollout-0 did not answer within 6 s (deadlines.call_s)"),
    "interrupt": (6.0, "rollout-0 did not answer within 6 s (deadlines.call_s)"),
    "abort": (3.0, "rollout-0 did not answer within 3 s (deadlines.call_s)"),
    "pull": (3.0, "rollout-0 did not answer within 3 s (deadlines.call_s)"),
    "report": (3.0, "rollout-0 did not answer within 3 s (deadlines.call_s)"),
    "next_events": (6.5, "rollout-0 did not answer within 6.5 s (deadlines.call_s)"),
}
"""Seconds and message. Three of these methods also call the trajectory server, which may take call_s."""


@pytest.mark.parametrize("method", SILENT)
async def test_a_call_without_reply_is_a_loss_after_its_timeout(body: Body, method: str) -> None:
    seconds, message = SILENT[method]
    async with linked(body, faults=[Fault(actor=ONE, method=method, nth=IN_RUN[method], silent="before")]) as link:
        link.give(route(A), abort(A), interrupt(B), pull(V1))
        assert str(await link.lost()) == message
        asked = [c.at_s for c in link.stage.workers.calls if (c.actor, c.method) == (ONE, method)][-1]
        assert asyncio.get_running_loop().time() == pytest.approx(asked + seconds, abs=0.01)


async def test_a_stalled_engine_is_lost_after_sample_s_despite_replies(body: Body) -> None:
    async with linked(body) as link:
        link.give(route(A), route(B))
        await asyncio.sleep(0.1)
        link.engine().stand_still()
        begin = asyncio.get_running_loop().time()
        message = str(await link.lost())
        assert "rollout-0 has 2 trajectories to sample and has sampled nothing for 20 s" in message
        assert "deadlines.sample_s allows 20" in message
        assert 20 <= asyncio.get_running_loop().time() - begin <= 21.1


async def test_an_idle_engine_does_not_count_as_stalled(body: Body) -> None:
    async with linked(body) as link:
        await asyncio.sleep(300.0)
        assert not any(task.done() for task in link.tasks)

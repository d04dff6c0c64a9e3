"""A rollout instance and a trajectory server without a cluster: interrupts, deliveries and restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.pipeline.config import actor_settings, loading
from staleflow.stores.errors import ActorLost, ProtocolViolation
from staleflow.stores.in_flight.stop_criteria import NO_STOP
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
)
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import compare_by_name
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.stores.weights.weight_report import WeightReport
from staleflow.tasks.actors import rollout_instance
from staleflow.tasks.actors.engine_requests import build_request
from staleflow.tasks.actors.parameter_server import PublishedWeights
from staleflow.tasks.actors.rollout_instance import RequestOutcome, RolloutInstance
from staleflow.tasks.actors.server_messages import RewardItem
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.engines.base import EngineLoad, FailedRequest, LoadResult, Request, SampledTokens, TokenScores
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.microbatches import BatchMessage
from tests.support import virtual_time
from tests.support.bodies import Body
from tests.support.driver_runs import EVALUATED
from tests.support.route_items import route_item
from tests.support.scripted import VirtualRolloutInstance, VirtualSettings, World, response, server_class
from tests.support.segments import delivery, sampled_segment
from tests.tasks.adapter_conformance import AdapterVersions
from tests.tasks.branching import branching_row
from tests.tasks.test_engine_transformers import changed_weights

RUN = virtual_time.run


@dataclass(frozen=True)
class ExistingEngineSettings:
    """Settings that return an existing engine."""

    engine: Any

    def build(self, instance: InstanceId, threads: int) -> Any:
        return self.engine


def settings_of(engine: Any) -> Any:
    """Return settings of an instance whose engine is this one."""
    return ExistingEngineSettings(engine)


class UnreachableServer:
    """A server that cannot be reached."""

    async def deliver(self, *_: object) -> None:
        raise OSError("connection closed")


def make_server(world: World, folder: Path, *overrides: str) -> Any:
    settings = actor_settings.server_settings(Body(folder).config(*overrides), folder / "store", 128)
    return server_class(world)(settings, 0.0)


def make_instance(world: World, name: str = "one", delivery_interval_s: float = 0.0) -> VirtualRolloutInstance:
    return VirtualRolloutInstance(VirtualSettings(world), InstanceId(name), 1, 30.0, delivery_interval_s)


async def test_a_request_of_a_branch_has_its_context_and_the_prompt_of_its_trajectory(tmp_path: Path) -> None:
    """Drafts are looked up by the prompt, which the context of a branch may not contain."""
    branching = replace(branching_row().trajectory, finish=FinishReason.UNFINISHED)
    settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "store", 128)
    asked, whole = (
        build_request(t, route_item(i), settings, None, 0, NO_STOP)
        for i, t in enumerate((branching, replace(branching, spans=branching.spans[:2])))
    )
    assert isinstance(asked, Request) and isinstance(whole, Request)
    prompt, response = tuple(branching.prompt_tokens), tuple(branching.response_tokens)
    assert asked.tokens == tuple(branching.context) != (*prompt, *response)
    assert whole.tokens == (*prompt, *response[: whole.num_response_tokens])
    assert asked.prompt_tokens == whole.prompt_tokens == prompt
    cut = replace(branching, spans=branching.spans[:1])  # in the middle of its first turn
    further = build_request(cut, route_item(2), settings, None, 30, NO_STOP)
    assert isinstance(further, Request)
    assert further.max_new_tokens == 30 - cut.num_tokens < 30


@pytest.mark.real_time
async def test_interrupted_tokens_are_delivered_and_continued(job: Path, tmp_path: Path) -> None:
    """The response has both parts without gaps or duplicates."""
    config = loading.load(job, ("rollout.max_new_tokens=100",))
    server = TrajectoryServer(actor_settings.server_settings(config, tmp_path / "store", 128), 0.0)
    one, two = (
        RolloutInstance(actor_settings.engine_settings(config, i, ()), InstanceId(name), 1, 30.0, 0.0)
        for i, name in enumerate("ab")
    )
    try:
        await server.draw(0, 1)
        await one.route(server, (route_item(0, 1), route_item(1, 1)))
        deadline = time.monotonic() + 120
        while not any(n >= 3 for _, n in (await one.report()).progress):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        (outcome,) = await one.interrupt(server, (TrajectoryId(0),))
        first = server._in_flight.live[TrajectoryId(0)].response_tokens.tolist()
        assert (outcome.trajectory, outcome.route_number, outcome.num_tokens) == (0, 1, len(first))
        assert 3 <= len(first) < 100
        await two.route(server, (route_item(0, 2),))
        ended: list[RequestOutcome] = []
        while not ended:
            ended = await two.next_events(server, 5.0)
        assert [(o.trajectory, o.route_number, o.num_tokens, o.error) for o in ended] == [(0, 2, 100, "")]
        whole = server._in_flight.live[TrajectoryId(0)]
        assert [s.instance for s in whole.segments] == ["a", "b"]
        np.testing.assert_array_equal(whole.response_tokens[: len(first)], first)
        with pytest.raises(ProtocolViolation, match="serves version 0, trajectory 2 needs 3"):
            await two.route(server, (route_item(2, 1, version=3),))
    finally:
        await one.close()
        await two.close()
        await server.close()


def published_as(version: int, file: Path) -> PublishedWeights:
    """Return the publication of a trainer that wrote this file."""
    digest = fingerprint(weight_folder.read(file))
    return PublishedWeights(
        version=PolicyVersion(version), fingerprint=digest, probe_tokens=(), probe_logprobs=(), drift_limit=1e-3
    )


@pytest.mark.real_time
async def test_no_token_sampled_with_scrambled_weights_is_delivered(
    job: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Requests finish under the wrong weights before the fingerprint comparison is done, while events are polled."""
    config = loading.load(job, ("rollout.max_new_tokens=100",))
    server = TrajectoryServer(actor_settings.server_settings(config, tmp_path / "store", 128), 0.0)
    instance = RolloutInstance(
        actor_settings.engine_settings(config, 0, ()), InstanceId("a"), 1, 30.0, delivery_interval_s=0.01
    )
    engine: Any = instance._engine
    load, named = engine.load, dict(engine._model.named_parameters())

    def scramble(version: PolicyVersion, file: Path) -> LoadResult:
        loaded: LoadResult = load(version, file)
        next(iter(named.values())).data.view(torch.int32)[0, 0] ^= 1
        while engine.load_statistics().running:
            time.sleep(0.001)
        return replace(loaded, weights=compare_by_name(named, weight_folder.read(file)))

    engine.load = scramble
    path, _ = changed_weights(tiny_model, tmp_path)
    try:
        await server.draw(0, 1)
        await instance.route(server, (route_item(0, 1), route_item(1, 1)))
        pull = asyncio.ensure_future(instance.pull(published_as(1, path), str(path)))
        while not pull.done():
            await instance.next_events(server, 0.05)
        check = await pull
        assert (check.outcome, check.weights.contradicted) == ("contradicted", 1)
        assert "1 contradicted (model.embed_tokens.weight)" in check.refused
        assert await instance.next_events(server, 0.05) == []
        live = server._in_flight.live
        assert {s.version for i in (0, 1) for s in live[TrajectoryId(i)].segments} <= {0}
    finally:
        await instance.close()
        await server.close()


@pytest.mark.real_time
async def test_a_trajectory_continues_under_its_version_while_that_is_served(
    job: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """The instance has pulled a newer adapter, which new trajectories use."""
    overrides = ("training.lora={rank=3, alpha=6}", "rollout.on_pull=adapter")
    config = loading.load(job, overrides)
    server = TrajectoryServer(actor_settings.server_settings(config, tmp_path / "store", 128), 0.0)
    settings = actor_settings.engine_settings(config, 0, ())
    instance = RolloutInstance(settings, InstanceId("a"), 1, 30.0, 0.0)
    try:
        await server.draw(0, 1)
        file = AdapterVersions(tiny_model, tmp_path / "published").file(1)
        assert (await instance.pull(published_as(1, file), str(file))).outcome == "verified"
        await instance.route(server, (route_item(0, 2, version=0), route_item(1, 1, version=1)))
        ended: list[RequestOutcome] = []
        while len(ended) < 2:
            ended += await instance.next_events(server, 5.0)
        versions = [{s.version for s in server._in_flight.live[TrajectoryId(i)].segments} for i in (0, 1)]
        assert versions == [{0}, {1}]
    finally:
        await instance.close()
        await server.close()


async def test_a_delivered_response_of_a_lost_instance_is_not_continued(tmp_path: Path) -> None:
    """The server has the tokens but the driver was not notified: the next instance reports the end."""
    world = World(length=lambda _: 9)
    server = make_server(world, tmp_path)
    first, second = (make_instance(world, name) for name in ("one", "two"))
    await server.draw(0, 1)
    await first.route(server, (route_item(0, 1), route_item(1, 1)))
    assert len(await first.next_events(server, 5.0)) == 2
    await second.route(server, (route_item(0, 2),))
    answered = await second.next_events(server, 5.0)
    assert answered == [RequestOutcome(trajectory=TrajectoryId(0), route_number=2, num_tokens=9)]
    assert await second.next_events(server, 1.0) == []
    (held,) = await server.record_routes((route_item(0, 2),))
    assert held == delivery(0, route_number=2, start=9)
    assert (await second.report()).running == 0


async def test_an_ended_turn_is_reported_once_when_another_is_routed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second route is still with the engine when the outcome of the first is fetched."""
    server = make_server(World(length=lambda _: 9), tmp_path)
    await server.draw(0, 1)
    await server.record_routes((route_item(0, 1), route_item(1, 1)))
    await server.deliver([whole_response(TrajectoryId(i)) for i in (0, 1)])
    instance = make_instance(World())
    await instance.route(server, (route_item(0, 2),))
    command = instance._command

    async def slow_command(*args: Any) -> Any:
        await asyncio.sleep(1.0)
        return await command(*args)

    monkeypatch.setattr(instance, "_command", slow_command)
    second = asyncio.ensure_future(instance.route(server, (route_item(1, 2),)))
    await asyncio.sleep(0.5)
    assert [o.trajectory for o in await instance.next_events(server, 0.1)] == [0]
    await second
    assert [o.trajectory for o in await instance.next_events(server, 0.1)] == [1]


async def test_an_evaluation_of_a_version_that_is_no_longer_served_fails_on_the_instance(tmp_path: Path) -> None:
    """The pull before it had to load a newer version. Training goes on under that one."""
    server = make_server(World(length=lambda _: 9), tmp_path, *EVALUATED)
    instance = make_instance(World(length=lambda _: 9))
    instance.engine.version = PolicyVersion(2)
    await server.draw(0, 1)
    await instance.route(server, (route_item(-2, version=1), route_item(0, version=1)))
    outcomes = {outcome.trajectory: outcome for outcome in await instance.next_events(server, 5.0)}
    assert outcomes[TrajectoryId(-2)].error == "one serves version 2, trajectory -2 needs 1"
    if TrajectoryId(0) not in outcomes:
        outcomes |= {outcome.trajectory: outcome for outcome in await instance.next_events(server, 5.0)}
    assert (outcomes[TrajectoryId(0)].num_tokens, outcomes[TrajectoryId(0)].error) == (9, "")
    with pytest.raises(ProtocolViolation, match="serves version 2, trajectory -2 needs 3"):
        await instance.route(server, (route_item(-2, 2, version=3),))


async def test_an_interrupt_reports_only_its_own_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts run at the same time, and the first ends while the engine stops the requests of the second."""
    server = make_server(World(), tmp_path)
    await server.draw(0, 1)
    instance = make_instance(World(length=lambda _: 90))
    await instance.route(server, (route_item(0, 1), route_item(1, 1)))
    command, durations_s = instance._command, iter((1.0, 2.0))

    async def slow_command(*args: Any) -> Any:
        await asyncio.sleep(next(durations_s))
        return await command(*args)

    monkeypatch.setattr(instance, "_command", slow_command)
    outcomes = await asyncio.gather(*(instance.interrupt(server, (TrajectoryId(i),)) for i in (0, 1)))
    assert [[o.trajectory for o in each] for each in outcomes] == [[0], [1]]


async def test_tokens_of_a_superseded_route_are_dropped(tmp_path: Path) -> None:
    """Two instances sample the trajectory; the server accepts tokens of the newest route only."""
    world = World(length=lambda _: 9)
    server = make_server(world, tmp_path)
    old, new = (make_instance(world, name) for name in ("old", "new"))
    await server.draw(0, 1)
    await old.route(server, (route_item(0, 1),))
    await asyncio.sleep(0.2)
    await new.route(server, (route_item(0, 2),))
    assert await old.next_events(server, 5.0) == [
        RequestOutcome(trajectory=TrajectoryId(0), route_number=1, num_tokens=0)
    ]
    assert await new.next_events(server, 5.0) == [
        RequestOutcome(trajectory=TrajectoryId(0), route_number=2, num_tokens=9)
    ]
    assert server._in_flight.live[TrajectoryId(0)].response_tokens.tolist() == response(0, 9)


async def test_a_lost_instance_loses_only_tokens_since_its_last_delivery(tmp_path: Path) -> None:
    """Another instance continues from there, and delivered tokens are stored once with their version."""
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    lost, other = (
        make_instance(world, name, delivery_interval_s) for name, delivery_interval_s in (("lost", 1.0), ("other", 0.0))
    )
    await server.draw(0, 1)
    await lost.route(server, (route_item(0, 1), route_item(1, 1)))
    delivered: dict[int, list[int]] = {0: [], 1: []}
    while asyncio.get_running_loop().time() < 2.7:
        assert await lost.next_events(server, 0.25) == []
        for trajectory, tokens in (await lost.report()).delivered:
            delivered[trajectory].append(tokens)
    assert len(delivered[0]) == len(delivered[1]) == 2
    assert 20 <= delivered[0][0] < 40 <= delivered[0][1] < 50, "two deliveries of a second's tokens each"
    assert (await lost.report()).delivered == ()
    await other.route(server, (route_item(0, 2),))
    assert server._in_flight.live[TrajectoryId(0)].response_tokens.tolist() == response(0, delivered[0][1])
    await lost.next_events(server, 1.5)  # it is not dead, only slow
    assert await other.next_events(server, 5.0) == [
        RequestOutcome(trajectory=TrajectoryId(0), route_number=2, num_tokens=90)
    ]
    whole = server._in_flight.live[TrajectoryId(0)]
    assert list(whole.response_tokens) == response(0, 90)
    assert [(s.instance, len(s.tokens)) for s in whole.segments] == [
        ("lost", delivered[0][1]),
        ("other", 90 - delivered[0][1]),
    ]


async def test_a_long_poll_does_not_delay_a_delivery(tmp_path: Path) -> None:
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    instance = make_instance(world, "one", 1.0)
    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    for _ in range(2):  # the first ends as the delivery is due, the second delivers
        assert await instance.next_events(server, 60.0) == []
    assert asyncio.get_running_loop().time() < 1.1
    assert len((await instance.report()).delivered) == 1


async def test_each_delivery_starts_at_the_end_of_the_previous_one(tmp_path: Path) -> None:
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    instance = make_instance(world, "one", 1.0)
    spans: list[tuple[int, int]] = []

    class Recording:
        async def deliver(self, parts: list[SampledTokens]) -> Any:
            spans.extend((p.start, p.start + sum(len(s.tokens) for s in p.segments)) for p in parts)
            return await server.deliver(parts)

    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    for _ in range(3):
        await asyncio.sleep(1.0)
        await instance.flush(Recording())
    assert len(spans) == 3
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]


@pytest.mark.parametrize("verb", ["next_events", "next_events_at_the_end", "flush", "interrupt"])
async def test_instance_calls_return_only_after_their_tokens_are_delivered(tmp_path: Path, verb: str) -> None:
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    ended = verb == "next_events_at_the_end"
    instance = make_instance(world, "one", 0.0 if ended else 1.0)
    may_answer = asyncio.Event()
    call: asyncio.Future[Any]

    class Slow:
        async def deliver(self, sampled: list[SampledTokens]) -> Any:
            await may_answer.wait()
            return await server.deliver(sampled)

    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    assert await instance.next_events(server, 0.25) == []  # the spool is due a second after this
    await asyncio.sleep(20.0 if ended else 1.5)
    match verb:
        case "flush":
            call = asyncio.ensure_future(instance.flush(Slow()))
        case "interrupt":
            call = asyncio.ensure_future(instance.interrupt(Slow(), (TrajectoryId(0),)))
        case _:
            call = asyncio.ensure_future(instance.next_events(Slow(), 0.25))
    await asyncio.sleep(5.0)
    assert not call.done()
    may_answer.set()
    await call
    assert server._in_flight.live[TrajectoryId(0)].num_tokens >= 10


async def test_interrupted_responses_are_delivered_after_the_server_was_unreachable(tmp_path: Path) -> None:
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    instance = make_instance(world)

    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1), route_item(1, 1)))
    await asyncio.sleep(1.0)
    with pytest.raises(ActorLost, match="server is gone"):
        await instance.interrupt(UnreachableServer(), (TrajectoryId(0), TrajectoryId(1)))
    outcomes = await instance.interrupt(server, (TrajectoryId(0), TrajectoryId(1)))
    assert outcomes == [RequestOutcome(trajectory=TrajectoryId(i), route_number=1, num_tokens=20) for i in (0, 1)]
    assert await instance.interrupt(server, (TrajectoryId(0),)) == []


async def test_two_interrupts_at_once_report_the_tokens_of_both(tmp_path: Path) -> None:
    world = World(length=lambda _: 90)
    server = make_server(world, tmp_path)
    instance = make_instance(world)

    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1), route_item(1, 1)))
    await asyncio.sleep(1.0)
    both = await asyncio.gather(*(instance.interrupt(server, (TrajectoryId(i),)) for i in (0, 1)))
    assert {(o.trajectory, o.num_tokens) for outcomes in both for o in outcomes} == {(0, 20), (1, 20)}
    assert await instance.interrupt(server, (TrajectoryId(0),)) == []


async def test_finished_responses_are_delivered_after_the_server_was_unreachable(tmp_path: Path) -> None:
    world = World(length=lambda _: 20)
    server = make_server(world, tmp_path)
    instance = make_instance(world)

    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1), route_item(1, 1)))
    with pytest.raises(ActorLost, match="server is gone"):
        await instance.next_events(UnreachableServer(), 5.0)
    outcomes: list[RequestOutcome] = []
    while len(outcomes) < 2 and asyncio.get_running_loop().time() < 60:
        outcomes += await instance.next_events(server, 5.0)
    assert [(o.trajectory, o.num_tokens, o.error) for o in outcomes] == [(0, 20, ""), (1, 20, "")]
    assert list(server._in_flight.live[TrajectoryId(0)].response_tokens) == response(0, 20)


async def test_a_response_with_a_non_finite_logprob_fails(tmp_path: Path) -> None:
    """Such a token has no importance ratio. Earlier tokens are kept, and other requests are not affected."""
    poisoned = set[int]()
    world = World(length=lambda _: 20, not_finite=poisoned.__contains__)
    server = make_server(world, tmp_path)
    instance = make_instance(world)
    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1), route_item(1, 1)))
    await asyncio.sleep(0.25)
    await instance.flush(server)
    poisoned.add(0)
    await asyncio.sleep(0.25)
    await instance.flush(server)
    outcomes = {o.trajectory: o for o in await instance.next_events(server, 5.0)}
    assert (outcomes[TrajectoryId(1)].num_tokens, outcomes[TrajectoryId(1)].error) == (20, "")
    assert (outcomes[TrajectoryId(0)].num_tokens, outcomes[TrajectoryId(0)].error) == (
        5,
        "token 19 of the response has a logprob of nan under version 0 on one; every sampled token needs a finite one",
    )
    held = server._in_flight.live[TrajectoryId(0)]
    assert (held.num_tokens, held.finish) == (5, FinishReason.UNFINISHED)
    assert np.isfinite(held.logprobs).all()


async def test_a_restarted_server_has_everything_that_was_acknowledged(tmp_path: Path) -> None:
    """Tokens, epochs, rewards, batches and endings, during a run whose other actors continue."""
    world = World(length=lambda trajectory: 9 if trajectory < 5 else 90)
    config = Body(tmp_path).config()
    settings = actor_settings.server_settings(config, tmp_path / "store", 128)
    first = server_class(world)(settings, 0.0)
    instance = make_instance(world, "one", 1.0)
    await first.draw(0, 4)
    await instance.route(first, tuple(route_item(i, 1) for i in range(6)))
    assert len(await instance.next_events(first, 5.0)) == 5
    scored = await first.scoring_items(tuple(TrajectoryId(i) for i in range(5)), (0,) * 5)
    await first.record_rewards([RewardItem(*i[:3], ScoredResponse(reward=float(i.trajectory))) for i in scored])
    await asyncio.sleep(1.0)
    await instance.next_events(first, 0.1)
    versions = (PolicyVersion(0), PolicyVersion(0))
    packed = (await first.take_batch(0, (TrajectoryId(1), TrajectoryId(0)), versions, 0)).rows()
    ending = Ending(
        trajectory=TrajectoryId(4), group=GroupId(2), fate=Fate.ABORTED, reason=AbortReason.ENGINE_FAILED, step=0
    )
    await first.discard((ending,), (PolicyVersion(0),))

    second = server_class(world)(replace(settings, resumed=True), 20.0)
    assert repr(second._in_flight) == repr(first._in_flight)
    await second.discard((ending,), (PolicyVersion(0),))
    again = (await second.take_batch(0, (TrajectoryId(1), TrajectoryId(0)), versions, 0)).rows()
    assert [row.response.tolist() for row in again] == [row.response.tolist() for row in packed]
    assert [row.advantage for row in again] == [row.advantage for row in packed]
    drawn = await second.draw(0, 5)
    assert [(g.group, g.source, g.task) for g in drawn] == [(group, 0, -1) for group in range(5)]
    undelivered: list[Any] = instance._undelivered_events
    assert await second.deliver(undelivered) == {}
    (rest,) = await instance.interrupt(second, (TrajectoryId(5),))
    assert rest.num_tokens == second._in_flight.live[TrajectoryId(5)].num_tokens > 20
    assert [len(s.tokens) for s in second._in_flight.live[TrajectoryId(5)].segments] == [rest.num_tokens]
    (unscored,) = await second.scoring_items((TrajectoryId(3),), (0,))
    assert unscored.text

    ledger = LedgerState(num_started=8, num_ended={"consumed:none": 2, "aborted:engine_failed": 1}, live=(),
                         next_step=1, version=0)  # fmt: skip
    await second.commit(CommitRecord(kind="step", step=0, ledger=ledger))
    await second.commit(CommitRecord(kind="step", step=0, ledger=ledger))
    (record,) = world.stores[str(tmp_path / "store")].commits()
    assert (record.num_rows, record.ledger.live) == (3, ((2, 4), (5, 8)))
    third = server_class(world)(replace(settings, resumed=True), 30.0)
    assert repr(third._in_flight) == repr(second._in_flight)
    assert third._in_flight.num_drawn == 5
    assert third._spool._stored_at_step == {0: 1}, "the parts of the spool that hold no other group may be removed"


class Gate:
    """Blocks a thread until the event loop opens it; a deadlock if the loop waits for that thread."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self._reached.set()
        assert self._opened.wait(20), "the event loop waits for a thread"

    async def open(self) -> None:
        """Wait until a thread is blocked, then open the gate."""
        while not self._reached.is_set():
            await asyncio.sleep(0.001)
        self._opened.set()


@pytest.mark.parametrize("count", [None, *range(16)])
def test_a_delivery_leaves_out_tokens_that_the_server_has(count: int | None) -> None:
    whole = delivery(0, sampled_segment(range(3, 8)), sampled_segment(range(8, 13), version=1), start=3)
    rest = rollout_instance._drop_delivered(whole, None if count is None else (1, count))
    start = max(3, min(count or 0, 13))
    assert rest.start == start
    assert [token for segment in rest.segments for token in segment.tokens] == list(range(start, 13))
    assert rollout_instance._drop_delivered(whole, (2, 9)) is whole, "of another route number"


async def test_a_failed_request_is_an_outcome_without_tokens() -> None:
    failed = FailedRequest(trajectory=TrajectoryId(0), route_number=1, error="out of memory")
    engine = SimpleNamespace(version=PolicyVersion(0), events=lambda timeout_s: [failed], close=lambda: None)
    instance = RolloutInstance(settings_of(engine), InstanceId("one"), 1, 30.0, 0.0)
    (outcome,) = await instance.next_events(None, 1.0)
    assert outcome == RequestOutcome(trajectory=TrajectoryId(0), route_number=1, num_tokens=0, error="out of memory")


PUBLISHED = PublishedWeights(
    version=PolicyVersion(1), fingerprint="f", probe_tokens=(), probe_logprobs=(), drift_limit=1.0
)


ASKED = Request(trajectory=TrajectoryId(0), route_number=1, tokens=(1, 2), max_new_tokens=9)


async def test_an_instance_with_rejected_weights_waits_without_events() -> None:
    world = World(loads_wrong=lambda instance, version: True)
    one = make_instance(world)
    one.engine.submit([ASKED])
    assert (await one.report()).running == 1
    assert (await one.pull(PUBLISHED, world.path(1))).refused
    assert (await one.report()).running == 0, "it samples no more"
    assert await one.next_events(None, 5.0) == []
    assert asyncio.get_running_loop().time() == pytest.approx(5.0), "or its driver would poll without a pause"


async def test_calls_of_a_closed_instance_raise_actor_lost() -> None:
    instance = make_instance(World())
    await instance.close()
    for call in (instance.pull(PUBLISHED, ""), instance.abort(())):
        with pytest.raises(ActorLost, match=r"^one is closed$"):
            await call


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("verb", "args", "engine_verb", "engine_args"),
    [
        ("abort", ((TrajectoryId(0),),), "abort", ((TrajectoryId(0),),)),
        ("logprobs", ((1, 2),), "score", ([(1, 2)],)),
        ("sleep", (), "sleep", ()),
    ],
)
async def test_commands_return_only_after_the_engine_has_finished_them(
    verb: str, args: tuple[Any, ...], engine_verb: str, engine_args: tuple[Any, ...]
) -> None:
    gate, calls = Gate(), list[tuple[Any, ...]]()

    def carry_out(*args: Any) -> list[TokenScores]:
        gate.wait()
        calls.append(args)
        return [TokenScores(logprobs=(-0.5,), top_tokens=(2, 3), top_logprobs=(-0.5, -0.2))]

    engine = SimpleNamespace(version=PolicyVersion(0), close=lambda: None, **{engine_verb: carry_out})
    instance = RolloutInstance(settings_of(engine), InstanceId("one"), 1, 30.0, 0.0)
    answer = asyncio.ensure_future(getattr(instance, verb)(*args))
    await asyncio.wait({answer}, timeout=0.02)
    assert not answer.done() and not calls
    await gate.open()
    assert await answer == ((-0.5,) if verb == "logprobs" else None)
    assert calls == [engine_args]
    await instance.close()


@pytest.mark.real_time
async def test_a_status_request_waiting_for_the_engine_blocks_no_other_call() -> None:
    gate = Gate()
    load = EngineLoad(version=PolicyVersion(0), running=0, kv_tokens=0, busy_s=0.0, tokens_sampled=0, progress=())

    class Busy:
        version = PolicyVersion(0)

        def load_statistics(self) -> EngineLoad:
            gate.wait()
            return load

        def close(self) -> None: ...

    instance = RolloutInstance(settings_of(Busy()), InstanceId("one"), 1, 30.0, 0.0)
    report, _ = await asyncio.gather(instance.report(), gate.open())
    assert report == load
    await instance.close()


async def test_a_restarted_server_keeps_the_spool_of_finished_groups_that_are_not_stored(tmp_path: Path) -> None:
    """All members have finished and wait for the next commit."""
    world = World(length=lambda _: 9)
    settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "store", 128)
    first = server_class(world)(settings, 0.0)
    await first.draw(0, 1)
    endings = tuple(
        Ending(trajectory=t, group=GroupId(0), fate=Fate.ABORTED, reason=AbortReason.ENGINE_FAILED, step=0)
        for t in first._in_flight.live
    )
    await first.discard(endings, (PolicyVersion(0),) * len(endings))
    second = server_class(world)(replace(settings, resumed=True), 20.0)
    assert len(second._in_flight.pending_commit()) == len(endings) > 0
    assert not second._in_flight.live
    assert second._spool._stored_at_step == {}
    for server in (first, second):
        await server.close()
        assert server._store_thread.executor._shutdown, "its thread ends"


@pytest.mark.real_time
async def test_tokens_wait_for_an_abandoned_pull_and_for_nothing_after_it() -> None:
    loading, sampling, delivered = Gate(), Gate(), []

    class Pulling:
        version = PolicyVersion(0)

        def load(self, version: PolicyVersion, path: Path) -> LoadResult:
            loading.wait()
            return LoadResult(fingerprint="f", weights=WeightReport(verified=1))

        def events(self, timeout_s: float) -> list[SampledTokens]:
            sampling.wait()
            return [whole_response(TrajectoryId(0))]

        def close(self) -> None: ...

    class Server:
        async def deliver(self, parts: list[SampledTokens]) -> dict[TrajectoryId, int]:
            delivered.extend(parts)
            return {part.trajectory: 9 for part in parts}

    instance = RolloutInstance(settings_of(Pulling()), InstanceId("one"), 1, 30.0, 0.0)
    events = asyncio.ensure_future(instance.next_events(Server(), 0.01))
    await asyncio.sleep(0)
    pull = asyncio.ensure_future(instance.pull(PUBLISHED, ""))
    await asyncio.sleep(0)
    pull.cancel()
    await sampling.open()
    assert await events == []
    assert delivered == []
    await loading.open()
    while instance._is_pulling:
        await asyncio.sleep(0.001)
    (outcome,) = await instance.next_events(Server(), 20.0)
    assert (outcome.trajectory, outcome.num_tokens) == (0, 9)
    assert len(delivered) == 1
    await instance.close()


async def test_a_delivery_waits_for_a_pull_that_begins_while_it_waits() -> None:
    """Otherwise an instance would be replaced as one with refused weights."""
    instance, loop = make_instance(World()), asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    instance._latest_pull = first
    delivery = asyncio.ensure_future(instance._may_deliver(30.0))
    await asyncio.sleep(0)
    first.set_result(None)
    instance._latest_pull = second
    await asyncio.sleep(1.0)
    assert not delivery.done()
    second.set_result(None)
    assert await delivery


async def test_a_delivery_does_not_wait_for_a_load_that_takes_longer_than_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load begins while the tokens to deliver are collected. They are delivered once the weights are checked."""
    world = World(length=lambda _: 90, tokens_per_s=0.5)
    server = make_server(world, tmp_path)
    instance = make_instance(world, "one", 1.0)
    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    peek, load = instance.engine.peek, instance._load

    async def slow_peek() -> list[SampledTokens]:
        await asyncio.sleep(1.0)
        return peek()

    async def slow_load(*args: Any) -> Any:
        await asyncio.sleep(100.0)
        return load(*args)

    monkeypatch.setattr(instance.engine, "peek", slow_peek)
    monkeypatch.setattr(instance, "_load", slow_load)
    assert await instance.next_events(server, 2.0) == []  # the delivery is due a second after this
    events = asyncio.ensure_future(instance.next_events(server, 0.25))
    await asyncio.sleep(0.5)
    published = replace(PUBLISHED, fingerprint=world.fingerprint(1))
    pull = asyncio.ensure_future(instance.pull(published, world.path(1)))
    assert await events == []
    await instance.flush(server)
    assert not pull.done() and server._in_flight.live[TrajectoryId(0)].num_tokens == 0
    assert not (await pull).refused
    assert await instance.next_events(server, 0.25) == []
    assert server._in_flight.live[TrajectoryId(0)].num_tokens > 50


def whole_response(trajectory: TrajectoryId) -> SampledTokens:
    return delivery(trajectory, sampled_segment(response(trajectory, 9), instance="one"))


@pytest.mark.real_time
async def test_decoding_and_packing_run_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(length=lambda _: 9)
    server = make_server(world, tmp_path)
    await server.draw(0, 1)
    ids = (TrajectoryId(0), TrajectoryId(1))
    await server.deliver([whole_response(i) for i in ids])
    decoding, packing = Gate(), Gate()
    text, pack = server._prompts.text, BatchMessage.of

    def decode(tokens: list[int]) -> str:
        decoding.wait()
        decoded: str = text(tokens)
        return decoded

    def packed(rows: list[EndedTrajectory], start: int) -> BatchMessage:
        packing.wait()
        return pack(rows, start)

    monkeypatch.setattr(server._prompts, "text", decode)
    monkeypatch.setattr(BatchMessage, "of", packed)
    scoring, _ = await asyncio.gather(server.scoring_items(ids, (0,) * len(ids)), decoding.open())
    assert [(item.trajectory, item.text) for item in scoring] == [(i, text(response(i, 9))) for i in ids]
    monkeypatch.setattr(server._prompts, "text", text)
    score = ScoredResponse(reward=1.0)
    await server.record_rewards([RewardItem(i.trajectory, i.num_tokens, i.route_number, score) for i in scoring])
    part, _ = await asyncio.gather(server.take_batch(0, ids, (PolicyVersion(0),) * 2, 0), packing.open())
    assert (len(part.rows()), part.num_remaining) == (2, 0)
    await server.close()

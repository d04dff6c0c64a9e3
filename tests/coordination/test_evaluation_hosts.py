"""Instances that host an evaluation, when some restart or leave."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from staleflow.pipeline.coordination.commands import Abort, Command, FinishEvaluation, Interrupt, Pull, Route
from staleflow.pipeline.coordination.events import (
    EvaluationRequested,
    InstanceLeaving,
    InstanceLost,
    PullFinished,
    Tick,
    TrajectoryFailed,
)
from staleflow.pipeline.coordination.events import TrajectoryInterrupted as Interrupted
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.invariants import validate
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId
from tests.coordination.test_coordinator import A, B, Bench, commands_of


def request_evaluation(bench: Bench, count: int = 6) -> list[Command]:
    """Request an evaluation of this many responses; four slots of a fleet of two are reserved for it."""
    groups = tuple(NewGroup(group=GroupId(-1 - i), prompt_tokens=10) for i in range(count))
    return bench.tell(EvaluationRequested(evaluation=0, groups=groups))


def evaluation_routes(commands: Sequence[Command]) -> list[tuple[InstanceId, int]]:
    """Return the instance and the version of each route of an evaluation."""
    return [(route.instance, route.version) for route in commands_of(commands, Route) if route.trajectory < 0]


def two_instances(max_running: int = 8) -> Bench:
    """Return two instances at version 0, the first of which hosts an evaluation."""
    bench = Bench(eta=2, max_attempts=3)
    bench.join(A, max_running=max_running)
    bench.join(B, max_running=max_running)
    assert evaluation_routes(request_evaluation(bench)) == [(A, 0)] * 4
    return bench


def test_the_replacement_of_a_lost_host_at_a_newer_version_does_not_host() -> None:
    """Two of eight instances host, so one remains that serves the version."""
    bench = Bench(eta=2, max_attempts=3)
    for name in "abcdefgh":
        bench.join(InstanceId(name), max_running=2)
    assert {instance for instance, _ in evaluation_routes(request_evaluation(bench))} == {A, B}
    bench.arrive(0)
    bench.finish(0)
    bench.publish(1)  # the others pull it
    bench.tell(InstanceLost(instance=A, why="killed"))
    assert evaluation_routes(bench.join(InstanceId("a.1"), version=1)) == []
    on_b = next(
        i for i, live in bench.coordinator._state.live_trajectories.items() if live.instance == B and live.is_evaluation
    )
    assert evaluation_routes(bench.sampled(on_b)) == [(B, 0)]


def test_an_evaluation_is_abandoned_if_its_instance_had_to_load_a_newer_version() -> None:
    """No host had the weights of version 1 any more when the instance pulled them."""
    bench = Bench(eta=2)
    bench.join(A)
    bench.arrive(0, 1)
    bench.finish(0)
    assert commands_of(bench.publish(1), Pull)
    assert evaluation_routes(request_evaluation(bench, 2)) == [(A, 1)] * 2
    bench.finish(1)
    assert commands_of(bench.publish(2), Pull) == []
    commands = bench.tell(PullFinished(instance=A, version=PolicyVersion(2)))
    assert [(f.version, f.abandoned) for f in commands_of(commands, FinishEvaluation)] == [(1, True)]
    assert sorted(abort.trajectory for abort in commands_of(commands, Abort)) == [-2, -1]
    commands = request_evaluation(bench, 2)
    assert evaluation_routes(commands) == [(A, 2)] * 2
    assert commands_of(commands, Pull) == []


def test_a_host_without_reservable_groups_gives_all_slots_to_the_evaluation() -> None:
    """Two of eight slots belong to the evaluation while groups may still be drawn under its version."""
    bench = Bench(eta=1, max_attempts=3)
    bench.join(A, max_running=8)
    assert evaluation_routes(request_evaluation(bench, 9)) == [(A, 0)] * 2
    assert evaluation_routes(bench.arrive(0)) == []
    assert evaluation_routes(bench.arrive(1)) == []
    assert evaluation_routes(bench.tell(Tick())) == [(A, 0)] * 4, "the bound allows no third group at version 0"
    assert evaluation_routes(bench.sampled(0)) == [(A, 0)]
    bench.scored(0)
    assert evaluation_routes(bench.publish(1)) == [], (
        "a place is free under version 1 only, which the host does not serve"
    )


def test_an_evaluation_ends_after_its_last_response_even_if_all_failed() -> None:
    bench = Bench(max_attempts=0)
    bench.join(A)
    request_evaluation(bench, 2)
    failed = [bench.tell(TrajectoryFailed(trajectory=TrajectoryId(t), route_number=1, error="x")) for t in (-1, -2)]
    assert not commands_of(failed[0], FinishEvaluation)
    (finish,) = commands_of(failed[1], FinishEvaluation)
    assert set(finish.failed) == {-1, -2}


def test_requesting_an_evaluation_while_one_runs_raises() -> None:
    with pytest.raises(ProtocolViolation, match="evaluation 0 is requested, but 0 is running"):
        request_evaluation(two_instances())


def test_a_lost_host_is_replaced_and_a_new_instance_is_no_host() -> None:
    bench = two_instances()
    assert evaluation_routes(bench.tell(InstanceLost(instance=A, why="killed"))) == [(B, 0)] * 2
    assert evaluation_routes(bench.join(InstanceId("a.1"))) == [(B, 0)] * 2, "a fleet of two has four places, as before"


def test_a_leaving_host_is_replaced_before_it_is_gone() -> None:
    bench = two_instances()
    commands = bench.tell(InstanceLeaving(instance=A))
    on_the_way = commands_of(commands, Interrupt)
    assert len(on_the_way) == 4
    routed = [
        bench.tell(Interrupted(trajectory=item.trajectory, route_number=bench.route_numbers[item.trajectory], tokens=3))
        for item in on_the_way
    ]
    assert evaluation_routes([command for commands in routed for command in commands]) == [(B, 0)] * 4
    assert not commands_of(bench.tell(InstanceLost(instance=A, why="it has left")), FinishEvaluation)


def random_fleet(rng: random.Random) -> Bench:
    """Return a run at version 1 with an evaluation and up to five instances in any state, some of them pinned."""
    bench = Bench(eta=2, num_steps=rng.choice([1, 9]))
    state = bench.coordinator._state
    for name in "abcde"[: rng.randrange(6)]:
        state.add_instance(InstanceId(name), PolicyVersion(rng.randrange(2)), 100, rng.choice([0, 2, 4]))
    groups = [NewGroup(group=GroupId(-1 - i), prompt_tokens=10) for i in range(rng.randrange(1, 9))]
    state.begin_evaluation(0, groups)
    state.ledger.version = PolicyVersion(1)
    assert state.evaluation is not None
    state.evaluation.evaluated_version = PolicyVersion(rng.randrange(-1, 2))
    state.evaluation.num_to_sample = rng.randrange(len(groups) + 1)
    for instance in state.fleet:
        instance.is_pulling = rng.random() < 0.3
        instance.kv_tokens = rng.choice([0, 10, 90, 91])
        instance.num_eval_running = rng.randrange(3)
        instance.trajectories = dict.fromkeys(map(TrajectoryId, range(rng.randrange(5))))
        if rng.random() < 0.4:
            state.evaluation.pinned_instances[instance.id] = None
    if rng.random() < 0.2:
        state.evaluation.pinned_instances[InstanceId("lost")] = None
    return bench


@pytest.mark.parametrize("part", range(5))
def test_pinned_instances_match_a_plain_implementation_of_the_rules(part: int) -> None:
    for seed in range(60 * part, 60 * part + 60):
        check_rules(random_fleet(random.Random(seed)))


def check_rules(bench: Bench) -> None:
    """Compare proposals with a plain implementation of the rules."""
    pinning, planner, state = bench.coordinator._pin_planner, bench.coordinator._route_planner, bench.coordinator._state
    evaluation, fleet, done = state.evaluation, list(state.fleet), state.ledger.num_steps == 1
    assert evaluation is not None
    evaluated = evaluation.evaluated_version
    share = 1.0 if done else pinning._slot_share
    num_pinned = max(1, math.ceil(share * len(fleet)))
    largest = max([instance.max_running for instance in fleet], default=1)
    each = max(1, int(share * len(fleet) / num_pinned * largest))
    needed = num_pinned if done else min(num_pinned, math.ceil(evaluation.num_to_sample / each))
    missing = needed - len([i for i in fleet if i.id in evaluation.pinned_instances and i.max_running > 0])

    wanted = 1 if evaluated == -1 else evaluated
    ready = [i for i in fleet if i.version == wanted and i.max_running and i.id not in evaluation.pinned_instances]
    after_a_pull = [
        i for i in fleet
        if i.version != wanted == 1 and i.max_running and not i.is_pulling and i.id not in evaluation.pinned_instances
    ]  # fmt: skip
    expected = [*sorted(ready, key=lambda i: i.kv_tokens), *sorted(after_a_pull, key=lambda i: i.kv_tokens)]
    assert pinning.choose_instances_to_pin() == expected[: max(0, missing)]
    for instance in fleet:
        assert pinning.must_pull(instance) is (instance.version == 0 and evaluated != 0)
    serves = [i for i in fleet if i.version == evaluated and i.max_running > 0]
    assert pinning.cannot_finish is (evaluated == 0 and evaluation.num_to_sample > 0 and not serves)

    live = state.live_trajectories[min(evaluation.members)]
    if evaluated >= 0 and not planner.can_receive_work(evaluated):
        each = largest
    able = [i for i in serves if i.id in evaluation.pinned_instances and i.num_eval_running < each]
    able = [i for i in able if len(i.trajectories) < i.max_running and (i.kv_tokens <= 90 or not i.trajectories)]
    fewest = sorted(able, key=lambda i: i.num_eval_running)
    for home in [None, *fleet]:
        live.cached_instance = home.id if home else None
        chosen: Instance | str = home if home in able else fewest[0] if fewest else "no slot for the evaluation"
        assert pinning.choose_instance(live) == chosen


def test_no_instance_is_pinned_without_queued_work() -> None:
    bench = two_instances()
    pinning, state = bench.coordinator._pin_planner, bench.coordinator._state
    assert pinning.choose_instances_to_pin() == []
    state.close_evaluation()
    assert (pinning.choose_instances_to_pin(), pinning.cannot_finish) == ([], False)
    assert not any(map(pinning.must_pull, state.fleet))


@pytest.mark.parametrize(
    ("message", "spoil"),
    [
        ("evaluation trajectories [-6, -5, -4, -3, -2, -1] are not", lambda s: s.evaluation.members.add(0)),
        ("a has a wrong count of 5 evaluation trajectories", lambda s: setattr(s.fleet[0], "num_eval_running", 5)),
        ("wrong count of 7 trajectories to sample", lambda s: setattr(s.evaluation, "num_to_sample", 7)),
        (
        "evaluation 0 has pinned instances that are gone: ['c']",
        lambda s: s.evaluation.pinned_instances.update({"c": None}),
    ),
        ("-1 has version 3, but 0 is evaluated", lambda s: setattr(s.live_trajectories[-1], "v_traj", 3)),
        (
        "is sampled on a at version 0, for an evaluation of version 0",
        lambda s: s.evaluation.pinned_instances.clear(),
    ),
    ],
)  # fmt: skip
def test_validate_describes_a_broken_evaluation_invariant(message: str, spoil: Callable[[Any], object]) -> None:
    bench = two_instances()
    bench.arrive(0)
    state = bench.coordinator._state
    validate(state)
    spoil(state)
    with pytest.raises(ProtocolViolation, match=re.escape(message)):
        validate(state)

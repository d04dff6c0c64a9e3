"""Which instances sample for an evaluation when some restart, or leave. Events in, commands out."""

from __future__ import annotations

from collections.abc import Sequence

from staleflow.pipeline.coordination.commands import Command, FinishEvaluation, Interrupt, Route
from staleflow.pipeline.coordination.events import EvaluationRequested, InstanceLeaving, InstanceLost, NewGroup, Tick
from staleflow.pipeline.coordination.events import TrajectoryInterrupted as Interrupted
from staleflow.stores.trajectory import GroupId, InstanceId
from tests.coordination.test_coordinator import A, B, Bench, only


def evaluating(bench: Bench, count: int = 6) -> list[Command]:
    """Request an evaluation of so many responses: four places of a fleet of two are its own."""
    groups = tuple(NewGroup(group=GroupId(-1 - i), prompt_tokens=10) for i in range(count))
    return bench.tell(EvaluationRequested(evaluation=0, groups=groups))


def evaluated(commands: Sequence[Command]) -> list[tuple[InstanceId, int]]:
    """Where an evaluation's trajectories are routed, and under which version."""
    return [(route.instance, route.version) for route in only(commands, Route) if route.trajectory < 0]


def two(max_running: int = 8) -> Bench:
    """Two instances at version 0, the first of which hosts an evaluation."""
    bench = Bench(eta=2, max_attempts=3)
    bench.join(A, max_running=max_running)
    bench.join(B, max_running=max_running)
    assert evaluated(evaluating(bench)) == [(A, 0)] * 4
    return bench


def test_a_host_that_restarts_at_a_newer_version_hosts_no_more() -> None:
    """Of eight instances two host, so that one is left which serves the version."""
    bench = Bench(eta=2, max_attempts=3)
    for name in "abcdefgh":
        bench.join(InstanceId(name), max_running=2)
    assert {instance for instance, _ in evaluated(evaluating(bench))} == {A, B}
    bench.arrive(0)
    bench.finish(0)
    bench.publish(1)  # the others pull it
    assert evaluated(bench.join(A, version=1)) == []
    on_b = next(i for i, live in bench.coordinator._state.live.items() if live.instance == B and live.is_eval)
    assert evaluated(bench.sampled(on_b)) == [(B, 0)]


def test_a_host_that_could_be_given_nothing_to_train_on_has_all_its_places_for_it() -> None:
    """Two of eight places are the evaluation's as long as groups may still be drawn under its version."""
    bench = Bench(eta=1, max_attempts=3)
    bench.join(A, max_running=8)
    assert evaluated(evaluating(bench, 9)) == [(A, 0)] * 2
    assert evaluated(bench.arrive(0)) == []
    assert evaluated(bench.arrive(1)) == []
    assert evaluated(bench.tell(Tick())) == [(A, 0)] * 4, "the bound allows no third group at version 0"
    assert evaluated(bench.sampled(0)) == [(A, 0)]
    bench.scored(0)
    assert evaluated(bench.publish(1)) == [], "a place is free under version 1 only, which the host does not serve"


def test_a_host_that_restarts_at_its_version_hosts_what_is_left() -> None:
    bench = two()
    commands = bench.join(A)
    assert len({instance for instance, _ in evaluated(commands)}) == 1
    assert [version for _, version in evaluated(commands)] == [0] * 4


def test_a_host_that_is_lost_is_no_host_when_its_name_comes_back() -> None:
    bench = two()
    assert evaluated(bench.tell(InstanceLost(instance=A, why="killed"))) == [(B, 0)] * 2
    assert evaluated(bench.join(A)) == [(B, 0)] * 2, "a fleet of two has four places, as before"


def test_a_host_that_leaves_is_replaced_before_it_is_gone() -> None:
    bench = two()
    commands = bench.tell(InstanceLeaving(instance=A))
    on_the_way = only(commands, Interrupt)
    assert len(on_the_way) == 4
    routed = [
        bench.tell(Interrupted(trajectory=item.trajectory, route_number=item.route_number, tokens=3))
        for item in on_the_way
    ]
    assert evaluated([command for commands in routed for command in commands]) == [(B, 0)] * 4
    assert not only(bench.tell(InstanceLost(instance=A, why="it has left")), FinishEvaluation)

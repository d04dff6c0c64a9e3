"""An event routes a limited number of trajectories and lets a limited number of instances pull; the rest follow in the
same order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.routing_rules import Random
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Pull, Route, Train
from staleflow.pipeline.coordination.coordinator import MAX_ROUTES_PER_EVENT
from staleflow.pipeline.coordination.events import (
    DecisionsContinued,
    Event,
    GroupsArrived,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.coordination.journal import JournalEntry
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion
from tests.coordination.test_coordinator import A, B, Bench, C

GROUPS, SIZE = 40, 8


def joined(*, room: int = 200, at_random: bool = False) -> Bench:
    bench = Bench(eta=4, groups=8, size=SIZE)
    if at_random:
        bench.coordinator._route_planner._routing = Random(np.random.default_rng(0))  # type: ignore[assignment]  # a user's rule
    for instance in (A, B, C):
        bench.join(instance, max_running=room)
    return bench


def arrivals(seed: int) -> GroupsArrived:
    """Return groups with prompts of random lengths, so that each routing choice depends on all earlier ones."""
    rng = random.Random(seed)
    return GroupsArrived(
        groups=tuple(NewGroup(group=GroupId(g), prompt_tokens=rng.randint(1, 90)) for g in range(GROUPS))
    )


def routes(entries: list[JournalEntry]) -> list[Route]:
    """All routes of the entries."""
    return [command for entry in entries for command in entry.commands if isinstance(command, Route)]


def fill(bench: Bench, max_routes: int, seed: int) -> list[JournalEntry]:
    """Deliver all groups in one event, then continue routing until nothing is left to do."""
    entries: list[JournalEntry] = []
    event: GroupsArrived | DecisionsContinued = arrivals(seed)
    while not entries or bench.coordinator.has_more_decisions:
        bench.now += 1
        commands = bench.coordinator.handle(event, bench.now, max_routes=max_routes)
        entries.append(JournalEntry(now=bench.now, event=event, commands=tuple(commands)))
        event = DecisionsContinued()
    return entries


@pytest.mark.parametrize("room", [200, 60], ids=["room for all", "room for some"])
@pytest.mark.parametrize("at_random", [False, True], ids=["deadline", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_the_queue_is_routed_in_slices_with_the_same_result(room: int, at_random: bool, seed: int) -> None:
    whole, sliced = (fill(joined(room=room, at_random=at_random), limit, seed) for limit in (10**6, 7))
    num_routes = min(GROUPS * SIZE, 3 * room)
    assert (len(whole), len(routes(whole))) == (1, num_routes)
    assert all(len(entry.commands) <= 7 for entry in sliced)
    assert routes(sliced) == routes(whole)
    assert len(sliced) <= num_routes // 7 + 1, "an event routed fewer trajectories than it could"


def test_any_event_continues_routing() -> None:
    bench = joined()
    first, *_ = bench.coordinator.handle(arrivals(0), 1.0, max_routes=7)
    assert isinstance(first, Route)
    assert bench.coordinator.has_more_decisions
    sampled = TrajectorySampled(trajectory=first.trajectory, route_number=first.route_number, tokens=5)
    commands = bench.coordinator.handle(sampled, 2.0)
    assert sum(isinstance(command, Route) for command in commands) == MAX_ROUTES_PER_EVENT
    assert bench.coordinator.has_more_decisions


@pytest.mark.parametrize(
    "max_routes", [MAX_ROUTES_PER_EVENT, 2 * MAX_ROUTES_PER_EVENT, 10**6], ids=["", "of an earlier version", "whole"]
)
@pytest.mark.parametrize("room", [200, 60], ids=["room for all", "room for some"])
def test_a_journal_of_sliced_routing_replays(max_routes: int, room: int) -> None:
    entries = fill(joined(room=room), max_routes, 0)
    assert len(routes(entries)) > 2 * MAX_ROUTES_PER_EVENT
    replayed = journal.replay(joined(room=room).coordinator, entries)
    assert (replayed.difference, replayed.num_events) == ("", len(entries))


def burst(max_pulls: int, synchronization: str) -> list[JournalEntry]:
    """All entries until a version is published that 20 instances may pull while new groups wait."""
    bench = crowd(synchronization)
    entries: list[JournalEntry] = []

    def tell(event: Event) -> None:
        bench.now += 1
        commands = bench.coordinator.handle(event, bench.now, max_pulls=max_pulls)
        entries.append(JournalEntry(now=bench.now, event=event, commands=tuple(commands)))
        if bench.coordinator.has_more_decisions:
            tell(DecisionsContinued())

    tell(arrivals(0))
    for route in routes(entries)[:8]:
        number = route.route_number
        tell(TrajectorySampled(trajectory=route.trajectory, route_number=number, tokens=5))
        tell(TrajectoryScored(trajectory=route.trajectory, reward=1.0))
    assert any(isinstance(command, Train) for entry in entries for command in entry.commands)
    tell(VersionPublished(version=PolicyVersion(1)))
    return entries


def crowd(synchronization: str) -> Bench:
    bench = Bench(eta=3, groups=1, size=SIZE, synchronization=synchronization)
    for number in range(20):
        bench.join(InstanceId(f"i{number}"), max_running=4)
    return bench


@pytest.mark.parametrize(("synchronization", "num_pulls"), [("greedy", 20), ("staggered", 10)])
def test_a_version_is_pulled_in_slices_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, synchronization: str, num_pulls: int
) -> None:
    monkeypatch.setattr(journal, "MAX_PULLS_PER_EVENT", 3)
    whole, sliced = (burst(limit, synchronization) for limit in (10**6, 3))
    flat = [[command for entry in entries for command in entry.commands] for entries in (whole, sliced)]
    assert flat[0] == flat[1]
    assert sum(isinstance(command, Pull) for command in flat[1]) == num_pulls
    assert max(sum(isinstance(command, Pull) for command in entry.commands) for entry in sliced) == 3
    for entries in (whole, sliced):
        assert journal.replay(crowd(synchronization).coordinator, entries).difference == ""

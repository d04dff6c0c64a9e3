"""An event routes a limited number of trajectories; the rest of the queue follows in the same order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.routing_rules import Random
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Route
from staleflow.pipeline.coordination.coordinator import MAX_ROUTES
from staleflow.pipeline.coordination.events import GroupsArrived, RoutingContinued, TrajectorySampled
from staleflow.pipeline.coordination.journal import JournalEntry
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId
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
    event: GroupsArrived | RoutingContinued = arrivals(seed)
    while not entries or bench.coordinator.has_more_routes:
        bench.now += 1
        commands = bench.coordinator.handle(event, bench.now, max_routes=max_routes)
        entries.append(JournalEntry(now=bench.now, event=event, commands=tuple(commands)))
        event = RoutingContinued()
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
    assert bench.coordinator.has_more_routes
    sampled = TrajectorySampled(trajectory=first.trajectory, route_number=first.route_number, tokens=5)
    commands = bench.coordinator.handle(sampled, 2.0)
    assert sum(isinstance(command, Route) for command in commands) == MAX_ROUTES
    assert bench.coordinator.has_more_routes


@pytest.mark.parametrize("max_routes", [MAX_ROUTES, 2 * MAX_ROUTES, 10**6], ids=["", "of an earlier version", "whole"])
@pytest.mark.parametrize("room", [200, 60], ids=["room for all", "room for some"])
def test_a_journal_of_sliced_routing_replays(max_routes: int, room: int) -> None:
    entries = fill(joined(room=room), max_routes, 0)
    assert len(routes(entries)) > 2 * MAX_ROUTES
    replayed = journal.replay(joined(room=room).coordinator, entries)
    assert (replayed.difference, replayed.num_events) == ("", len(entries))

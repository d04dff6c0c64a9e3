"""Decisions about episodes: truncated and resumed turns, user rules and cached contexts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from staleflow.pipeline.coordination.commands import Interrupt, Route
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    EnvironmentStepped,
    InstanceReported,
    PullFinished,
    RunResumed,
    Tick,
    TrajectoryInterrupted,
    TrajectoryScored,
)
from staleflow.pipeline.strategies.routing import CacheAffinity, Candidate, UserRouting
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel
from tests.coordination.test_coordinator import A, B, Bench, commands_of, in_flight, member

LAST = TrajectoryId(3)


def end_episode(bench: Bench, trajectory: int) -> None:
    """Return the event of an episode of one turn."""
    bench.sampled(trajectory, 5)
    bench.tell(TrajectoryScored(trajectory=TrajectoryId(trajectory), reward=1.0))


def observation_event(bench: Bench, trajectory: int, tokens: int) -> list[Any]:
    event = EnvironmentStepped(
        trajectory=TrajectoryId(trajectory), route_number=bench.route_numbers[trajectory], tokens=tokens
    )
    return bench.tell(event)


def bench_waiting_for_last() -> Bench:
    """Return a bench in which three episodes of 5 tokens have ended and the trainer has long waited for the fourth."""
    bench = Bench(eta=0, groups=2, stragglers="truncate", straggler_share=0.5, environments=True)
    bench.join()
    bench.arrive(0, 1)
    end_episode(bench, 0)
    end_episode(bench, 1)
    bench.publish(1)
    bench.tell(PullFinished(instance=A, version=PolicyVersion(1)))
    bench.arrive(2, 3)
    end_episode(bench, 2)
    bench.now += 100.0
    return bench


def truncation_orders(bench: Bench, tokens: int) -> list[Interrupt]:
    bench.tell(InstanceReported(instance=A, progress=((LAST, tokens),)))
    return commands_of(bench.tell(Tick()), Interrupt)


def test_a_turn_that_ends_before_its_truncation_lets_the_next_turn_be_truncated() -> None:
    bench = bench_waiting_for_last()
    assert [o.trajectory for o in truncation_orders(bench, 4)] == [LAST]
    bench.sampled(LAST, 10)
    truncations = bench.coordinator._state.truncations
    assert (truncations.num_truncated, truncations.num_truncated_in_step) == (0, 0)
    observation_event(bench, LAST, 20)
    assert [o.trajectory for o in truncation_orders(bench, 24)] == [LAST]
    assert (truncations.num_truncated, truncations.num_truncated_in_step) == (1, 1)
    assert truncation_orders(bench, 25) == []


def test_a_turn_without_tokens_is_not_truncated() -> None:
    bench = bench_waiting_for_last()
    bench.sampled(LAST, 10)
    observation_event(bench, LAST, 20)
    assert truncation_orders(bench, 20) == []
    assert [o.trajectory for o in truncation_orders(bench, 24)] == [LAST]
    commands = bench.tell(TrajectoryInterrupted(trajectory=LAST, route_number=2, tokens=20))  # without the tokens
    assert [c.trajectory for c in commands_of(commands, Route)] == [LAST]
    assert bench.coordinator._state.truncations.num_truncated == 0
    assert [o.trajectory for o in truncation_orders(bench, 21)] == [LAST]


def test_a_truncated_episode_whose_environment_fails_may_be_truncated_again() -> None:
    bench = bench_waiting_for_last()
    assert [o.trajectory for o in truncation_orders(bench, 4)] == [LAST]
    bench.tell(TrajectoryInterrupted(trajectory=LAST, route_number=1, tokens=6))
    bench.tell(EnvironmentFailed(trajectory=LAST, route_number=1, error="lost", lost=True))
    assert bench.coordinator._state.truncations.num_truncated == 0
    assert [o.trajectory for o in truncation_orders(bench, 4)] == [LAST]


@pytest.mark.parametrize("recurring", [False, True])
def test_the_length_of_a_truncated_episode_is_not_learned(recurring: bool) -> None:
    bench = bench_waiting_for_last()
    assert len(truncation_orders(bench, 4)) == 1
    if recurring:
        bench.sampled(LAST, 6)
    else:
        bench.tell(TrajectoryInterrupted(trajectory=LAST, route_number=1, tokens=6))
    bench.tell(TrajectoryScored(trajectory=LAST, reward=1.0))
    assert list(bench.coordinator.forecast._latest_lengths) == [5, 5, 5] + [6] * recurring


def test_a_resumed_episode_updates_the_forecast_like_a_whole_one() -> None:
    whole, resumed = (Bench(eta=0, environments=True) for _ in range(2))
    whole.join()
    whole.arrive(0)
    whole.sampled(0, 5)
    observation_event(whole, 0, 905)
    resumed.join()
    begun = replace(member(0, 0, 905), given_tokens=900)
    resumed.tell(RunResumed(step=0, num_ended=(), groups=(in_flight(0, begun),)))
    resumed.route_numbers[0] = 2
    for bench in (whole, resumed):
        bench.sampled(0, 1000)
        bench.tell(TrajectoryScored(trajectory=TrajectoryId(0), reward=1.0))
    episodes = [bench.coordinator.forecast.sampled_token_share for bench in (whole, resumed)]
    assert [episode.expected_sampled_tokens(1000) for episode in episodes] == pytest.approx([100, 100])


@pytest.mark.parametrize("turn", [1, 2])
def test_a_rule_that_chooses_an_invalid_index_is_rejected_in_every_turn(turn: int) -> None:
    class Rule:
        turns = 0

        def choose(self, work: Candidate, *_: object) -> int:
            assert work.continued == (self.turns == 1)
            self.turns += 1
            return 7 if self.turns >= turn else 0

    bench = Bench(eta=0, environments=True, max_attempts=3)
    bench.coordinator._route_planner._routing = UserRouting(name="mine.py:Rule", code=Rule())
    bench.join()
    routes = commands_of(bench.arrive(0), Route)
    assert len(routes) == turn - 1
    if routes:
        bench.sampled(0, 1)
        assert commands_of(observation_event(bench, 0, 1), Route) == []
    assert list(bench.coordinator.snapshot().refusals) == ["the routing rule chose an instance that does not fit"]


@pytest.mark.parametrize(("prefill", "instance"), [(None, B), (0.0, B), (1.0, A)])
def test_a_next_turn_returns_to_its_cached_context_if_prefill_costs_more(
    prefill: float | None, instance: InstanceId
) -> None:
    """Instance a has one more running trajectory, so routing prefers b. None: without cache affinity."""
    bench = Bench(eta=0, groups=3, environments=True)
    cost = CostModel(k1=1e-6, k2=0.005, k3=0.0001, k4=0.001, b=0.002, prefill=prefill or 0.0)
    bench.coordinator._route_planner._affinity = None if prefill is None else CacheAffinity(cost)
    bench.join(A)
    bench.arrive(0, 1, 2)
    bench.join(B)
    bench.sampled(0, 5)
    (route,) = commands_of(observation_event(bench, 0, 9), Route)
    assert route.instance == instance

"""Each strategy as a table."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeline.cost import CostModel
from pipeline.strategies.admission import make_admission
from pipeline.strategies.filtering import make_filtering
from pipeline.strategies.routing import LeastRequests, RoundRobin, ThroughputOptimal, make_routing
from pipeline.strategies.synchronization import LaggingInstance, make_synchronization
from stores.trajectory import AbortReason, InstanceId

COST = CostModel(k1=1e-5, k2=0.005, k3=0.0005, k4=0.001, b=0.002)


@dataclass
class Load:
    instance: InstanceId
    num_running: int
    kv_tokens: int


def loads(*pairs: tuple[int, int]) -> list[Load]:
    return [Load(InstanceId(str(i)), n, kv) for i, (n, kv) in enumerate(pairs)]


def test_cost_is_the_published_formula() -> None:
    # StaleFlow's fit for a 14B model: 0.1165 us x 1e6 tokens + max(12.3 ms, 4.9 + 0.244 x 64 ms) + 1.97 ms
    cost = CostModel(k1=1.165e-07, k2=0.012303, b=0.0049075, k3=0.0002441, k4=0.0019663689)
    assert cost.step_s(64, 1_000_000) == pytest.approx(0.1165 + 0.0205299 + 0.0019663689)
    assert cost.throughput(64, 1_000_000) == pytest.approx(64 / 0.1389962689)
    assert cost.throughput(0, 0) == 0.0


def test_an_empty_instance_gains_most() -> None:
    assert COST.marginal_gain(0, 0, 100) > COST.marginal_gain(10, 1000, 100) > COST.marginal_gain(100, 10_000, 100)


def test_round_robin_takes_turns() -> None:
    rule = RoundRobin()
    picks = [rule.choose(1, loads((0, 0), (0, 0), (0, 0))) for _ in range(6)]
    assert sorted(map(str, picks)) == ["0", "0", "1", "1", "2", "2"]


def test_least_requests() -> None:
    assert LeastRequests().choose(1, loads((3, 0), (1, 9), (2, 0))) == "1"


def test_throughput_optimal_counts_kv_tokens_too() -> None:
    assert ThroughputOptimal(COST, 0.0).choose(10, loads((4, 9000), (4, 100))) == "1"


def test_throughput_optimal_declines_a_gain_below_mu() -> None:
    crowded = loads((400, 400_000))
    assert ThroughputOptimal(COST, 0.5).choose(10, crowded) is None
    assert ThroughputOptimal(COST, 0.5).choose(10, loads((0, 0))) == "0"


@pytest.mark.parametrize(
    ("running", "fed", "pulls"), [(8, False, False), (4, False, True), (4, True, False), (0, False, True)]
)
def test_status_synchronization(running: int, fed: bool, pulls: bool) -> None:
    instance = LaggingInstance(lag=1, num_running=running, max_running=8, can_be_fed=fed)
    assert make_synchronization("status", 0.5).should_pull(instance) is pulls
    assert make_synchronization("greedy", 0.5).should_pull(instance)


def test_no_signal_drops_equal_rewards() -> None:
    rule = make_filtering("no_signal")
    assert rule.verdict([1.0, 1.0]) is AbortReason.NO_SIGNAL
    assert rule.verdict([1.0, 0.0]) is None
    assert rule.verdict([1.0]) is rule.verdict([]) is AbortReason.NO_SIGNAL
    assert make_filtering("keep_all").verdict([1.0, 1.0]) is None


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="there are round_robin, least_requests, throughput_optimal"):
        make_routing("best", COST, 0.1)
    with pytest.raises(ValueError, match="there are staleflow, synchronous"):
        make_admission("x")
    with pytest.raises(ValueError, match="there are greedy, status"):
        make_synchronization("x", 0.1)
    with pytest.raises(ValueError, match="there are keep_all, no_signal"):
        make_filtering("x")

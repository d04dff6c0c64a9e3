"""Strategies against their formulas: random loads, and the values at which a decision changes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.admission_rules import OverProvision, PipelineDepth, WindowedFifo
from benchmarks.routing_rules import LeastRequests, ThroughputOptimal
from staleflow.pipeline.simulator.baselines import (
    Backlog,
    Baseline,
    Credits,
    OneStep,
)
from staleflow.pipeline.strategies.admission import Admission, ReservationAdmission, Synchronous
from staleflow.pipeline.strategies.migration import InstanceLoad, LargestGain, MovableTrajectory
from staleflow.pipeline.strategies.routing import CacheAffinity, Candidate, DeadlineRouting
from staleflow.stores.errors import ConfigError
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import GroupId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel
from tests.strategies.test_strategies import Loads, loads

COST = CostModel(k1=0.25, k2=4.0, k3=1.0, k4=0.5, b=1.0, prefill=0.125)
"""A cost model in which sums of small integers are exact."""
FLAT = CostModel(k1=0.0, k2=0.5, k3=0.0, k4=0.5, b=0.0, prefill=0.0)
"""Each step takes a second at any load, so each added trajectory gains one token per second."""

load = st.builds(InstanceLoad, running=st.integers(0, 20), kv_tokens=st.integers(0, 200))


def step_s(running: int, kv_tokens: float) -> float:
    """Return the seconds of a decode step by the published formula."""
    return 0.25 * kv_tokens + max(4.0, 1.0 + running) + 0.5 if running else 0.0


# -- migration and affinity ------------------------------------------------------------------------------------------


def allowed_moves(
    source: InstanceLoad, target: InstanceLoad, movable: list[MovableTrajectory], gain: float, limit: int
) -> list[int]:
    """Return the moves of LargestGain as its docstring defines them."""
    running, kv, to_running, to_kv = source.running, source.kv_tokens, target.running, target.kv_tokens
    moved: list[int] = []
    for i, work in sorted(enumerate(movable), key=lambda pair: (pair[1].deadline, pair[1].kv_tokens)):
        here_s, there_s = step_s(running, kv), step_s(to_running + 1, to_kv + work.kv_tokens)
        prefill_s = 0.125 * work.kv_tokens * (to_running + 1)
        if (
            len(moved) < limit
            and there_s < (1 - gain) * here_s
            and work.remaining_tokens * (here_s - there_s) > prefill_s
        ):
            moved.append(i)
            running, kv = running - 1, kv - work.kv_tokens
            to_running, to_kv = to_running + 1, to_kv + work.kv_tokens
    return moved


@given(
    load, load, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(1, 4)), max_size=6),
    st.sampled_from([0.0, 0.25, 0.5]), st.integers(0, 6),
)  # fmt: skip
def test_migration_moves_by_gain_in_order_of_urgency(
    source: InstanceLoad, target: InstanceLoad, work: list[tuple[int, int, int]], gain: float, limit: int
) -> None:
    running = InstanceLoad(
        running=source.running + len(work), kv_tokens=source.kv_tokens + sum(kv for kv, _, _ in work)
    )
    movable = [MovableTrajectory(kv_tokens=kv, remaining_tokens=float(left), deadline=due) for kv, left, due in work]
    rule = LargestGain(COST, gain)
    moves = rule.choose_moves(running, target, movable, limit)
    assert moves == allowed_moves(running, target, movable, gain, limit)
    here_s, there_s = step_s(running.running, running.kv_tokens), step_s(target.running + 1, target.kv_tokens)
    assert rule.may_gain(running, target) is (there_s < (1 - gain) * here_s)
    assert rule.may_gain(running, target) or not moves, "moves that are not worthwhile are not made"


def test_a_move_without_gain_is_not_made() -> None:
    """At equality of the step times, and of the seconds saved and those of the prefill."""
    assert not LargestGain(COST, 0.0).may_gain(
        InstanceLoad(running=7, kv_tokens=0), InstanceLoad(running=6, kv_tokens=0)
    )
    # The step falls from 8.5 s to 4.75 s, and the prefill of a token takes an eighth of a second: 1/30 token.
    alone = InstanceLoad(running=7, kv_tokens=0)
    for remaining, moves in ((0.125 / 3.75, []), (0.1, [0])):
        work = MovableTrajectory(kv_tokens=1, remaining_tokens=remaining, deadline=1)
        assert LargestGain(COST, 0.0).choose_moves(alone, InstanceLoad(running=0, kv_tokens=0), [work], 1) == moves
    # With three others there it falls to 5.75 s only, and the prefill holds up four.
    for remaining, moves in ((0.5 / 2.75, []), (0.19, [0])):
        work = MovableTrajectory(kv_tokens=1, remaining_tokens=remaining, deadline=1)
        assert LargestGain(COST, 0.0).choose_moves(alone, InstanceLoad(running=3, kv_tokens=0), [work], 1) == moves


@given(load, load, st.integers(0, 50), st.integers(0, 40))
def test_a_turn_returns_to_its_cache_unless_the_prefill_pays_off(
    cached_instance: InstanceLoad, other_load: InstanceLoad, kv_tokens: int, remaining: int
) -> None:
    slower_s = step_s(cached_instance.running + 1, cached_instance.kv_tokens + kv_tokens)
    slower_s -= step_s(other_load.running + 1, other_load.kv_tokens + kv_tokens)
    stays = remaining * slower_s <= 0.125 * kv_tokens * (other_load.running + 1)
    assert CacheAffinity(COST).prefers_cached(cached_instance, other_load, kv_tokens, remaining) is stays


def test_a_turn_returns_to_its_cache_when_both_instances_are_equally_fast() -> None:
    """With one more request, two and three running requests still take the time to read the weights."""
    affinity, idle = CacheAffinity(COST), InstanceLoad(running=1, kv_tokens=0)
    assert affinity.prefers_cached(InstanceLoad(running=2, kv_tokens=0), idle, 0, 40)
    assert not affinity.prefers_cached(InstanceLoad(running=4, kv_tokens=0), idle, 0, 40)
    # Three tokens in steps of 9.5 s rather than 7.5 s take as long as a prefill of 8 tokens that delays six requests.
    slow, fast = InstanceLoad(running=7, kv_tokens=0), InstanceLoad(running=5, kv_tokens=0)
    assert [affinity.prefers_cached(slow, fast, kv_tokens, 3) for kv_tokens in (7, 8)] == [False, True]


# -- routing ---------------------------------------------------------------------------------------------------------


@st.composite
def instances(draw: st.DrawFn) -> tuple[Loads, np.ndarray]:
    """Return loads of some instances and on which of them the work fits."""
    rows = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=5))
    fitting = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).filter(any))
    return loads(*((n, kv if n else 0) for n, kv in rows)), np.array(fitting)


@given(instances(), st.integers(1, 40), st.sampled_from([0.0, 0.25, 1.0]))
def test_routing_maximizes_its_formula_among_fitting_instances(
    on: tuple[Loads, np.ndarray], kv_tokens: int, mu: float
) -> None:
    state, fitting = on
    work = Candidate(kv_tokens=kv_tokens)
    rows = [row for row, fits in enumerate(fitting) if fits]
    running = [int(n) for n in state.running]

    def rate(row: int, added: int) -> float:
        n = running[row] + added
        return n / step_s(n, state.kv_tokens[row] + added * kv_tokens) if n else 0.0

    chosen = DeadlineRouting(COST).choose(work, state, fitting)
    after_s = [step_s(running[row] + 1, state.kv_tokens[row] + kv_tokens) for row in rows]
    assert chosen == rows[after_s.index(min(after_s))]
    assert LeastRequests().choose(work, state, fitting) == min(rows, key=lambda row: running[row])

    gains = {row: rate(row, 1) - rate(row, 0) for row in rows}
    rule = ThroughputOptimal(COST, mu)
    best = rule.choose(work, state, fitting)
    least = mu / step_s(1, kv_tokens)
    if best is None:
        assert max(gains.values()) < least + 1e-12
        assert min(running[row] for row in rows if gains[row] > max(gains.values()) - 1e-12) > 0
    else:
        assert best in rows
        assert gains[best] == pytest.approx(max(gains.values()))
        assert running[best] == 0 or gains[best] > least - 1e-12


def test_a_gain_equal_to_mu_is_enough() -> None:
    rule, work = ThroughputOptimal(FLAT, 1.0), Candidate(kv_tokens=10)
    assert rule.choose(work, loads((3, 30)), np.array([True])) == 0


# -- admission -------------------------------------------------------------------------------------------------------


def ledger_in_flight(rule: Admission, groups: int, *, trained: int, published: bool) -> StalenessLedger:
    """Return a ledger with groups in flight, every other one finished, after this many trained steps, the last one
    published or not. Batches of 4 and a bound of 99 leave enough entries."""
    ledger = StalenessLedger(eta=99, groups_per_step=4, group_size=1)
    numbers = itertools.count()

    def start(finish: bool) -> None:
        group = next(numbers)
        ledger.start(GroupId(group))
        ledger.reserve(GroupId(group), TrajectoryId(group), ledger.version)
        if finish:
            ledger.complete(GroupId(group), TrajectoryId(group))
            ledger.occupy(GroupId(group))

    for step in range(trained):
        for _ in range(4):
            start(finish=True)
        ledger.consume(step)
        if published or step + 1 < trained:
            ledger.publish(PolicyVersion(step + 1))
    for number in range(groups):
        start(finish=number % 2 == 0)
    return ledger


CAPS = [
    # rule, most groups in play between two steps, and while a batch of 4 is trained
    (Synchronous(), 4, 0),
    (OneStep(), 4, 4),
    (PipelineDepth(depth=1.5), 6, 6),
    (PipelineDepth(depth=1.1), 5, 5),
    (WindowedFifo(ahead=2), 12, 8),
    (WindowedFifo(ahead=0), 4, 0),
    (Credits(alpha=1.5), 10, 10),
    (Credits(alpha=0.1), 5, 5),
    (Backlog(eta=2), 12, 8),
    (OverProvision(excess=0.6), 7, 0),
]


@pytest.mark.parametrize("published", [True, False], ids=["between steps", "while a batch is trained"])
@pytest.mark.parametrize(("rule", "between", "during"), CAPS, ids=lambda value: type(value).__name__)
def test_an_admission_rule_starts_groups_up_to_its_limit(
    rule: Admission, between: int, during: int, published: bool
) -> None:
    cap = between if published else during
    for groups in range(14):
        ledger = ledger_in_flight(rule, groups, trained=3, published=published)
        assert rule.num_startable(ledger) == max(0, cap - groups)
        assert (rule.refusal(ledger, ledger.version) is None) is (groups < cap)


WIDE = (
    ReservationAdmission(), Synchronous(), OneStep(), PipelineDepth(depth=5.0), WindowedFifo(ahead=5),
    Credits(alpha=5.0),
    Backlog(eta=5), OverProvision(excess=5.0),
)  # fmt: skip


@pytest.mark.parametrize("rule", WIDE, ids=lambda rule: type(rule).__name__)
def test_no_rule_starts_more_groups_than_can_be_reserved(rule: Admission) -> None:
    ledger = StalenessLedger(eta=0, groups_per_step=4, group_size=1)
    assert rule.num_startable(ledger) == 4
    for group in range(4):
        assert rule.refusal(ledger, PolicyVersion(0)) is None
        ledger.start(GroupId(group))
        ledger.reserve(GroupId(group), TrajectoryId(group), PolicyVersion(0))
        assert rule.num_startable(ledger) == 3 - group
    assert rule.refusal(ledger, PolicyVersion(0)) is not None


def test_a_synchronous_group_starts_from_the_version_of_its_step_only() -> None:
    ledger = ledger_in_flight(Synchronous(), 0, trained=2, published=True)
    assert Synchronous().refusal(ledger, PolicyVersion(2)) is None
    reason = Synchronous().refusal(ledger, PolicyVersion(1))
    assert reason == "synchronous: version 1 is not the one that step 2 starts from"


@pytest.mark.parametrize("eta", range(5))
def test_settings_with_a_lag_beyond_the_bound_are_rejected(eta: int) -> None:
    """The lag of a group is the number of batches ahead of it, rounded up; for windowed_fifo see the proof in
    tinker-cookbook."""

    def accepted(rule: Baseline) -> bool:
        try:
            rule.check(eta)
        except ConfigError:
            return False
        return True

    for tenths in range(0, 50, 2):
        assert accepted(PipelineDepth(depth=1 + tenths / 10)) is (tenths <= 10 * eta)
        assert accepted(Credits(alpha=tenths / 10)) is (tenths <= 10 * eta)
    for ahead, eighths in itertools.product(range(5), range(1, 9)):
        rule = WindowedFifo(ahead=ahead, window_share=eighths / 8)
        assert accepted(rule) is (ahead + math.ceil(eighths * (ahead + 1) / 8) <= eta)
        assert rule.make_ledger(eta=eta, groups_per_step=8, group_size=1).window == eighths * (ahead + 1)


@pytest.mark.parametrize(
    ("rule", "behind"), [(Synchronous(), 0), (OneStep(), 1), (PipelineDepth(), 7), (Credits(), 7), (Backlog(eta=2), 7)]
)
def test_versions_behind_follows_the_formula(rule: Admission, behind: int) -> None:
    assert rule.max_versions_behind(7) == behind
    assert rule.max_versions_behind(0) == 0

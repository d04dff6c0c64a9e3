"""Every strategy as a table of inputs and decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.admission_rules import PipelineDepth, WindowedFifo
from staleflow.pipeline.config import loading
from staleflow.pipeline.simulator.baselines import (
    Baseline,
    Credits,
    DroppingLedger,
    with_admission,
)
from staleflow.pipeline.strategies.admission import (
    ADMISSION,
    SIMULATED_RULES,
)
from staleflow.pipeline.strategies.filtering import (
    FILTERING,
    STRAGGLERS,
    DropNoSignal,
    KeepAll,
    StragglerRule,
    TruncateStragglers,
)
from staleflow.pipeline.strategies.migration import MIGRATION, InstanceLoad, MovableTrajectory, NoMigration
from staleflow.pipeline.strategies.routing import (
    ROUTING,
)
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION, Greedy, Staggered
from staleflow.stores.errors import ConfigError
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel

COST = CostModel(k1=1e-5, k2=0.005, k3=0.0005, k4=0.001, b=0.002, prefill=0.0)


@dataclass
class Loads:
    running: np.ndarray
    kv_tokens: np.ndarray


def loads(*rows: tuple[float, ...]) -> Loads:
    """Return loads from (running, KV tokens) pairs."""
    return Loads(np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], float))


def test_cost_is_the_published_formula() -> None:
    # StaleFlow's fit for a 14B model: 0.1165 us x 1e6 tokens + max(12.3 ms, 4.9 + 0.244 x 64 ms) + 1.97 ms
    cost = CostModel(k1=1.165e-07, k2=0.012303, b=0.0049075, k3=0.0002441, k4=0.0019663689, prefill=0.0)
    assert cost.step_s(64, 1_000_000) == pytest.approx(0.1165 + 0.0205299 + 0.0019663689)
    assert cost.step_s(0, 0) == 0.0


@pytest.mark.parametrize(("running", "kv", "steps"), [(1, 0, 1), (3, 700, 250), (64, 10_000, 4000), (5, 0, 0)])
def test_closed_form_decoding_is_the_sum_of_its_steps(running: int, kv: int, steps: int) -> None:
    one_by_one = sum(COST.step_s(running, kv + running * i) for i in range(steps))
    assert COST.decode_s(running, kv, steps) == pytest.approx(one_by_one)
    assert COST.steps_within(running, kv, one_by_one) == pytest.approx(steps)


def test_vectorized_step_times_equal_scalar_ones() -> None:
    running, kv = np.array([1.0, 7.0, 300.0]), np.array([5.0, 900.0, 1e6])
    steps = [COST.step_s(int(n), k) for n, k in zip(running, kv, strict=True)]
    assert COST.step_s_by_instance(running, kv).tolist() == pytest.approx(steps)


@pytest.mark.parametrize(
    ("eta", "interrupts", "pulling"),
    [
        (0, True, [1, 2, 3, 4, 5, 6]),
        (2, True, [1, 2, 3, 4, 5, 6]),
        (3, True, [1, 1, 2, 2, 3, 3]),
        (4, True, [1, 1, 2, 2, 3, 3]),
        (5, True, [1, 1, 1, 2, 2, 2]),
        (5, False, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_staggered_pulls_twice_in_the_life_of_a_group(eta: int, interrupts: bool, pulling: list[int]) -> None:
    rule = Staggered(eta=eta, interrupts=interrupts)
    assert [rule.num_pulling(count) for count in range(1, 7)] == pulling
    assert [Greedy().num_pulling(count) for count in range(1, 7)] == [1, 2, 3, 4, 5, 6]


def test_without_migration_nothing_moves() -> None:
    crowd = [MovableTrajectory(kv_tokens=100, remaining_tokens=500, deadline=60 - i) for i in range(60)]
    crowded, empty = InstanceLoad(running=60, kv_tokens=6000), InstanceLoad(running=0, kv_tokens=0)
    assert NoMigration().choose_moves(crowded, empty, crowd, limit=60) == []


def test_every_rule_of_a_job_keeps_the_bound() -> None:
    """They wait for late work. Rules that drop it or train it late exist in the simulator only, to imitate other
    systems."""
    rules = [ADMISSION.find(name)() for name in ADMISSION.names]
    assert all(rule.keeps_bound and rule.awaits_due_groups for rule in rules)
    assert {type(rule.make_ledger(eta=1, groups_per_step=1, group_size=1)) for rule in rules} == {StalenessLedger}
    class_names = {rule.__name__.lower() for rule in Baseline.__subclasses__()}
    assert {name.replace("_", "") for name in SIMULATED_RULES} == class_names


@pytest.mark.parametrize("name", SIMULATED_RULES)
def test_a_baseline_rule_in_a_job_is_rejected_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loading.from_tree({"staleness": {"admission": name}})
    assert f"staleness.admission = '{name}' imitates another system" in str(refused.value)
    assert "use staleflow in the job, and compare with `staleflow simulate JOB --baselines`" in str(refused.value)


def finish_alone(ledger: StalenessLedger, group: int) -> tuple[Ending, ...]:
    """Finish a group of one member; returns the endings."""
    ledger.complete(GroupId(group), TrajectoryId(group))
    return ledger.occupy(GroupId(group))


def reserve_alone(ledger: StalenessLedger, group: int, version: int) -> None:
    ledger.start(GroupId(group))
    ledger.reserve(GroupId(group), TrajectoryId(group), PolicyVersion(version))


def test_steps_that_do_not_wait_drop_groups_without_an_entry() -> None:
    ledger = DroppingLedger(eta=0, groups_per_step=1, group_size=1)
    for group in (0, 1):
        reserve_alone(ledger, group, 0)
    (surplus,) = finish_alone(ledger, 1)
    assert (surplus.trajectory, surplus.fate, surplus.reason) == (0, Fate.ABORTED, AbortReason.SURPLUS_GROUP)
    assert ledger.consume(0).groups == (1,)
    ledger.validate()


def test_steps_that_do_not_wait_drop_stale_groups_and_keep_the_bound() -> None:
    """A step that takes newer groups passes over an unfinished group at its deadline."""
    ledger = DroppingLedger(eta=1, groups_per_step=1, group_size=1)
    for group in (0, 1):
        reserve_alone(ledger, group, 0)
    assert finish_alone(ledger, 1) == ()
    assert ledger.consume(0).surplus == (), "0 may still be trained by step 1"
    ledger.publish(PolicyVersion(1))
    reserve_alone(ledger, 2, 1)
    assert finish_alone(ledger, 2) == ()
    consumption = ledger.consume(1)
    assert consumption.groups == (2,)
    (late,) = consumption.surplus
    assert (late.trajectory, late.fate, late.reason) == (0, Fate.ABORTED, AbortReason.TOO_STALE)
    assert ledger.num_ended[Fate.ABORTED, AbortReason.TOO_STALE] == 1
    ledger.validate()


def test_no_signal_drops_equal_rewards() -> None:
    rule = DropNoSignal()
    assert rule.drop_reason([1.0, 1.0]) is AbortReason.NO_SIGNAL
    assert rule.drop_reason([1.0, 0.0]) is None
    assert rule.drop_reason([1.0]) is rule.drop_reason([]) is AbortReason.NO_SIGNAL
    assert KeepAll().drop_reason([1.0, 1.0]) is None


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    for registry, names in (
        (ROUTING, "deadline"),
        (ADMISSION, "staleflow, synchronous"),
        (SYNCHRONIZATION, "greedy, staggered"),
        (MIGRATION, "none, largest_gain"),
        (FILTERING, "keep_all, no_signal"),
        (STRAGGLERS, "wait, truncate"),
    ):
        with pytest.raises(ValueError, match=f"no {registry.label} 'x'; choose from {names}$"):
            registry.find("x")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Credits(alpha=1.5), "alpha = 1.5 lets trajectories lag 2 versions, .* allows 1"),
        (PipelineDepth(depth=3.0), "depth = 3 samples further ahead than .*eta = 1 .* at most 2"),
        (WindowedFifo(ahead=1), "lets groups lag 2 steps, staleness.eta allows 1; lower"),
    ],
)
def test_baseline_rules_with_a_lag_beyond_the_bound_are_rejected(rule: Baseline, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_admission(loading.from_tree({"model": {"path": "x"}, "staleness": {"eta": 1}}), rule)


def test_truncate_starts_after_a_long_wait() -> None:
    rule = TruncateStragglers(patience=2.0, share=0.1)
    assert not rule.waited_too_long(trainer_waited_s=20.0, step_interval_s=10.0), "patience is two intervals"
    assert rule.waited_too_long(trainer_waited_s=20.5, step_interval_s=10.0)
    assert not rule.waited_too_long(trainer_waited_s=99.0, step_interval_s=0.0), "the interval is not known yet"
    assert not StragglerRule().waited_too_long(trainer_waited_s=99.0, step_interval_s=10.0)


@pytest.mark.parametrize(
    ("unfinished", "per_step", "truncated_in_step", "trained", "truncated", "may"),
    [
        (3, 30, 0, 300, 0, True),
        (4, 30, 0, 300, 0, False),  # more than a tenth of 30
        (2, 30, 2, 300, 2, False),  # two of this step have been cut already
        (1, 30, 2, 300, 2, True),
        (3, 30, 0, 300, 30, True),
        (3, 30, 0, 300, 31, False),  # the steps before have used up the share
        (3, 30, 0, 0, 0, True),
        (1, 4, 0, 96, 9, True),  # one of a small step
        (2, 4, 0, 96, 0, False),
    ],
)
def test_truncation_is_limited_by_the_share_of_step_and_run(
    unfinished: int, per_step: int, truncated_in_step: int, trained: int, truncated: int, may: bool
) -> None:
    counts = {
        "num_per_step": per_step, "num_truncated_in_step": truncated_in_step, "num_trained": trained,
        "num_truncated": truncated,
    }  # fmt: skip
    assert TruncateStragglers(patience=1.0, share=0.1).may_truncate(unfinished, **counts) is may
    assert not StragglerRule().may_truncate(unfinished, **counts)

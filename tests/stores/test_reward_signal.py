"""Groups with a reward signal: filter, metric and branch comparison agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from staleflow.pipeline.stored_runs.branch_diff import compare_branches
from staleflow.pipeline.strategies.filtering import DropNoSignal
from staleflow.stores.reward_statistics import has_signal
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.records import RunHeader
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, GroupId
from staleflow.tasks.training.advantage import DrGrpo
from staleflow.tasks.training.batches import batch_metrics
from tests.stores.store_conformance import ended, record

GROUPS = [
    ([1.0, 0.0, 0.0], [True, True, True], True),
    ([1.0, 1.0, 1.0], [True, True, True], False),
    ([1.0, 1.0, 0.0], [True, True, False], False),
    ([1.0, 0.0, 0.0], [True, False, False], False),
    ([1.0, 0.0, 7.0], [True, True, False], True),
    ([0.0, 0.0, 0.0], [False, False, False], False),
    ([0.1 + 0.2, 0.3, 0.3], [True, True, True], False),
]
"""(rewards, whether each was computed, whether there is a signal)."""


def test_no_reward_and_one_reward_have_no_signal() -> None:
    assert not has_signal([]) and not has_signal([1.0])


@pytest.mark.parametrize(("rewards", "valid", "expected"), GROUPS)
def test_filter_metric_and_advantages_agree(rewards: list[float], valid: list[bool], expected: bool) -> None:
    kept = [r for r, v in zip(rewards, valid, strict=True) if v]
    assert (DropNoSignal().drop_reason(kept) is None) is expected
    rng = np.random.default_rng(0)
    rows = [ended(rng, i, 1) for i in range(3)]
    rows = [
        replace(row, trajectory=replace(row.trajectory, reward=reward, error="" if scored else "it failed"))
        for row, reward, scored in zip(rows, rewards, valid, strict=True)
    ]
    metrics = batch_metrics(rows, 3)
    assert metrics["groups_with_signal"] == float(expected)
    estimate = DrGrpo().advantages(np.asarray([rewards]), np.asarray([valid]))
    assert bool((np.abs(estimate) > 1e-9).any()) is expected


def test_a_branch_with_rewards_that_all_succeeded_has_no_errors_of_its_parent(tmp_path: Path) -> None:
    header = RunHeader(run="r", eta=1, groups_per_step=1, group_size=3, members_started_per_group=3)
    store = VersionedStore.create(tmp_path / "store", header)
    row = ended(np.random.default_rng(0), 0, 1)
    store.commit(record(1), [replace(row, trajectory=replace(row.trajectory, error="it failed"))])
    for errors, expected in (({}, ""), ({0: "it failed again"}, "it failed again"), (None, "it failed")):
        new = derived_branches.BranchRewards(
            rewards=np.ones(1, np.float32),
            advantages=np.zeros(1, np.float32),
            loss_mask=np.ones(1, bool),
            errors=errors,
        )
        derived_branches.derive_rewards(store, tmp_path / "store", expected or "none", new, {})
        (derived,) = VersionedStore.open(tmp_path / "store", branch=expected or "none").trajectories()
        assert derived.trajectory.error == expected


def test_a_failed_reward_gives_no_signal(tmp_path: Path) -> None:
    """Its row has the value 0, which is not a reward."""
    header = RunHeader(run="r", eta=1, groups_per_step=1, group_size=3, members_started_per_group=3)
    store = VersionedStore.create(tmp_path / "store", header)
    rng = np.random.default_rng(0)
    rows = [ended(rng, i, 1, Fate.CONSUMED, loss_mask=True) for i in range(3)]
    store.commit(record(1), [replace(r, trajectory=replace(r.trajectory, group=GroupId(0), reward=1.0)) for r in rows])
    everything = [True, True, True]
    for name, mask, rewards in (
        ("failed", [True, True, False], [1.0, 1.0, 0.0]),
        ("scored", everything, [1.0, 1.0, 0.0]),
        ("reversed", everything, [1.0, 1.0, 2.0]),
    ):
        new = derived_branches.BranchRewards(
            rewards=np.asarray(rewards, np.float32),
            advantages=np.zeros(3, np.float32),
            loss_mask=np.asarray(mask),
            errors={},
        )
        derived_branches.derive_rewards(store, tmp_path / "store", name, new, {})
    assert compare_branches(tmp_path, "main", "failed").signal_second_only == ()
    assert compare_branches(tmp_path, "main", "scored").signal_second_only == (0,)
    assert compare_branches(tmp_path, "scored", "failed").signal_first_only == (0,)
    counts = {edge: count for edge, _, count in compare_branches(tmp_path, "main", "failed").histogram}
    assert sum(counts.values()) == 2, "a reward that failed is in no bin"
    assert compare_branches(tmp_path, "reversed", "failed").order_changed == ()
    assert compare_branches(tmp_path, "reversed", "scored").order_changed == (0,)

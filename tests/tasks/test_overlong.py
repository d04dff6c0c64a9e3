"""The penalty on responses close to the length limit changes the advantage and not the stored reward."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.loading import load
from staleflow.pipeline.stored_runs import reward_rescoring
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, Segment
from staleflow.tasks.training.advantage import DrGrpo, OverlongPenalty
from staleflow.tasks.training.batches import batch_metrics, rows_with_advantages
from tests.stores.store_conformance import ended, record

NONE = OverlongPenalty(ramp_tokens=0, penalty=1.0, max_length=50)


def test_overlong_penalty_grows_over_the_last_tokens_up_to_the_limit() -> None:
    lengths = np.arange(60)
    result = OverlongPenalty(ramp_tokens=20, penalty=0.5, max_length=50).penalties(lengths)
    expected = [0.0 if n <= 30 else 0.5 if n > 50 else 0.5 * (n - 30) / 20 for n in range(60)]
    np.testing.assert_allclose(result, expected)
    assert not NONE.penalties(lengths).any()


def test_overlong_penalty_changes_the_advantage_and_not_the_reward() -> None:
    rng = np.random.default_rng(0)
    batch = []
    for i, length in enumerate((5, 40, 45, 50)):
        t = ended(rng, i, 1).trajectory
        first = next(s for s in t.spans if isinstance(s, Segment))
        segment = replace(first, tokens=np.zeros(length, np.int32), logprobs=np.zeros(length, np.float32))
        batch.append(replace(t, spans=(segment,), reward=1.0, error=""))
    shaped = rows_with_advantages(1, batch, 4, DrGrpo(), OverlongPenalty(ramp_tokens=20, penalty=1.0, max_length=50))
    np.testing.assert_allclose([e.advantage for e in shaped], np.array([1.0, 0.5, 0.25, 0.0]) - 1.75 / 4, atol=1e-6)
    assert {e.trajectory.reward for e in shaped} == {1.0}
    assert batch_metrics(shaped, 4)["advantage_std"] > 0 == batch_metrics(shaped, 4)["groups_with_signal"]
    assert not any(e.advantage for e in rows_with_advantages(1, batch, 4, DrGrpo(), NONE))


def test_advantages_of_new_rewards_include_the_overlong_penalty(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\npath = 'x'\n[batch]\ngroup_size = 2\n[rollout]\nmax_new_tokens = 16\n")
    config = load(tmp_path / "job.toml", ("training.overlong_tokens=12", "training.advantage=dr_grpo"))
    header = dataclasses.replace(actor_settings.run_header(config), groups_per_step=2, members_started_per_group=2)
    store = VersionedStore.create(tmp_path / "store", header)
    rng = np.random.default_rng(0)
    rows = [ended(rng, i, 1, Fate.CONSUMED, loss_mask=True) for i in range(4)]
    rows = [replace(r, trajectory=replace(r.trajectory, group=i // 2)) for i, r in enumerate(rows)]  # type: ignore[arg-type]
    store.commit(record(1), rows)
    rewards = np.asarray([1.0, 1.0, 0.0, 1.0], np.float32)
    result = reward_rescoring.estimate_advantages(
        config, store.stored_columns(), np.ones(4, bool), rewards, np.ones(4, bool)
    )
    lengths = np.asarray([r.trajectory.num_tokens for r in rows])
    assert len(set(lengths.tolist())) > 1
    shaped = (rewards - actor_settings.overlong_penalty(config).penalties(lengths)).reshape(2, 2)
    np.testing.assert_allclose(result, DrGrpo().advantages(shaped, np.ones((2, 2), bool)).reshape(-1))

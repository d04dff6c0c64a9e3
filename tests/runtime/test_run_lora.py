"""A whole run that trains an adapter, on a real Dask cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.stored_runs.verification import verify_run
from staleflow.stores.trajectory import Fate
from staleflow.tasks.engines.transformers import forward_logprobs, load_model
from tests.runtime.test_run import check, run

ADAPTER = (
    "training.lora={rank=4, alpha=8}",
    "rollout.on_pull=adapter",
    "training.learning_rate=3e-2",
    "training.checkpoint_every=1",
    "staleness.eta=2",
    "rollout.logprob_drift_limit=1e-4",
    "task.eval_prompts=0",
)


def check_attribution(job: Path, model: Path, *overrides: str) -> None:
    """Run a job that trains an adapter: each response has one version and the logprobs of that version's checkpoint,
    and no context is prefilled twice."""
    end = run(job, *ADAPTER, *overrides)
    store = check(end.run_dir, 5)
    assert not end.summary["alarms"]
    assert verify_run(end.run_dir, steps=5).is_verified
    saved = {int(path.name.removeprefix("step-")): path for path in (end.run_dir / "checkpoints").iterdir()}
    models = {v: load_model(str(path), "float32", "cpu", "sdpa") for v, path in (saved | {0: model}).items()}
    probe = list(range(3, 12))
    assert np.abs(np.subtract(forward_logprobs(models[5], probe), forward_logprobs(models[0], probe))).max() > 0.01
    prompts, spanned = 0, set()
    for row in store.trajectories():
        trajectory = row.trajectory
        prompts += len(trajectory.prompt_tokens)
        if row.fate is not Fate.CONSUMED:
            continue
        assert {segment.version for segment in trajectory.segments} == {trajectory.v_traj}
        tokens = [int(t) for part in (trajectory.prompt_tokens, *(s.tokens for s in trajectory.segments)) for t in part]
        stored = np.concatenate([segment.logprobs for segment in trajectory.segments])
        result = forward_logprobs(models[trajectory.v_traj], tokens)[len(trajectory.prompt_tokens) - 1 :]
        np.testing.assert_allclose(stored, result, atol=2e-4)
        spanned.add(trajectory.v_traj)
    assert len(spanned) > 2
    summary: dict[str, Any] = end.summary
    assert summary["prefilled_tokens"] + summary["cached_tokens"] <= prompts


@pytest.mark.slow
def test_each_response_has_the_version_it_started_with(job: Path, tiny_model: Path) -> None:
    check_attribution(job, tiny_model)

"""Whole runs on a real Dask cluster whose trainer has several ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from staleflow.stores.trajectory import Fate
from staleflow.stores.weights.resume_points import ResumePoints
from tests.runtime.test_run import check, run_and_strike, staleflow

RANKS = ("training.ranks=2", "task.eval_prompts=0", "steps=3", "rollout.instances=1")


def test_a_trainer_that_loses_a_rank_continues_and_resumes_with_one_rank(job: Path) -> None:
    """Sharded resume points are loaded by one process."""
    driver = run_and_strike(job, RANKS, "trainer-1", signal.SIGKILL)
    (loss,) = driver.report.lost_actors
    assert "trainer-1 is gone" in loss
    folder = job.parent / "runs" / "job"
    store = check(folder, 3)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 3 * 16
    points = ResumePoints(folder / "resume")
    assert points.path(points.complete_versions()[-1]).is_dir()
    resumed = staleflow("resume", folder, "--set", "steps=4", "--set", "training.ranks=1")
    assert resumed.returncode == 0, resumed.stderr
    check(folder, 4)
    assert points.complete_versions()[-1] == 4
    assert points.path(points.complete_versions()[-1]).is_file()
    config = json.loads((folder / "checkpoints" / "step-000004" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]

"""A worker of a cluster is retired while a job runs: its instance's trajectories continue on another."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.soaking.counting import prompts
from benchmarks.soaking.job import NAME, Job
from staleflow.stores.trajectory import Fate
from tests.jobs.test_jobs import actor_processes, manual_cluster
from tests.runtime.test_run import check

STEPS = 25


@pytest.mark.slow  # eight processes and two dozen steps
@pytest.mark.timeout(600)
def test_a_retired_instance_loses_no_trajectory(tmp_path: Path) -> None:
    with manual_cluster(tmp_path) as cluster:
        for roles in ("trainer=1", "server=1", "driver=1,reward=1"):
            cluster.add(1, "--resources", roles)
        cluster.add(3, "--resources", "rollout=1")
        Job(folder=tmp_path, seed=1).write()
        submitted = cluster("submit", tmp_path / "job.toml", "--set", f"steps={STEPS}")
        assert submitted.returncode == 0, submitted.stderr
        id = submitted.stdout.strip()
        cluster.until(id, "running", steps=3)
        (process,) = (pid for key, pid in actor_processes(cluster).items() if f"-{NAME}-rollout-0-" in key)
        retirement = cluster("retire", id, "rollout-0")
        assert retirement.returncode == 0, retirement.stderr
        cluster.until(id, "done")
        assert "was retired" in cluster("logs", id).stdout
        deadline = time.monotonic() + 60.0
        while Path(f"/proc/{process}").exists():
            assert time.monotonic() < deadline, Path(f"/proc/{process}/status").read_text()
            time.sleep(0.1)
    run = tmp_path / "runs" / NAME
    rows = list(check(run, STEPS).trajectories())
    assert sum(row.fate is Fate.CONSUMED for row in rows) == STEPS * 16
    assert prompts(run).findings() == []
    assert json.loads((run / "summary.json").read_text())["losses"] == []
    instances = {str(segment.instance) for row in rows for segment in row.trajectory.segments}
    assert {"rollout-0", "rollout-0.1"} <= instances

"""A job on two hosts: worker processes on 127.0.0.1 and 127.0.0.2 with separate shared memory.

Separate shared memory needs root; otherwise both use one folder. tests/runtime has both cases in virtual time:
test_actor_failures.py a stopped instance with its parameter server, test_membership.py a retired instance.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soaking.counting import prompts
from benchmarks.soaking.job import NAME, Job
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import InstanceReported, TrajectoryInterrupted, TrajectorySampled
from staleflow.pipeline.coordination.journal import list_start_files
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.jobs.test_jobs import Cluster, actor_processes, manual_cluster
from tests.runtime.test_run import check

HERE, THERE = "127.0.0.1", "127.0.0.2"
STEPS = 25
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with manual_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """The folder of the job. Trainer, server and light roles are on one host, three workers for instances on the
    other."""
    memory, far = tmp_path / "memory", tmp_path / "far-memory"
    memory.mkdir()
    far.mkdir()
    apart: tuple[str, ...] = ()
    if os.geteuid() == 0 and shutil.which("unshare"):
        mount = f'mount --bind {far} {memory} && exec "$@"'
        apart = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh")
    for roles in ("trainer=1", "server=1", "driver=1,reward=1"):
        cluster.add(1, "--host", HERE, "--resources", roles)
    cluster.add(3, "--host", THERE, "--resources", "rollout=1", within=apart)
    Job(folder=tmp_path, seed=1).write()
    return tmp_path


def submit_job(cluster: Cluster, folder: Path) -> str:
    """Submit a job; returns its id once two instances have trained a few steps and a third worker is spare."""
    sent = cluster(
        "submit", folder / "job.toml", "--set", f"steps={STEPS}", "--set", f"cluster.shared_memory={folder}/memory",
        "--set", "deadlines.call_s=10",
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    id = sent.stdout.strip()
    cluster.until(id, "running", steps=3)
    return id


def processes(cluster: Cluster, role: str) -> dict[str, int]:
    """Return the process of each actor of a role by name."""
    places = {
        key.removeprefix(f"staleflow-{NAME}-").rpartition("-")[0]: pid for key, pid in actor_processes(cluster).items()
    }
    return {name: pid for name, pid in places.items() if name.startswith(role)}


def check_whole(folder: Path) -> list[str]:
    """Check that every step is trained and every prompt used once; returns the losses."""
    store = check(folder / "runs" / NAME, STEPS)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == STEPS * 16
    assert prompts(folder / "runs" / NAME).findings() == []
    losses: list[str] = json.loads((folder / "runs" / NAME / "summary.json").read_text())["losses"]
    return losses


def sampled_again(run_dir: Path) -> dict[int, int]:
    """Return by trajectory the tokens that were reported and then neither continued nor stored."""
    reached: dict[int, int] = {}
    again: dict[int, int] = {}
    for _, path in list_start_files(run_dir):
        for entry in journal.JournalReader(path):
            match entry.event:
                case InstanceReported(progress=progress):
                    seen = list(progress)
                case TrajectorySampled(trajectory=t, tokens=n) | TrajectoryInterrupted(trajectory=t, tokens=n):
                    seen = [(t, n)]
                case _:
                    continue
            for trajectory, tokens in seen:
                if (lost := reached.get(trajectory, 0) - tokens) > 0:
                    again[trajectory] = lost
                reached[trajectory] = tokens
    for row in VersionedStore.open(run_dir / "store").trajectories():
        if (lost := reached.get(row.trajectory.id, 0) - row.trajectory.num_tokens) > 0:
            again[row.trajectory.id] = lost
    return again


def sampling_instances(folder: Path) -> set[str]:
    rows = VersionedStore.open(folder / "runs" / NAME / "store").trajectories()
    return {str(segment.instance) for row in rows for segment in row.trajectory.segments}


@pytest.mark.slow  # eight processes and two dozen steps
def test_a_stopped_instance_with_its_parameter_server_is_replaced(cluster: Cluster, folder: Path) -> None:
    id = submit_job(cluster, folder)
    (beside,) = processes(cluster, f"parameters-{THERE}").values()
    (stopped,) = (name for name, pid in processes(cluster, "rollout").items() if pid == beside)
    os.kill(beside, signal.SIGSTOP)
    cluster.until(id, "done")
    assert any(stopped in loss for loss in check_whole(folder))
    assert f"{stopped}.1" in sampling_instances(folder)
    assert not Path(f"/proc/{beside}").exists(), "its nanny has restarted it"


@pytest.mark.slow  # eight processes and two dozen steps
def test_a_retired_instance_loses_no_trajectory(cluster: Cluster, folder: Path) -> None:
    id = submit_job(cluster, folder)
    retired = processes(cluster, "rollout")["rollout-0"]
    result = cluster("retire", id, "rollout-0")
    assert result.returncode == 0, result.stderr
    cluster.until(id, "done")
    assert check_whole(folder) == []
    log = cluster("logs", id).stdout
    assert "rollout-0 on tcp://127.0.0.2" in log
    assert "was retired" in log
    assert "rollout-0.1" in sampling_instances(folder)
    assert sampled_again(folder / "runs" / NAME) == {}
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{retired}").exists():
        assert time.monotonic() < deadline, Path(f"/proc/{retired}/status").read_text() + log
        time.sleep(0.1)

"""Jobs on a manually started cluster whose workers report GPUs. NVIDIA's library is simulated and the engine emulated;
scheduler, nannies and workers are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.cluster.connection import ClusterAddress
from tests.commands import command
from tests.jobs.test_jobs import DRY, PATIENCE_S, Cluster, manual_cluster
from tests.support import fake_nvml

HERE, THERE = "127.0.0.1", "127.0.0.2"
NVML = Path(fake_nvml.__file__).parent
pytestmark = pytest.mark.timeout(600)


def add_gpu_worker(cluster: Cluster, host: str, gpus: str, visible: str) -> None:
    """Start a worker that reports GPUs. visible: its CUDA_VISIBLE_DEVICES."""
    path = f"{NVML}{os.pathsep}{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(NVML)
    variables = (
        f"PYTHONPATH={path}", f"FAKE_GPUS={gpus}", f"FAKE_HOST={host}", f"CUDA_VISIBLE_DEVICES={visible}",
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML=False",  # Dask's own monitor asks that library for more
    )  # fmt: skip
    cluster.add(1, "--host", host, "--name", f"{host}/{visible}", within=("env", *variables))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A host with three workers that see three GPUs in rotated order, as with dask-cuda, a host with one GPU, and one
    without."""
    (tmp_path / "dry.toml").write_text(DRY.format(runs=tmp_path / "runs"))
    with manual_cluster(tmp_path) as cluster:
        for visible in ("0,1,2", "1,2,0", "2,0,1"):
            add_gpu_worker(cluster, HERE, "3xH100-80", visible)
        add_gpu_worker(cluster, THERE, "1xH100-80", "0")
        cluster.add(1, "--host", HERE, "--name", "plain")
        yield cluster


async def _places(cluster: Cluster, name: str) -> dict[str, dict[str, Any]]:
    def actors(dask_scheduler: Any) -> dict[str, str]:  # in here, so that it travels by value
        return {
            str(key): next(iter(task.who_has)).address for key, task in dask_scheduler.tasks.items() if task.who_has
        }

    def process() -> dict[str, Any]:
        import os

        return {"pid": os.getpid(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}

    async with ClusterAddress(scheduler_file=str(cluster.file)).open_client() as client:
        of_actor = await client.run_on_scheduler(actors)
        processes = await client.run(process, on_error="ignore")
        names = {address: worker["name"] for address, worker in (await client.scheduler.identity())["workers"].items()}
    prefix = f"staleflow-{name}-"
    return {
        key.removeprefix(prefix).rpartition("-")[0]: {"worker": str(names[address]), **processes[address]}
        for key, address in of_actor.items()
        if key.startswith(prefix) and address in processes and address in names
    }


def places(cluster: Cluster, name: str) -> dict[str, dict[str, Any]]:
    """Return worker, process and visible GPUs of each actor of a run."""
    return asyncio.run(_places(cluster, name))


def submit(cluster: Cluster, folder: Path, *overrides: str) -> str:
    sets = [word for override in ("cluster.gpus=4", *overrides) for word in ("--set", override)]
    sent = cluster("submit", folder / "dry.toml", *sets)
    assert sent.returncode == 0, sent.stderr
    return sent.stdout.strip()


def until_workers(cluster: Cluster, count: int) -> None:
    async def wait() -> None:
        async with ClusterAddress(scheduler_file=str(cluster.file)).open_client() as client:
            await client.wait_for_workers(count, timeout=PATIENCE_S)

    asyncio.run(wait())


@pytest.mark.slow  # by default tests/cluster/test_job_queue.py replaces lost GPUs
def test_a_role_whose_worker_is_killed_moves_to_another_gpu_of_its_host(cluster: Cluster, tmp_path: Path) -> None:
    until_workers(cluster, 5)
    id = submit(cluster, tmp_path, "steps=100000", "deadlines.call_s=20", "rollout.instances=2")
    cluster.until(id, "running", steps=2)
    before = places(cluster, "dry")
    # The other host has the trainer; of three workers that see the same GPUs, each has the first that it sees.
    assert before["trainer"]["worker"] == f"{THERE}/0" and before["trainer"]["visible"] == "0"
    assert before["server"]["visible"] == "" and before["server"]["worker"] == "plain"
    lost, other = before["rollout-0"], before["rollout-1"]
    for instance in (lost, other):
        assert instance["worker"].startswith(f"{HERE}/{instance['visible']}")
    assert lost["visible"] != other["visible"]
    os.kill(lost["pid"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        after = [at for name, at in places(cluster, "dry").items() if name.startswith("rollout-0")]
        if moved := [at for at in after if at["pid"] != lost["pid"]]:
            break
        assert time.monotonic() < deadline, after
        time.sleep(0.5)
    # The same GPU, which the third worker of its host sees, too; the other instance has its own still.
    assert moved[0]["worker"].startswith(HERE) and moved[0]["visible"] == lost["visible"]
    assert places(cluster, "dry")["rollout-1"] == other
    done = int(cluster.job(id)["last"]["step"])
    assert cluster.until(id, "running", steps=done + 3)["status"]["losses"]
    assert command("cancel", id, "--scheduler-file", cluster.file).returncode == 0
    cluster.until(id, "stopped")
    end = command("store", "audit", tmp_path / "runs" / "dry", "--json")
    assert end.returncode == 0, json.loads(end.stdout)


def test_nine_gpus_of_four_are_rejected_in_one_line_before_the_start(cluster: Cluster, tmp_path: Path) -> None:
    until_workers(cluster, 5)
    job = tmp_path / "dry.toml"
    for overrides, line in (
        (("cluster.gpus=9",), "cluster: the run may have cluster.gpus = 9; the cluster's workers have 4 x H100 80 GB"),
        (("cluster.gpus=4", "rollout.instances=8"), "cluster: the run needs 9 GPUs, cluster.gpus = 4"),
        (("cluster.gpus=4", "rollout.instances=4"), "cluster: the run needs 5 GPUs"),
    ):
        sets = [word for override in overrides for word in ("--set", override)]
        own = ("--set", "cluster.kind=file", "--set", f"cluster.scheduler_file={cluster.file}")
        for end in (cluster("submit", job, *sets), command("run", job, *sets, *own)):
            assert end.returncode == 2, end
            (said,) = end.stderr.strip().splitlines()
            assert line in said
    assert json.loads(command("jobs", "--json", "--all", "--scheduler-file", cluster.file).stdout) == []
    assert not (tmp_path / "runs").exists()

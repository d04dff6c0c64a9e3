"""Jobs on a manually started cluster whose workers report GPUs. NVIDIA's library is simulated and the engine emulated;
scheduler, nannies and workers are real."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from staleflow.pipeline.cluster.connection import ClusterAddress
from tests.commands import command
from tests.jobs.test_jobs import DRY, PATIENCE_S, Cluster, manual_cluster
from tests.support import fake_nvml

HERE = "127.0.0.1"
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


def until_workers(cluster: Cluster, count: int) -> None:
    async def wait() -> None:
        async with ClusterAddress(scheduler_file=str(cluster.file)).open_client() as client:
            await client.wait_for_workers(count, timeout=PATIENCE_S)

    asyncio.run(wait())


def test_nine_gpus_of_four_are_rejected_in_one_line_before_the_start(tmp_path: Path) -> None:
    job = tmp_path / "dry.toml"
    job.write_text(DRY.format(runs=tmp_path / "runs"))
    with manual_cluster(tmp_path) as cluster:
        add_gpu_worker(cluster, HERE, "4xH100-80", "0,1,2,3")
        cluster.add(1, "--host", HERE, "--name", "plain")
        until_workers(cluster, 2)
        for overrides, line in (
            (("cluster.gpus=9",), "the run may have cluster.gpus = 9; the cluster's workers have 4 x H100 80 GB"),
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

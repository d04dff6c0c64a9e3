"""Submitting a job: the submitter may be killed at any moment."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs import job_driver
from staleflow.pipeline.recovery.run_folder import create_and_lock
from staleflow.stores.errors import ConfigError
from tests.cluster.test_job_registry import Jobs, jobs_on
from tests.runtime.test_run_folder import JOB


class KilledError(BaseException):
    """Raised where the submitter is killed; its connection closes."""


async def submit(jobs: Jobs, job: Path, *, resume: bool = False) -> dict[str, Any]:
    cluster = ClusterAddress(address=jobs.cluster.scheduler_address)
    return await job_driver.submit(loading.load(job), cluster, resume=resume)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "light.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs"))
    return path


async def registered_jobs(jobs: Jobs) -> list[dict[str, Any]]:
    """Return the jobs of the registry once none is incomplete."""
    async with asyncio.timeout(20.0):
        while True:
            result: list[dict[str, Any]] = await job_registry.ask(jobs.client, "jobs")
            if all(job["state"] == "failed" or "the cluster has 0" in job["why"] for job in result):
                return result
            await asyncio.sleep(0.05)


async def test_a_driver_that_hangs_leaves_the_stacks_of_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_driver, "STUCK_LIMIT_S", 0.5)
    path = tmp_path / job_driver.STACKS_FILE

    def hang_in_a_call() -> None:
        deadline = time.monotonic() + 60.0
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)

    async with job_driver.writing_stacks_if_stuck(path):
        await asyncio.sleep(0.01)
        hang_in_a_call()
    assert "in hang_in_a_call" in path.read_text()
    monkeypatch.setattr(job_driver, "STUCK_LIMIT_S", 600.0)
    async with job_driver.writing_stacks_if_stuck(tmp_path / "none"):
        await asyncio.sleep(0.01)
    assert not (tmp_path / "none").exists()
    entered = False
    async with job_driver.writing_stacks_if_stuck(tmp_path / "no folder" / "none"):
        entered = True
    assert entered, "a job runs also if the file cannot be written"


async def test_a_submitted_job_is_in_the_queue(job: Path) -> None:
    async with jobs_on(0) as jobs:
        reply = await submit(jobs, job)
        assert reply["why"].startswith("needs 3 worker processes")
        assert [item["id"] for item in await registered_jobs(jobs)] == [reply["id"]]
        assert await jobs.runs(reply["id"]) == "no-worker"


async def test_a_submitter_killed_before_it_sent_the_driver_leaves_no_waiting_job(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    monkeypatch.setattr(Client, "submit", killed)
    async with jobs_on(0) as jobs:
        with pytest.raises(KilledError):
            await submit(jobs, job)
        (left,) = await registered_jobs(jobs)
        assert (left["state"], left["why"]) == (
            "failed",
            "the process that submitted it was gone before its task had arrived",
        )


async def test_a_job_whose_submitter_is_killed_after_it_sent_the_driver_waits(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Client.submit

    def killed(*args: Any, **options: Any) -> None:
        send(*args, **options)
        raise KilledError

    monkeypatch.setattr(Client, "submit", killed)
    async with jobs_on(0) as jobs:
        with pytest.raises(KilledError):
            await submit(jobs, job)
        for left in await registered_jobs(jobs):
            assert left["state"] == "failed" or await jobs.runs(left["id"]) == "no-worker"


async def test_a_folder_has_at_most_one_unfinished_job(job: Path) -> None:
    async with jobs_on(0) as jobs:
        first = await submit(jobs, job)
        for resume in (False, True):
            with pytest.raises(ConfigError, match=f"{first['id']} is waiting and has this folder"):
                await submit(jobs, job, resume=resume)
        assert [item["id"] for item in await registered_jobs(jobs)] == [first["id"]]
        assert await job_registry.ask(jobs.client, "stop", id=first["id"], why="cancelled") == "waiting"
        second = await submit(jobs, job)
        assert second["why"].startswith("needs 3 worker processes")


async def test_a_live_run_cannot_be_resumed(job: Path) -> None:
    async with jobs_on(0) as jobs:
        with create_and_lock(loading.load(job).run_dir), pytest.raises(ConfigError, match="in use by process"):
            await submit(jobs, job, resume=True)
        assert await job_registry.ask(jobs.client, "jobs") == []


async def test_a_job_cancelled_before_its_driver_arrives_is_stopped(job: Path) -> None:
    async with jobs_on(0) as jobs:
        needs = {"num_instances": 1, "num_reward_workers": 1, "has_driver_worker": True}
        received = {"name": "half", "run_dir": "/runs/half", "steps": 1, "submitter": jobs.client.id}
        await job_registry.ask(jobs.client, "submit", id="half", **received, needs=needs, wait_limit_s=0.0)
        assert await job_registry.ask(jobs.client, "stop", id="half", why="cancelled") == "waiting"
        assert (await jobs.of("half"))["state"] == "stopped"

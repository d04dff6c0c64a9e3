"""Jobs submitted to a cluster from Python, with functions and rows."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import staleflow
from staleflow.pipeline.api import submitting
from staleflow.pipeline.cluster import job_lookup
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.submitted_job import Job
from staleflow.pipeline.config import preflight
from staleflow.pipeline.jobs.execution import StoppedBeforeStart
from staleflow.pipeline.processes import local_cluster
from staleflow.stores.errors import ConfigError, JobFailed
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.api.test_running import ROWS, emulated, reward


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a local cluster whose workers have imported what a run needs."""
    with (
        dask.config.set(local_cluster.forkserver_config(1, local_cluster.modules_to_preload(emulated=False))),
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_a_job_with_a_function_and_rows_runs_on_the_cluster(job: Path, client: Client) -> None:
    changes = {"steps": 2, "task.eval_prompts": 4}
    submitted = staleflow.submit(job, client=client, overrides=changes, rows=ROWS, reward=reward)
    lines = list(submitted.logs(follow=True))
    assert sum("step " in line and "reward" in line for line in lines) >= 2
    result = submitted.result()
    assert (result.stop_reason, result.summary["steps"]) == ("", 2)
    status = submitted.status()
    assert (status.state, status.step, status.steps) == ("done", 2, 2)
    assert status.tokens_per_s == pytest.approx(result.summary["tokens_per_s"])
    stored = VersionedStore.open(result.run_dir / "store")
    assert {row.trajectory.reward % 1 for row in stored.trajectories() if not row.trajectory.error} == {0.5}
    assert (result.run_dir / "rows.jsonl").is_file()
    assert (result.run_dir / "code" / "reward_reward.py").is_file()
    assert submitted.id in {known.id for known in staleflow.submitted_jobs(client=client)}


def check_fails(*_: Any, **__: Any) -> list[str]:
    raise ConfigError("its model is gone")


def test_a_job_is_cancelled_and_resumed_there(tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = staleflow.submit(emulated(tmp_path, steps=500), scheduler=client.scheduler.address)
    for line in submitted.logs(follow=True):
        if "step 2/" in line:
            break
    submitted.cancel("seen enough")
    status = submitted.wait()
    assert (status.state, status.message) == ("stopped", "seen enough")
    steps = len(submitted.run.steps())
    assert 2 < steps < 500
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "check_job", check_fails)
        with pytest.raises(ConfigError, match="its model is gone"):
            staleflow.submit_resumed(submitted.run_dir, {"steps": steps + 2}, client=client)
    resumed = staleflow.submit_resumed(submitted.run_dir, {"steps": steps + 2}, client=client)
    assert resumed.result().summary["steps"] == steps + 2


def test_the_result_of_a_failed_submitted_job_raises_its_error(job: Path, client: Client) -> None:
    def fails(text: str, row: Mapping[str, Any]) -> float:
        if text not in ("", row["answer"]):
            raise ValueError("not today")
        return 1.0

    submitted = staleflow.submit(job, client=client, rows=ROWS, reward=fails, overrides=["name=fails"])
    with pytest.raises(JobFailed, match=r"fails-.* failed: .*not today"):
        submitted.result()


def test_a_missing_or_doubly_named_cluster_gives_a_one_line_error(tmp_path: Path, client: Client) -> None:
    with pytest.raises(ConfigError, match="no cluster given"):
        staleflow.submit(emulated(tmp_path))
    with pytest.raises(ConfigError, match="both a client and a scheduler"):
        staleflow.submitted_jobs(client=client, scheduler="tcp://127.0.0.1:1")
    in_process: Any = SimpleNamespace(scheduler=SimpleNamespace(address="inproc://1/2"), security=None)
    with pytest.raises(ConfigError, match="are threads of this process"):
        staleflow.submit(emulated(tmp_path), client=in_process)


def test_the_result_of_a_job_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Job("id", "job", str(tmp_path / "job"), 4, 0.0).to_plain()
    monkeypatch.setattr(ClusterAddress, "open_client", lambda *_: contextlib.nullcontext())

    async def find(*_: Any) -> dict[str, Any]:
        return entry

    monkeypatch.setattr(job_lookup, "find_job", find)
    submitted = submitting._submitted_job(entry, ClusterAddress())

    def ends(state: str, why: str, **changes: Any) -> None:
        entry.update({"state": state, "why": why, **changes})

    ends("running", "", last={"step": 1.0, "elapsed_s": 3.0})
    assert submitted.wait(0.0).remaining_s == 3.0
    with pytest.raises(TimeoutError, match="the job has not ended after 0 s; it goes on: running: step 2/4"):
        submitted.result(0.0)
    ends("failed", "no memory")
    with pytest.raises(JobFailed, match="id failed: no memory"):
        submitted.result()
    ends("done", "")
    with pytest.raises(ConfigError, match="its folder is not seen here"):
        submitted.result()
    ends("stopped", "not now", last={})
    with pytest.raises(StoppedBeforeStart, match="not now"):
        submitted.result()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "summary.json").write_text('{"steps": 2, "starts": [{}]}')
    result = submitted.result()
    assert (result.stop_reason, result.summary["steps"], submitted.wait().remaining_s) == ("not now", 2, None)
    (tmp_path / "job" / "starts.json").write_text("[{}, {}]")  # its latest start has written no summary
    ends("done", "")
    with pytest.raises(ConfigError, match="no summary"):
        submitted.result()


def test_ctrl_c_cancels_a_call_to_the_cluster() -> None:
    ended: list[str] = []

    async def wait() -> None:
        await asyncio.sleep(0.2)  # a signal just before the main thread begins to wait would not end the wait
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        submitting.run_coroutine(wait())
    assert ended == ["cancelled"]


async def test_call_runs_a_coroutine_inside_a_running_loop() -> None:
    async def one() -> int:
        await asyncio.sleep(0)
        return 1

    assert submitting.run_coroutine(one()) == 1

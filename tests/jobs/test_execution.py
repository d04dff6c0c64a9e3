"""How `execute` ends, with workers and a driver that do nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs import execution, summary
from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest
from staleflow.pipeline.processes import dask_workers
from staleflow.pipeline.processes.worker_protocol import ClusterLost
from staleflow.pipeline.recovery import job_record
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.errors import StoreError


class WorkersStub:
    """Workers of a cluster that wait until `begin` is set, or the run must stop."""

    dashboard = placement_text = job = ""

    def __init__(self) -> None:
        self.client = SimpleNamespace(id="client")
        self.stop_reason = ""
        self.is_waiting, self.begin = asyncio.Event(), asyncio.Event()
        self.is_closed = False

    async def wait_for_workers(self, *_: Any) -> str:
        self.is_waiting.set()
        await self.begin.wait()
        return self.stop_reason

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.is_closed = True


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return loading.from_tree({"runs_dir": str(tmp_path), "rollout": {"engine": {"name": "emulated"}}})


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> WorkersStub:
    stub = WorkersStub()

    async def give_workers(*_: Any, **__: Any) -> WorkersStub:
        return stub

    async def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    async def train(*_: Any, **__: Any) -> RunReport:
        return RunReport()

    monkeypatch.setattr(execution, "inspect_model", lambda config: SimpleNamespace(nonce="abcdef"))
    monkeypatch.setattr(user_files, "check_user_code", lambda config: None)
    monkeypatch.setattr(execution, "_prepare_folder", lambda config, *, resume: (config, None, []))
    monkeypatch.setattr(execution, "Actors", lambda *_: None)
    monkeypatch.setattr(execution, "_train", train)
    monkeypatch.setattr(summary, "write_summary", lambda *_: {})
    monkeypatch.setattr(dask_workers, "check_gpus", answer)
    monkeypatch.setattr(dask_workers, "connect", give_workers)
    monkeypatch.setattr(job_registry, "ask", answer)
    return stub


def recorded_end(config: RunConfig) -> tuple[str, str]:
    record = job_record.read(config.run_dir)
    return record["state"], record["why"]


async def test_a_run_stopped_while_it_waits_for_workers_has_no_result(config: RunConfig, workers: WorkersStub) -> None:
    workers.stop_reason = "cancelled"
    workers.begin.set()
    with pytest.raises(StoppedBeforeStart, match="cancelled"):
        await execution.execute(config, RunListener())
    assert (recorded_end(config), workers.is_closed) == (("stopped", "cancelled"), True)


@pytest.mark.parametrize("num_requests", [1, 2])
async def test_requests_to_stop_leave_no_workers_and_their_reason(
    config: RunConfig, workers: WorkersStub, num_requests: int
) -> None:
    request = StopRequest()

    async def run() -> None:
        with request:
            await execution.execute(config, RunListener(), stop=request)

    task = asyncio.ensure_future(run())
    await workers.is_waiting.wait()
    for _ in range(num_requests):
        request.stop("enough")
        await asyncio.sleep(0.001)
    with pytest.raises(StoppedBeforeStart, match="enough"):
        await task
    assert (recorded_end(config), workers.is_closed) == (("stopped", "enough"), True)


async def test_a_run_is_done_once_its_report_is_written(
    config: RunConfig, workers: WorkersStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.begin.set()
    end = await execution.execute(config, RunListener())
    assert (end.stop_reason, recorded_end(config)) == ("", ("done", ""))

    def fail(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(summary, "write_summary", fail)
    with pytest.raises(StoreError):
        await execution.execute(config, RunListener())
    assert recorded_end(config) == ("failed", "the disk is full")


async def test_work_that_may_take_minutes_leaves_the_event_loop_free(
    config: RunConfig, workers: WorkersStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def note_thread(result: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            threads.append(threading.get_ident())
            return result

        return call

    monkeypatch.setattr(execution, "inspect_model", note_thread(SimpleNamespace(nonce="abcdef")))
    monkeypatch.setattr(execution, "_prepare_folder", note_thread((config, None, [])))
    monkeypatch.setattr(summary, "write_summary", note_thread({}))
    workers.begin.set()
    await execution.execute(config, RunListener())
    assert len(threads) == 3 and threading.get_ident() not in threads


async def test_a_scheduler_that_does_not_answer_is_named(
    config: RunConfig, workers: WorkersStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_out(*_: Any, **__: Any) -> None:
        raise OSError("timed out")

    monkeypatch.setattr(job_registry, "ask", time_out)
    with pytest.raises(ClusterLost, match="cluster: the scheduler does not answer: timed out"):
        await execution.execute(config, RunListener())

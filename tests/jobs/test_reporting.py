"""Reports of a run to the registry on its scheduler, some of which are lost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.submitted_job import Job
from staleflow.pipeline.jobs import execution, job_driver, reporter
from staleflow.pipeline.jobs.reporter import Reporter
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.recovery import job_record, run_folder
from staleflow.stores.errors import ActorLost, StoreUnavailable
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.support import virtual_time

WORKERS: Any = SimpleNamespace(waiting_actors={}, client=None, start_s=1.0)


class DriverStub:
    """A driver that runs until it is stopped or fails."""

    is_in_main_loop = True

    def __init__(self) -> None:
        self.report = SimpleNamespace(stop_reason="")
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def latest_decisions(self, count: int) -> list[Any]:
        return []

    def sampled_tokens_by_instance(self) -> dict[str, int]:
        return {}

    def kept_tokens_by_instance(self) -> dict[str, int]:
        return {}

    def retire(self, worker: str) -> str:
        return f"{worker} leaves"

    def stop(self, reason: str) -> None:
        self.report.stop_reason = reason
        self._end.set_result(None)

    def fail(self, error: BaseException) -> None:
        self._end.set_exception(error)

    async def run(self) -> Any:
        async with asyncio.timeout(60.0):
            await self._end
        return self.report

    async def close(self) -> None:
        """Do nothing."""


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: Callable[[int, dict[str, Any]], str]) -> Any:
    """Run a driver whose reports get these replies, by number of the report."""
    num_reports = 0
    registry = JobRegistry()
    registry._scheduler = SimpleNamespace(tasks={})
    registry.jobs["job"] = Job("job", "job", str(tmp_path), 3, 0.0, retirements=["tcp://host:1"])

    async def ask(client: Any, verb: str, **arguments: Any) -> Any:
        nonlocal num_reports
        num_reports += 1
        return registry.dispatch(verb, **arguments) | {"stop": reply(num_reports, arguments)}

    async def report_lines() -> Any:
        driver: Any = DriverStub()
        reporter = Reporter("job", 3, tmp_path)
        reporter.on_line("first")
        reporter.add_earlier_steps([{"step": 0.0}])
        return await execution._run_driver(driver, reporter.report_until_done(driver, WORKERS), None)

    monkeypatch.setattr(job_registry, "ask", ask)
    return virtual_time.run(report_lines())


def test_a_lost_report_is_sent_again_and_a_later_cancel_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []
    steps: list[dict[str, float]] = []

    def reply(number: int, arguments: dict[str, Any]) -> str:
        if number <= 2:
            raise OSError("Timed out during handshake while connecting")
        received.extend(line.partition("  ")[2] for line in arguments["lines"])
        steps.extend(arguments["steps"])
        return "cancelled" if number == 4 else ""

    assert run(tmp_path, monkeypatch, reply).stop_reason == "cancelled"
    assert (received.count("first"), steps) == (1, [{"step": 0.0}])
    assert received.count("tcp://host:1 leaves") == 1


async def test_a_driver_that_was_told_to_stop_reports_until_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    async def ask(client: Any, verb: str, **arguments: Any) -> Any:
        lines.extend(line.partition("  ")[2] for line in arguments["lines"])
        return {"stop": "cancelled", "retire": [], "release": []}

    monkeypatch.setattr(job_registry, "ask", ask)
    driver: Any = DriverStub()
    sender = Reporter("job", 3, tmp_path)
    reports = asyncio.ensure_future(sender.report_until_done(driver, WORKERS))
    await driver.run()
    sender.on_line("the last step")
    await asyncio.wait({reports}, timeout=3 * reporter.REPORT_INTERVAL_S)
    assert not reports.done() and lines == ["the last step"]
    reports.cancel()


def test_an_error_of_the_reports_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(number: int, arguments: dict[str, Any]) -> str:
        raise ValueError("staleflow on the scheduler has no call")

    with pytest.raises(ValueError, match="has no call"):
        run(tmp_path, monkeypatch, reply)


@pytest.mark.parametrize("loss", [ActorLost("rollout-0 is gone"), NoFreeWorker("cluster: no free worker")])
async def test_a_job_that_lost_its_last_instance_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Exception
) -> None:
    """It then waits for a worker in the queue."""
    executions = 0

    async def execute(*_: Any, **__: Any) -> Any:
        nonlocal executions
        executions += 1
        if executions == 1:
            raise loss
        return SimpleNamespace(stop_reason="")

    async def find(*_: Any) -> dict[str, str]:
        return {"id": "job", "run_dir": str(tmp_path), "stop": ""}

    async def ask(*_: Any, **__: Any) -> str:
        return ""

    monkeypatch.setattr(execution, "execute", execute)
    monkeypatch.setattr(job_driver, "find_job", find)
    monkeypatch.setattr(job_registry, "ask", ask)
    config: Any = SimpleNamespace(run_dir=tmp_path, steps=3)
    submission, task = (
        job_driver.Submission(id="job", job_toml=""),
        execution.DriverTask(worker_address="", job_id="job"),
    )
    assert await job_driver._resume_to_end(config, submission, task, None) == ("done", "")
    assert executions == 2


def test_a_submitted_job_waits_for_the_bucket_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its driver starts, and while it prepares the folder."""
    (tmp_path / "store").mkdir()
    calls: list[str] = []

    def open_store(path: Path) -> Any:
        calls.append("open")
        if calls == ["open"]:
            raise StoreUnavailable("s3://bucket does not answer")
        return SimpleNamespace(summary=lambda: SimpleNamespace(num_steps=1, has_ended=False))

    async def execute(*_: Any, **__: Any) -> Any:
        calls.append("execute")
        if calls.count("execute") == 1:
            raise StoreUnavailable("s3://bucket does not answer")
        return SimpleNamespace(stop_reason="")

    async def find(*_: Any) -> dict[str, str]:
        return {"id": "job", "run_dir": str(tmp_path), "stop": ""}

    async def ask(*_: Any, **__: Any) -> str:
        return ""

    monkeypatch.setattr(VersionedStore, "open", open_store)
    monkeypatch.setattr(execution, "execute", execute)
    monkeypatch.setattr(job_driver, "find_job", find)
    monkeypatch.setattr(job_registry, "ask", ask)
    config: Any = SimpleNamespace(run_dir=tmp_path, steps=3, deadlines=SimpleNamespace(commit_s=60.0))
    submission = job_driver.Submission(id="job", job_toml="")
    task = execution.DriverTask(worker_address="", job_id="job")
    resuming = job_driver._resume_to_end(config, submission, task, None)
    assert virtual_time.run(resuming) == ("done", "")
    assert calls == ["open", "open", "execute", "open", "execute"]


# -- the record in the run folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", ["", "not json", '["a list"]'], ids=["an earlier job", "damaged", "not a record"])
def test_a_job_replaces_the_record_of_an_earlier_one(tmp_path: Path, earlier: str) -> None:
    job_record.write(tmp_path, "old", {"state": "failed", "why": "no memory", "last": {"step": 4}}, ["old line"])
    job_record.write(tmp_path, "old", {"submitted_at": 1.0}, [])
    assert job_record.read(tmp_path)["last"] == {"step": 4}
    if earlier:
        (tmp_path / run_folder.JOB_RECORD_FILE).write_text(earlier)
    job_record.write(tmp_path, "new", {"steps": 9}, ["new line"])
    record = job_record.read(tmp_path)
    assert (record["id"], record["state"], record["why"], record["last"]) == ("new", "waiting", "", {})
    assert (record["submitted_at"] > 1.0, record["steps"]) == (True, 9)
    assert job_record.read_log_lines(tmp_path)[1] == ["old line", "new line"]


def answer_all(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> list[dict[str, Any]]:
    """Answer all calls of the registry after these seconds, and return the list that collects their arguments."""
    calls: list[dict[str, Any]] = []

    async def ask(client: Any, verb: str, **arguments: Any) -> Any:
        await asyncio.sleep(seconds)
        calls.append({"verb": verb, **arguments})
        return {"stop": "", "retire": [], "release": []}

    monkeypatch.setattr(job_registry, "ask", ask)
    return calls


def test_the_record_of_a_job_without_news_is_written_regularly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_all(monkeypatch)

    async def report_twice() -> list[bool]:
        job_reporter = Reporter("job", 3, tmp_path)
        await job_reporter.report(None, "running", "")
        is_written = []
        for _ in range(2):
            (tmp_path / run_folder.JOB_RECORD_FILE).unlink(missing_ok=True)
            await asyncio.sleep(0.6 * reporter.RECORD_INTERVAL_S)
            await job_reporter.report(None, "running", "")
            is_written.append(job_record.has_record(tmp_path))
        return is_written

    assert virtual_time.run(report_twice()) == [False, True]


@pytest.mark.parametrize("cancel_s", [0.5, 2.5], ids=["while the record is written", "while the registry is asked"])
def test_a_cancelled_report_is_complete_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancel_s: float
) -> None:
    calls = answer_all(monkeypatch, 1.0)
    written: list[str] = []
    durations = iter((2.0, 0.1))

    async def to_thread(function: Any, *arguments: Any) -> None:
        """A thread goes on when the task that waits for it is cancelled."""
        duration = next(durations)
        asyncio.get_running_loop().call_later(duration, written.append, arguments[2]["state"])
        await asyncio.sleep(duration)

    async def cancel_one() -> None:
        job_reporter = Reporter("job", 3, tmp_path)
        job_reporter.on_line("first")
        first = asyncio.ensure_future(job_reporter.report(None, "running", ""))
        await asyncio.sleep(cancel_s)
        first.cancel()
        await job_reporter.report(None, "done", "")

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    virtual_time.run(cancel_one())
    assert written == ["running", "done"]
    assert [call["state"] for call in calls] == ["running", "done"]
    assert [len(call["lines"]) for call in calls] == [1, 0]


def test_a_followed_log_ends_when_no_process_uses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the record is that of an earlier job, which failed."""
    job_record.write(tmp_path, "old", {"state": "failed"}, ["old line"])

    async def collect() -> list[str]:
        return [line async for line in job_record.read_log(tmp_path, follow=True)]

    def no_lock(*_: object) -> None:
        raise AssertionError("a reader takes the lock")

    async def follow() -> list[str]:
        with run_folder.lock_folder(tmp_path):
            monkeypatch.setattr(fcntl, "flock", no_lock)
            reading = asyncio.ensure_future(collect())
            await asyncio.sleep(20.0)
            assert not reading.done()
            with (tmp_path / job_record.LOG_FILE).open("a") as file:
                file.write("half a ")
                file.flush()
                await asyncio.sleep(2.0)
                file.write("line, é\n")
        return await reading

    assert virtual_time.run(follow()) == ["old line", "half a line, é"]


def test_a_process_that_began_after_the_lock_file_does_not_use_the_folder(tmp_path: Path) -> None:
    with run_folder.lock_folder(tmp_path):
        assert run_folder.is_in_use(tmp_path)
        os.utime(tmp_path / run_folder.LOCK_FILE, (1.0, 1.0))
        assert not run_folder.is_in_use(tmp_path)


def test_a_job_of_another_machine_uses_its_folder_while_it_reports(tmp_path: Path) -> None:
    (tmp_path / run_folder.LOCK_FILE).write_text("process 1 on another-machine\n")
    assert run_folder.is_in_use(tmp_path)
    os.utime(tmp_path / run_folder.LOCK_FILE, (1.0, 1.0))
    assert not run_folder.is_in_use(tmp_path)
    job_record.write(tmp_path, "job", {}, [])
    assert run_folder.is_in_use(tmp_path)


@pytest.mark.parametrize("error", [None, ActorLost("rollout-0 is gone")])
async def test_a_submitted_job_writes_its_record_only_in_the_locked_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    job_record.write(tmp_path, "old", {"state": "failed"}, [])
    job = Job("job", "job", str(tmp_path), 3, 7.0).to_plain()
    seen: list[tuple[str, str, bool]] = []

    async def look(event: str, *_: Any, **__: Any) -> Any:
        seen.append((event, job_record.read(tmp_path)["state"], run_folder.is_in_use(tmp_path)))

    async def ask(client: Any, verb: str, **_: Any) -> bool:
        await look(verb)
        return True

    async def run_to_end(*_: Any) -> tuple[str, str]:
        await look("runs")
        if error is not None:
            raise error
        return "done", ""

    async def find(*_: Any) -> dict[str, Any]:
        return job

    @contextlib.asynccontextmanager
    async def open_client(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(id="client")

    config = SimpleNamespace(run_dir=tmp_path, deadlines=SimpleNamespace(start_s=1.0))
    monkeypatch.setattr(job_driver, "configure_for_cluster", lambda *_: config)
    monkeypatch.setattr(job_driver, "_run_to_end", run_to_end)
    monkeypatch.setattr(job_driver, "find_job", find)
    monkeypatch.setattr(job_registry, "ask", ask)
    monkeypatch.setattr(ClusterAddress, "open_client", open_client)
    task = execution.DriverTask(worker_address="", job_id="job")
    end = await job_driver._run_driver(job_driver.Submission(id="job", job_toml=""), task, "", is_alive=lambda: True)
    state = "failed" if error else "done"
    assert end == state
    assert seen == [
        ("begin", "failed", False),
        ("runs", "waiting", True),
        ("report", state, False),
        ("release_workers", state, False),
    ]
    assert job_record.read(tmp_path)["submitted_at"] == 7.0

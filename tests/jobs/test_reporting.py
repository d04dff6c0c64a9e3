"""Reports of a run to the registry on its scheduler, some of which are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.submitted_job import Job
from staleflow.pipeline.jobs import execution, job_driver
from staleflow.pipeline.jobs.reporter import Reporter
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.stores.errors import ActorLost
from tests.support import virtual_time

WORKERS: Any = SimpleNamespace(waiting={}, client=None, start_s=1.0)


class DriverStub:
    """A driver that runs until it is stopped or fails."""

    is_training = True

    def __init__(self) -> None:
        self.report = SimpleNamespace(stopped="")
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def decisions(self, count: int) -> list[Any]:
        return []

    def tokens_sampled(self) -> dict[str, int]:
        return {}

    def kept_tokens(self) -> dict[str, int]:
        return {}

    def retire(self, worker: str) -> str:
        return f"{worker} leaves"

    def stop(self, reason: str) -> None:
        self.report.stopped = reason
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

    assert run(tmp_path, monkeypatch, reply).stopped == "cancelled"
    assert (received.count("first"), steps) == (1, [{"step": 0.0}])
    assert received.count("tcp://host:1 leaves") == 1


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
        return SimpleNamespace(stopped="")

    async def find(*_: Any) -> dict[str, str]:
        return {"id": "job", "run_dir": str(tmp_path), "stop": ""}

    async def ask(*_: Any, **__: Any) -> str:
        return ""

    monkeypatch.setattr(execution, "execute", execute)
    monkeypatch.setattr(job_driver, "find", find)
    monkeypatch.setattr(job_registry, "ask", ask)
    config: Any = SimpleNamespace(run_dir=tmp_path, steps=3)
    submission, task = job_driver.Submission(id="job", job_toml=""), execution.DriverTask(worker="", job="job")
    assert await job_driver._resume_to_end(config, submission, task, None) == ("done", "")
    assert executions == 2

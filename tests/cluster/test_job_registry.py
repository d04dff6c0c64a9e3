"""The job registry: its replies to drivers and commands, and the drivers it starts on a real scheduler."""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Reschedule, get_worker

from staleflow.pipeline.cluster import driver_watch, job_queue, job_registry, worker_pool
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.driver_watch import DriverWatch
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.plugin import ensure_job_registry
from staleflow.pipeline.cluster.submitted_job import Job


def registry_calls() -> set[tuple[str, tuple[str, ...]]]:
    """Return all registry calls in the code: the verb, and the names of its arguments; "**" stands for others."""
    texts = [path.read_text() for top in ("pipeline", "cli") for path in Path(top).rglob("*.py")]
    trees = [ast.parse(text) for text in texts if re.search(r"\bask\b", text)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    verbs = {"ask": 1, "job_registry.ask": 1, "self._ask": 0, "self.client.sync": 2}
    found = [
        (call, call.args[verbs[name]])
        for call in calls
        if (name := ast.unparse(call.func)) in verbs and len(call.args) > verbs[name]
    ]
    return {
        (verb.value, tuple(sorted(keyword.arg or "**" for keyword in call.keywords)))
        for call, verb in found
        if isinstance(verb, ast.Constant) and isinstance(verb.value, str)
    }


@pytest.mark.parametrize(("verb", "arguments"), sorted(registry_calls()))
def test_the_registry_implements_every_call_of_its_clients(verb: str, arguments: tuple[str, ...]) -> None:
    """No type checker sees the names in these calls."""
    message = ""
    try:
        JobRegistry().dispatch(verb, **dict.fromkeys(name for name in arguments if name != "**"))
    except (TypeError, ValueError) as error:
        message = str(error)
    except (LookupError, AttributeError):  # of the values, which are None
        pass
    assert "unexpected keyword argument" not in message
    assert "has no call" not in message
    assert "**" in arguments or "required" not in message


def test_an_unknown_call_asks_for_the_same_version() -> None:
    assert {verb for verb, _ in registry_calls()} >= {"enqueue", "submit", "claim", "unavailable"}
    with pytest.raises(ValueError, match="has no call 'dance'; install the same version everywhere"):
        JobRegistry().dispatch("dance")


def test_a_call_fails_on_a_scheduler_without_a_registry() -> None:
    """A scheduler that was started again has none until a client connects, and Dask answers None there."""

    async def ask_for_jobs() -> None:
        async with (
            LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            with pytest.raises(OSError, match="has no job registry"):
                await job_registry.ask(client, "jobs")
            await ensure_job_registry(client)
            assert await job_registry.ask(client, "jobs") == ()

    asyncio.run(ask_for_jobs())


def test_an_end_message_for_an_unknown_job_is_ignored() -> None:
    """A driver that reconnects after a restart of the scheduler reports the end of a job that the new registry does not
    know."""
    registry = JobRegistry()
    registry.dispatch("release_workers", id="of-the-scheduler-before")
    assert registry.dispatch("jobs") == []


def test_steps_that_a_resume_undoes_are_not_kept() -> None:
    registry = JobRegistry()
    registry._scheduler = SimpleNamespace(tasks={})
    registry.jobs["job"] = job = Job("job", "job", "runs/job", 9, 0.0)
    report = {"id": "job", "state": "running", "why": "", "status": {}, "lines": []}
    registry.dispatch("report", **report, steps=[{"step": float(i), "reward": 0.0} for i in range(4)])
    registry.dispatch("report", **report, steps=[{"step": 0.0, "reward": 0.0}, {"step": 1.0, "reward": 1.0}])
    assert job.history == {0: {"step": 0.0, "reward": 0.0}, 1: {"step": 1.0, "reward": 1.0}}
    assert job.last_metrics["step"] == 1.0


def test_the_registry_keeps_the_latest_jobs_and_all_that_have_not_ended() -> None:
    registry = JobRegistry()
    ids = [f"job-{number}" for number in range(job_registry.MAX_JOBS + 10)]
    for id in ids:
        registry.submit(id, id, f"/runs/{id}", 1)
        if id != "job-0":
            registry.report(id, "done", "", status={}, steps=[], lines=[])
    assert list(registry.jobs) == ["job-0", *ids[11:]]


NEEDS = {"num_instances": 1, "num_reward_workers": 1, "has_driver_worker": True}


async def drive(id: str, seconds: float) -> str:
    """A driver that starts like a real one and runs for a while."""
    worker = get_worker()
    async with ClusterAddress(address=worker.scheduler.address).open_client() as client:
        if not await job_registry.ask(client, "begin", id=id, address=worker.address, driver_client=client.id):
            raise Reschedule
        report: dict[str, Any] = {"status": {}, "steps": [], "lines": []}
        await job_registry.ask(client, "report", id=id, state="running", why="", **report)
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        await job_registry.ask(client, "report", id=id, state="done", why="", **report)
        await job_registry.ask(client, "release_workers", id=id)
        return "done"


class Jobs:
    """A scheduler with workers in this process and submitted jobs."""

    def __init__(self, cluster: Any, client: Any) -> None:
        self.cluster, self.client = cluster, client

    @property
    def registry(self) -> JobRegistry:
        registry = self.cluster.scheduler.plugins["staleflow"]
        assert isinstance(registry, JobRegistry)
        return registry

    async def submit(
        self, id: str, seconds: float, driver: Callable[[str, float], Awaitable[str]] = drive, **limits: Any
    ) -> dict[str, Any]:
        limits = {"needs": NEEDS, "wait_limit_s": 0.0, "submitter": self.client.id, **limits}
        await job_registry.ask(self.client, "submit", id=id, name=id, run_dir=f"/runs/{id}", steps=1, **limits)
        sent = self.client.submit(
            driver, id, seconds, key=job_registry.TASK_KEY_PREFIX + id, pure=False, workers=[job_registry.NO_WORKER]
        )
        while not (job := await job_registry.ask(self.client, "check_arrival", id=id))["arrived"]:
            assert sent.status in ("pending", "finished")  # keep a reference, or Dask drops it
            await asyncio.sleep(0.02)
        return dict(job)

    async def of(self, id: str) -> dict[str, Any]:
        (job,) = [j for j in await job_registry.ask(self.client, "jobs") if j["id"] == id]
        return dict(job)

    async def until(self, id: str, state: str, within_s: float = 120.0) -> dict[str, Any]:
        async with asyncio.timeout(within_s):
            while (job := await self.of(id))["state"] != state:
                await asyncio.sleep(0.05)
        return job

    async def runs(self, id: str) -> str:
        """Return the state of a job's Dask task."""
        task = self.cluster.scheduler.tasks.get(job_registry.TASK_KEY_PREFIX + id)
        return "" if task is None else str(task.state)

    async def lines(self, id: str) -> list[str]:
        _, lines = await job_registry.ask(self.client, "lines", id=id, after=0)
        return [line.partition("  ")[2] for line in lines]


@contextlib.asynccontextmanager
async def jobs_on(workers: int) -> AsyncIterator[Jobs]:
    async with (
        LocalCluster(
            n_workers=workers, processes=False, threads_per_worker=2, asynchronous=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await ensure_job_registry(client)
        yield Jobs(cluster, client)


async def test_a_waiting_job_starts_when_the_job_before_it_has_ended() -> None:
    async with jobs_on(4) as jobs:
        await jobs.submit("one", 3.0)
        await jobs.until("one", "running")
        assert await jobs.lines("one") == ["has its 3 workers"], "it has not waited"
        task = jobs.cluster.scheduler.tasks[job_registry.TASK_KEY_PREFIX + "one"]
        task.suspicious = 2
        report: dict[str, Any] = {"state": "running", "why": "", "status": {}, "steps": [{"step": 0}], "lines": []}
        await job_registry.ask(jobs.client, "report", id="one", **report)
        assert task.suspicious == 0, "deaths of workers before a stored step do not count"
        clients = len(jobs.cluster.scheduler.clients)
        two = await jobs.submit("two", 0.1)
        assert two["state"] == "waiting"
        assert two["why"].endswith("free 1 of 4; next in line")
        for _ in range(20):
            assert await jobs.runs("two") == "no-worker"
            assert len(jobs.cluster.scheduler.clients) == clients
            assert await job_registry.ask(jobs.client, "workers_of", id="two") == {}
            await asyncio.sleep(0.05)
        await jobs.until("one", "done")
        await jobs.until("two", "done")
        assert await jobs.lines("two") == [f"waits: {two['why']}", "has its 3 workers"]
        assert not await job_registry.ask(jobs.client, "unavailable", id="")


async def test_a_job_larger_than_the_cluster_waits_for_workers() -> None:
    async with jobs_on(2) as jobs:
        one = await jobs.submit("one", 0.1)
        assert one["why"].endswith("the cluster has 2; starts once there are enough")
        jobs.cluster.scale(3)
        await jobs.until("one", "done")


async def test_a_job_waits_longer_than_no_workers_timeout() -> None:
    async with jobs_on(2) as jobs:
        scheduler = jobs.cluster.scheduler
        scheduler.no_workers_timeout = 2.5 * job_registry.ADMISSION_CHECK_S
        await jobs.submit("one", 0.1)
        other = jobs.client.submit(abs, -1, workers=[job_registry.NO_WORKER])
        while other.status != "error":  # it is not that Dask lets tasks wait
            scheduler._check_no_workers()
            assert (await jobs.of("one"))["state"] == "waiting"
            await asyncio.sleep(0.2)
        jobs.cluster.scale(3)
        await jobs.until("one", "done")


async def test_a_waiting_job_is_cancelled_at_once_or_after_wait_s() -> None:
    async with jobs_on(2) as jobs:
        await jobs.submit("one", 0.1)
        await jobs.submit("two", 0.1, wait_limit_s=0.5)
        assert await job_registry.ask(jobs.client, "stop", id="one", why="cancelled") == "waiting"
        one = await jobs.of("one")
        assert (one["state"], one["why"]) == ("stopped", "cancelled")
        two = await jobs.until("two", "failed")
        assert two["why"].startswith("waited 0.5 s for workers (deadlines.wait_s): needs 3 worker processes")
        assert (await jobs.runs("one"), await jobs.runs("two")) == ("", "")


async def test_a_job_whose_driver_dies_restarts_before_waiting_jobs() -> None:
    async with jobs_on(2) as jobs:
        await jobs.submit("one", 1.0)
        jobs.cluster.scale(3)
        await jobs.until("one", "running")
        await jobs.submit("two", 0.1)
        place = next(
            a for a, roles in (await job_registry.ask(jobs.client, "workers_of", id="one")).items() if "driver" in roles
        )
        (worker,) = [w for w in jobs.cluster.workers.values() if w.address == place]
        await worker.close()
        jobs.cluster.scale(7)
        await jobs.until("one", "waiting")
        await jobs.until("one", "done")
        assert [line.partition(":")[0] for line in await jobs.lines("one")] == ["waits", "has its 3 workers"] * 2
        await jobs.until("two", "done")


async def test_a_job_whose_driver_cannot_be_loaded_fails_and_frees_its_workers() -> None:
    """Its driver never begins, so that nothing else would report its end."""

    async def broken(id: str, seconds: float) -> str:
        raise ImportError("no module of this name")

    async with jobs_on(3) as jobs:
        await jobs.submit("one", 0.0, broken)
        assert "no module of this name" in (await jobs.until("one", "failed"))["why"]
        await jobs.submit("two", 0.1)
        await jobs.until("two", "done")


async def test_the_loss_of_a_workers_connection_frees_no_worker_while_the_driver_is_connected() -> None:
    """Its other workers still run its actors."""
    async with jobs_on(3) as jobs:
        await jobs.submit("one", 1.0)
        await jobs.until("one", "running")
        jobs.registry.remove_worker(jobs.cluster.scheduler, jobs.registry.jobs["one"].driver_worker)
        assert len(jobs.registry.job_queue.workers_of("one")) == 2
        assert jobs.registry.jobs["one"].state == "running"


async def test_a_driver_whose_lost_worker_is_not_replaced_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit its job waits without workers, so that the driver must leave its own."""
    monkeypatch.setattr(job_queue, "RESTART_LIMIT_S", 0.0)
    async with jobs_on(3) as jobs:
        await jobs.submit("one", 1.0)
        await jobs.until("one", "running")
        place = jobs.registry.jobs["one"].driver_worker
        lost = next(address for address in jobs.registry.job_queue.workers_of("one") if address != place)
        jobs.registry.remove_worker(jobs.cluster.scheduler, lost)
        assert jobs.registry.check_admission("one")["driver_worker"] == place, "the limit begins"
        await asyncio.sleep(0.01)
        admission = jobs.registry.check_admission("one")
        assert (admission["admitted"], admission["driver_worker"]) == (False, "")
        task = jobs.cluster.scheduler.tasks[job_registry.TASK_KEY_PREFIX + "one"]
        assert task.worker_restrictions == {job_registry.NO_WORKER}


async def test_no_job_waits_for_the_gpus_of_a_worker_without_staleflow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __reduce__(self) -> str:
            raise ImportError("no module named staleflow")

    monkeypatch.setattr(job_registry, "report_gpus", Missing())
    monkeypatch.setattr(worker_pool, "REPORT_LIMIT_S", 1e6)
    async with jobs_on(1) as jobs, asyncio.timeout(60):
        while jobs.registry.job_queue.awaits_gpu_reports(time.monotonic()):
            await asyncio.sleep(0.01)


class Closing:
    """An actor that writes a file when its process ends in order."""

    def __init__(self, note: str) -> None:
        atexit.register(Path(note).touch)


def test_workers_of_a_dead_driver_are_killed_and_restarted(tmp_path: Path) -> None:
    """Work in progress there, such as a step or a commit, is not finished."""

    async def script() -> None:
        async with (
            LocalCluster(n_workers=2, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await ensure_job_registry(client)
            before, _ = await client.run(os.getpid)
            async with Client(cluster, asynchronous=True, set_as_default=False) as theirs:
                await job_registry.ask(
                    theirs, "submit", id="run", name="run", run_dir="/runs/x", steps=1, submitter=theirs.id
                )
                needs = {"num_instances": 0, "num_reward_workers": 1, "has_driver_worker": False}
                await job_registry.ask(
                    theirs, "enqueue", id="run", needs=needs, wait_limit_s=0.0, driver_client=theirs.id
                )
                assert await theirs.submit(Closing, str(tmp_path / "closed"), actor=True, workers=[before])
                assert len(await job_registry.ask(client, "workers_of", id="run")) == 2
            async with asyncio.timeout(180.0):
                while len(now := await client.run(os.getpid, on_error="ignore")) < 2 or before in now:
                    await asyncio.sleep(0.05)
            assert not (tmp_path / "closed").exists()

    asyncio.run(script())


async def test_a_run_whose_process_is_gone_has_failed_and_frees_its_workers() -> None:
    """Such a run is driven by its own process and has no task."""
    async with jobs_on(3) as jobs:
        async with Client(jobs.client.scheduler.address, asynchronous=True, set_as_default=False) as theirs:
            for id in ("run", "waits"):
                await job_registry.ask(theirs, "submit", id=id, name=id, steps=1, run_dir=f"/runs/{id}")
                await job_registry.ask(theirs, "enqueue", id=id, needs=NEEDS, wait_limit_s=0.0, driver_client=theirs.id)
            assert (await job_registry.ask(theirs, "check_admission", id="run"))["admitted"]
            assert not (await job_registry.ask(theirs, "check_admission", id="waits"))["admitted"]
            received = {"name": "told", "steps": 1, "run_dir": "/runs/told", "submitter": theirs.id}
            await job_registry.ask(theirs, "submit", id="told", **received)  # and nothing more
        for id in ("run", "waits", "told"):
            assert (await jobs.until(id, "failed"))["why"] == "the process of its driver is gone"
        async with asyncio.timeout(60):
            while await job_registry.ask(jobs.client, "unavailable", id=""):
                await asyncio.sleep(0.05)


def silent_jobs(**changes: Any) -> list[str]:
    """Return the jobs whose drivers are silent at second 1,000, for one that was last heard of at second 900."""
    at: dict[str, Any] = {"heard": 900.0, "awake_since_s": 0.0, "nanny": "tcp://nanny", "state": "running", **changes}
    job = Job(
        "a", "a", "/runs/a", 1, 0.0, state=at["state"], client_id=at.get("client", "c"),
        driver_worker=at.get("driver_worker", "w"), reported_at=at.get("admitted", 0.0),
    )  # fmt: skip
    clients = {str(number): SimpleNamespace(last_seen=1000.0) for number in range(at.get("other_clients", 0))}
    clients["c"] = SimpleNamespace(last_seen=at["heard"])
    workers = {"w": SimpleNamespace(nanny=at["nanny"])}
    scheduler = SimpleNamespace(clients=clients, workers=workers)
    watch = DriverWatch(scheduler, {"a": job}, on_silent=lambda job, silence_limit_s: None)
    watch.jobs_with_silent_driver(1000.0 - at.get("left_before_s", 0.0), at["awake_since_s"])
    for number in range(at.get("num_left", 0)):
        del clients[str(number)]
    return [job.id for job, _ in watch.jobs_with_silent_driver(1000.0, at["awake_since_s"])]


def test_a_driver_without_contact_for_the_lease_is_lost() -> None:
    assert silent_jobs() == ["a"]
    assert silent_jobs(heard=1000.0 - driver_watch.MIN_SILENCE_LIMIT_S) == []
    assert silent_jobs(other_clients=999) == [], "among so many clients each sends a heartbeat a minute"
    assert silent_jobs(other_clients=999, heard=800.0) == ["a"]
    assert silent_jobs(other_clients=999, num_left=999, left_before_s=600.0) == [], "it keeps that interval"
    assert silent_jobs(other_clients=999, num_left=999, left_before_s=1000.0) == ["a"]
    with dask.config.set({"distributed.client.heartbeat": "2 minutes"}):
        assert silent_jobs() == []
    assert silent_jobs(awake_since_s=950.0) == [], "the scheduler itself was stopped"
    assert silent_jobs(nanny=None) == [], "without a nanny there might be two drivers"
    assert silent_jobs(state="done") == []
    assert silent_jobs(driver_worker="") == [], "a command in the foreground, which a person may have stopped"


def test_a_driver_that_has_not_begun_long_after_its_admission_is_lost() -> None:
    """It hangs before the scheduler knows its client, which sends heartbeats."""
    not_begun = {"state": "waiting", "client": ""}
    assert silent_jobs(**not_begun, admitted=999.0 - driver_watch.FIRST_REQUEST_S) == ["a"]
    assert silent_jobs(**not_begun, admitted=1000.0 - driver_watch.FIRST_REQUEST_S) == []
    assert silent_jobs(**not_begun, admitted=100.0, awake_since_s=950.0) == []
    assert silent_jobs(**not_begun, admitted=100.0, driver_worker="") == [], "it waits for workers"


class Clock:
    """Seconds of a clock that advances by a little with each call, and once by `jump_s`."""

    def __init__(self, jump_s: float = 0.0) -> None:
        self.num_calls = 0
        self._jump_s = jump_s

    def time(self) -> float:
        self.num_calls += 1
        return 1000.0 + 1e-6 * self.num_calls + (self._jump_s if self.num_calls > 3 else 0.0)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[list[str]]]:
    """Run a watch for a hundred checks; returns the jobs whose drivers it reported as lost."""
    monkeypatch.setattr(driver_watch, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(driver_watch, "MISSED_HEARTBEATS", 0)

    async def watch(clock: Clock, silence_limit_s: float) -> list[str]:
        monkeypatch.setattr(driver_watch, "time", clock)
        monkeypatch.setattr(driver_watch, "MIN_SILENCE_LIMIT_S", silence_limit_s)
        clients, workers = {"c": SimpleNamespace(last_seen=1000.0)}, {"w": SimpleNamespace(nanny="tcp://nanny")}
        job = Job("a", "a", "/runs/a", 1, 0.0, state="running", client_id="c", driver_worker="w")
        silent: list[str] = []
        scheduler = SimpleNamespace(clients=clients, workers=workers)
        running = asyncio.ensure_future(DriverWatch(scheduler, {"a": job}, lambda job, _: silent.append(job.id)).run())
        async with asyncio.timeout(60):
            while clock.num_calls < 100 and not running.done():
                await asyncio.sleep(0.001)
        assert running.cancel()
        return silent

    return watch


async def test_a_silent_driver_is_restarted_once_in_a_lease(watching: Callable[..., Awaitable[list[str]]]) -> None:
    """Its restart takes longer than the time between two checks. It is repeated, since it may have failed."""
    assert await watching(Clock(), 6e-5) == ["a"]
    assert len(await watching(Clock(), 1e-5)) > 1


async def test_the_drivers_of_a_stopped_scheduler_are_not_silent(
    watching: Callable[..., Awaitable[list[str]]],
) -> None:
    assert await watching(Clock(jump_s=100.0), 60.0) == []

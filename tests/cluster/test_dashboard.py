"""The staleflow page of the Dask dashboard: routes, metrics, and display in a real browser."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from staleflow.cli.cluster_jobs import _detail_lines
from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.dashboard import default_job, headline
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.plugin import ensure_job_registry
from staleflow.pipeline.config import loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.mixture import count_by_source
from staleflow.pipeline.processes.dask_workers import connect
from staleflow.stores.metrics import STEP_METRICS
from staleflow.stores.trajectories.records import SourceState
from tests.support.browser import in_browser, open_page
from tests.support.stored_runs import Response, StoredRun

STATUS: dict[str, Any] = {
    "version": 3, "num_queued": 4, "num_running": 6, "num_scoring": 1, "num_started": 96,
    "doing": "training", "losses": [],
    "staleness_in_flight": 0.5, "staleness_in_queue": 1.0, "ended": {"consumed": 48, "filtered:no_signal": 8},
    "buffers": [
        {"step": 3, "occupied": {"2": 2, "3": 1}, "reserved": {"3": 1}, "capacity": 6},
        {"step": 4, "occupied": {}, "reserved": {"3": 2}, "capacity": 6},
    ],
    "instances": [
        {"instance": "rollout-0", "version": 2, "pulling": True, "num_running": 6, "max_running": 8, "kv_tokens": 100,
         "kv_capacity": 400},
    ],
    "num_in_environment": 80, "environments": [{"host": "environment-0", "num_in_environment": 80, "slots": 64}],
    "decisions": [[12.5, 17, "routed to rollout-0 at version 3", "Tick#9"]], "tokens_sampled": {"rollout-0": 900},
}  # fmt: skip
STEP = {
    "step": 2.0, "reward": 0.625, "staleness_mean": 0.5, "staleness_max": 1.0, "response_tokens": 400.0, "wait_s": 1.0, 
    "tokens_per_s": 200.0,
    "train_s": 1.0, "publish_s": 0.0, "response_mean": 20.0, "response_max": 31.0, "staleness_in_flight": 0.5,
    "staleness_in_queue": 1.0,
}  # fmt: skip


def start_dashboard(config: RunConfig) -> tuple[str, set[int]]:
    """Return the dashboard address of a job's local cluster, and the ports that its scheduler process opens, except the
    scheduler port."""

    async def scenario() -> tuple[str, set[int]]:
        before = listening()
        cluster = await connect(config)
        assert cluster.local is not None
        try:
            own = int(cluster.client.scheduler.address.rpartition(":")[2])
            nannies = {int(n.address.rpartition(":")[2]) for n in cluster.local.workers.values()}
            return cluster.dashboard, listening() - before - nannies - {own}
        finally:
            await cluster.close()

    return asyncio.run(scenario())


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_without_a_dashboard_no_port_is_opened() -> None:
    tree = {"reward": {"workers": 1}, "rollout": {"engine": {"name": "emulated"}}}
    link, ports = start_dashboard(loading.from_tree({**tree, "cluster": {"dashboard": False}}))
    assert (link, ports) == ("", set())
    link, ports = start_dashboard(loading.from_tree(tree))
    assert link.endswith("/staleflow")
    assert ports == {urllib.parse.urlsplit(link).port}


def with_two_jobs(look: Callable[[Any, str], Coroutine[Any, Any, None]]) -> None:
    """Run `look` with the address of a scheduler whose registry has two jobs."""

    async def scenario() -> None:
        async with (
            LocalCluster(n_workers=0, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await ensure_job_registry(client)
            await ensure_job_registry(client)  # the second one finds it there
            for id in ("one", "two<b>"):
                await job_registry.ask(client, "submit", id=id, name=id, run_dir=f"/runs/{id}", steps=9)
            await report_jobs(client, "one", STEP)
            await look(client, str(client.dashboard_link).removesuffix("status"))

    asyncio.run(scenario())


async def report_jobs(client: Any, id: str, step: dict[str, float]) -> None:
    await job_registry.ask(
        client, "report", id=id, state="running", why="", status=STATUS, steps=[step], lines=["a line"]
    )


async def get(url: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


def test_routes_and_metrics_show_reported_jobs() -> None:
    async def look(client: Any, address: str) -> None:
        jobs = json.loads(await get(f"{address}staleflow/jobs.json"))
        assert [(j["id"], j["state"], j["status"].get("version")) for j in jobs] == [
            ("one", "running", 3), ("two<b>", "waiting", None),
        ]  # fmt: skip
        parsed = json.loads(await get(f"{address}staleflow/job/one.json"))
        assert [s["reward"] for s in parsed["steps"]] == [0.625]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await get(f"{address}staleflow/job/none.json")
        metrics = await get(f"{address}metrics")
        assert 'staleflow_reward{job="one"} 0.625' in metrics
        assert 'staleflow_tokens_per_second{job="one"} 200.0' in metrics
        assert 'staleflow_step{job="one"} 1.0' in metrics
        assert 'staleflow_staleness_in_flight{job="one"} 0.5' in metrics
        assert 'staleflow_trajectories_queued{job="one"} 4.0' in metrics
        assert 'staleflow_trajectories_in_environment{job="one"} 80.0' in metrics
        assert 'staleflow_trajectories_started_total{job="one"} 96.0' in metrics
        assert "# TYPE staleflow_trajectories_started_total counter" in metrics
        assert "# HELP staleflow_staleness_max largest step - v_traj of the batch; at most eta, versions" in metrics
        assert "Staleflow" in await get(f"{address}status")  # the tab, on every page of the dashboard
        assert await job_registry.ask(client, "lines", id="one", after=0) == (1, ("a line",))

    with_two_jobs(look)


def test_a_job_links_to_its_run_page(tmp_path: Path) -> None:
    run = StoredRun(tmp_path)
    run.train([("one plus one", [Response("two", 1.0), Response("three", 0.0)])])

    async def look(client: Any, address: str) -> None:
        await job_registry.ask(client, "submit", id="here", name="here", run_dir=str(run.run_dir), steps=9)
        first, second = [
            json.loads(await get(await landing(f"{address}staleflow/run/here") + "api/overview")) for _ in "12"
        ]
        assert (first["name"], first["num_steps"]) == ("page", 1)
        assert first == second
        pages = {c.pid for c in psutil.Process().children() if "view" in c.cmdline()}
        assert len(pages) == 1, "it is started once"
        for name, said in (("one", "404"), ("none", "404")):
            with pytest.raises(urllib.error.HTTPError, match=said):
                await get(f"{address}staleflow/run/{name}")
        elsewhere = urllib.request.Request(f"{address}staleflow/run/here", headers={"Host": "scheduler:8787"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            await asyncio.to_thread(urllib.request.urlopen, elsewhere)
        assert f"staleflow view {run.run_dir}" in refused.value.read().decode()
        (page,) = pages
        results.append(psutil.Process(page))

    results: list[psutil.Process] = []
    with_two_jobs(look)
    results[0].wait(60)  # it ends with the scheduler


async def landing(url: str) -> str:
    """Return the final address after redirects."""

    def follow() -> str:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.url)

    return await asyncio.to_thread(follow)


def test_job_details_show_the_queue_of_each_environment_host() -> None:
    lines = _detail_lines({"run_dir": "/runs/one", "last": {}, "status": STATUS, "stop": "", "state": "running"})
    assert any("6 sampling, 80 in environment, 1 scoring" in line for line in lines)
    assert "environment-0  80 in environment, 64 slots" in lines


def test_job_details_show_the_share_of_each_task() -> None:
    states = [SourceState(num_drawn=9, num_trained=6), SourceState(num_drawn=11, num_trained=2, num_useless=64)]
    line = "task sums: 25.0% of the trained groups (ratio 50.0%), 55.0% of the drawn; 2 trained, 0 filtered, 0 aborted"
    status = STATUS | {"sources": [view.line for view in count_by_source({"letters": 1, "sums": 1}, states)]}
    lines = _detail_lines({"run_dir": "/runs/one", "last": {}, "status": status, "stop": "", "state": "running"})
    assert f"{line}, failing" in lines


@in_browser
def test_a_browser_shows_live_data() -> None:
    async def look(client: Any, address: str) -> None:
        async with open_page(viewport={"width": 1400, "height": 1000}) as page:
            await page.goto(f"{address}staleflow?job=one")
            await page.get_by_text("reward 0.625").wait_for()
            await page.get_by_text("routed to rollout-0 at version 3").wait_for()
            await page.get_by_text("80 wait for their environment").wait_for()
            await report_jobs(client, "one", STEP | {"step": 3.0, "reward": 0.75})
            await page.get_by_text("reward 0.750").wait_for()
            await page.get_by_text("two<b>").click()  # the other job's page
            await page.get_by_text("no worker has taken its driver yet").wait_for()

    with_two_jobs(look)


# -- which job the page shows --------------------------------------------------------------------------------------


def registry_of(*states: str) -> JobRegistry:
    """Return a registry with one job per state, oldest first."""
    registry = JobRegistry()
    for i, state in enumerate(states):
        registry.submit(f"job-{i}", "job", f"/runs/job-{i}", 9)
        registry.jobs[f"job-{i}"].state = state
        if state in ("running", "done"):
            registry.jobs[f"job-{i}"].history[0] = {"step": 0.0}
    return registry


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (("running", "waiting"), "job-0"),
        (("running", "running", "done"), "job-1"),
        (("done", "done", "waiting"), "job-1"),
        (("waiting", "waiting"), "job-1"),
    ],
)
def test_the_page_opens_on_the_newest_running_or_trained_job(states: tuple[str, ...], chosen: str) -> None:
    job = default_job(list(registry_of(*states).jobs.values()))
    assert job is not None and job.id == chosen
    assert default_job([]) is None


def test_the_selected_job_is_marked() -> None:
    jobs = list(registry_of("done", "running").jobs.values())
    jobs[1].history[0] |= dict.fromkeys(STEP_METRICS, 1.0)
    head = headline(jobs[1], jobs)
    marked = [part for part in head.split("<a ") if "aria-current" in part]
    assert len(marked) == 1 and "job-1" in marked[0]

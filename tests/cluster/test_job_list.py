"""The commands that list a cluster's jobs and pick one of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Scheduler

from staleflow.pipeline.cluster.job_lookup import find_matching, find_unambiguous, recent_jobs
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.plugin import JobRegistryPlugin
from staleflow.stores.errors import ConfigError
from tests.commands import command


def job(id: str, name: str, state: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "name": name, "state": state, "reported_at": 0.0, **more}


JOBS = [
    job("far-aa", "far", "done"),
    job("far-bb", "far", "failed"),
    job("one-cc", "one", "running"),
    job("one-dd", "one", "done"),
    job("one-more-ee", "one-more", "waiting"),
    job("two-ff", "two", "running"),
    job("two-gg", "two", "waiting"),
]


@pytest.mark.parametrize(
    ("word", "id", "note"),
    [
        ("far-aa", "far-aa", ""),
        ("far-b", "far-bb", ""),
        ("far", "far-bb", "2 jobs match far; far-bb is the newest"),
        ("one", "one-cc", "2 jobs match one; one-cc is the one that has not ended"),
        ("one-m", "one-more-ee", ""),
        ("two", "two-gg", "2 jobs match two; two-gg is the newest that has not ended"),
    ],
)
def test_of_several_matching_jobs_the_live_or_newest_is_chosen(word: str, id: str, note: str) -> None:
    result = find_matching(JOBS, word)
    assert (result.job["id"], result.note) == (id, note)


def test_destructive_commands_need_an_unambiguous_job() -> None:
    assert find_unambiguous(JOBS, "one")["id"] == "one-cc"
    assert find_unambiguous(JOBS, "far")["id"] == "far-bb"
    with pytest.raises(ConfigError, match="'two': 2 jobs have not ended: two-ff, two-gg; name one by its id"):
        find_unambiguous(JOBS, "two")
    for word in ("", "three"):
        with pytest.raises(ConfigError, match="is not a job of this cluster"):
            find_unambiguous(JOBS, word)


def test_ended_jobs_are_listed_for_a_day() -> None:
    ended, live = job("a-1", "a", "done", reported_at=1000.0), job("b-1", "b", "running", reported_at=1.0)
    assert recent_jobs([ended, live], 1000.0 + 24 * 3600 - 1) == [ended, live]
    assert recent_jobs([ended, live], 1000.0 + 24 * 3600 + 1) == [live]


@pytest.fixture
def registry() -> Iterator[tuple[JobRegistry, str]]:
    """A scheduler's registry in a thread; yields the registry and the address."""
    plugin, address, over = JobRegistryPlugin(), "", asyncio.Event()
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal address
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            await scheduler.register_scheduler_plugin(plugin, idempotent=True)
            address = scheduler.address
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(20)
    yield plugin, address
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_every_command_prints_json(registry: tuple[JobRegistry, str]) -> None:
    jobs, address = registry
    report: dict[str, Any] = {"status": {}, "steps": []}
    for id in ("one-aa", "one-bb", "old-cc"):
        jobs.submit(id, id[:3], f"/runs/{id}", 3)
    jobs.report("one-aa", "running", "", lines=["10:00:00  step 0/3  reward 1"], **report)
    for id in ("one-bb", "old-cc"):
        jobs.report(id, "done", "", lines=["10:00:01  a line"], **report)
    jobs.jobs["old-cc"].reported_at = time.time() - 25 * 3600

    def answer(*arguments: str) -> Any:
        result = command(*arguments, "--scheduler", address)
        assert result.returncode == 0, result.stderr
        return result

    shown = answer("jobs")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["one-aa", "one-bb"]
    assert shown.stderr == "1 ended more than a day ago; --all lists them too\n"
    assert [j["id"] for j in json.loads(answer("jobs", "--json").stdout)] == ["one-aa", "one-bb"]
    assert len(json.loads(answer("jobs", "--all", "--json").stdout)) == 3
    logged = answer("logs", "one", "--json")
    assert json.loads(logged.stdout) == {"id": "one-aa", "time": "10:00:00", "text": "step 0/3  reward 1"}
    assert logged.stderr == "2 jobs match one; one-aa is the one that has not ended\n"
    assert json.loads(answer("status", "one-b", "--json").stdout)["state"] == "done"
    cancelled = json.loads(answer("cancel", "one", "--json").stdout)
    assert (cancelled["id"], cancelled["stop"], cancelled["state_before"]) == ("one-aa", "cancelled", "running")
    jobs.request_stop("one-aa", "the cluster is shut down")
    reply = jobs.report("one-aa", "running", "", lines=[], **report)
    assert reply["stop"] == "cancelled", "the first reason is the job's"


def test_a_running_job_is_asked_once_to_release_a_worker(registry: tuple[JobRegistry, str]) -> None:
    jobs, address = registry
    report: dict[str, Any] = {"why": "", "lines": [], "status": {}, "steps": []}
    for id, initial_state in (("one-aa", "running"), ("two-bb", "waiting"), ("old-cc", "done")):
        jobs.submit(id, id[:3], f"/runs/{id}", 3)
        jobs.report(id, initial_state, **report)

    def retired(id: str, *received: str) -> object:
        return jobs.report(id, jobs.jobs[id].state, **report, retired=received)["retire"]

    result = command("retire", "one", "tcp://host:1234", "--scheduler", address)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "one-aa gives up tcp://host:1234; `staleflow logs one-aa -f` says when it has left\n"
    assert retired("one-aa") == ["tcp://host:1234"]
    assert retired("one-aa") == ["tcp://host:1234"], "the first reply was lost"
    assert retired("one-aa", "tcp://host:1234") == []
    assert retired("one-aa") == []
    for id, state in (("old-cc", "done"), ("two-bb", "waiting")):
        refused = command("retire", id, "tcp://host:1234", "--scheduler", address)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{id} is {state}: only a running job can release a worker" in refused.stderr
        assert retired(id) == [], "else it would release a worker as soon as it runs"

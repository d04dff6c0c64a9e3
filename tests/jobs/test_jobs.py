"""Jobs on a manually started cluster: scheduler, workers and commands in separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.jobs import starts
from staleflow.stores.trajectory import Fate
from tests.commands import command
from tests.runtime.test_run import ENVIRONMENT, check
from tests.support import forking

PATIENCE_S = 150.0


class Cluster:
    """A scheduler and workers as started by `dask scheduler` and `dask worker`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "scheduler.json"
        self._started: list[subprocess.Popen[bytes]] = []
        self._dask("scheduler", "--port", "0")

    def _dask(self, what: str, *options: str, within: Sequence[str] = ()) -> None:
        dask = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self.file), "--no-dashboard", *options]
        start = subprocess.Popen if within else forking.Popen  # another command cannot be forked
        command = [*within, *dask]
        self._started.append(start(command, env=ENVIRONMENT, cwd=self._folder, start_new_session=True))

    def add(self, count: int, *options: str, within: Sequence[str] = ()) -> None:
        """Start workers. within: a command that starts them."""
        for _ in range(count):
            self._dask("worker", "--nthreads", "1", "--local-directory", str(self._folder), *options, within=within)

    def __call__(self, verb: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return command(verb, *arguments, "--scheduler-file", self.file)

    def job(self, id: str) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self("status", id, "--json").stdout)
        return parsed

    def until(self, id: str, *states: str, steps: int = 0) -> dict[str, Any]:
        """Wait until a job is in one of the states and has done this many steps."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            job = self.job(id)
            done = int(job["last"]["step"]) + 1 if job["last"] else 0
            if job["state"] in states and done >= steps:
                return job
            assert job["state"] not in ("failed", "done", "stopped"), job
            assert time.monotonic() < deadline, job
            time.sleep(0.5)

    def close(self) -> None:
        scheduler, *workers = self._started
        for group in (workers, [scheduler]):
            for process in group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in group:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@contextlib.contextmanager
def manual_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster in a folder, without workers."""
    one = Cluster(folder)
    deadline = time.monotonic() + PATIENCE_S
    while not one.file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield one
    one.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with manual_cluster(tmp_path) as cluster:
        yield cluster


def actor_processes(cluster: Cluster) -> dict[str, int]:
    """Return the process of each task and actor, by key."""

    def places(dask_scheduler: Any) -> dict[str, str]:  # in here, so that it travels by value
        results = {}
        for key, task in dask_scheduler.tasks.items():
            worker = task.processing_on or next(iter(task.who_has or ()), None)
            if worker is not None:
                results[str(key)] = worker.address
        return results

    async def ask() -> dict[str, int]:
        async with ClusterAddress(scheduler_file=str(cluster.file)).open_client() as client:
            tasks = await client.run_on_scheduler(places)
            pids = await client.run(os.getpid)
            return {name: pids[address] for name, address in tasks.items()}

    return asyncio.run(ask())


DRY = """
name = "dry"
runs_dir = "{runs}"
seed = 2

[batch]
groups_per_step = 4
group_size = 4

[rollout]
max_new_tokens = 200

[rollout.engine]
name = "emulated"

[workload]
median = 60
prompt_tokens = 20

[simulation]
train_s = 0.2
pull_s = 0.02
"""


@pytest.fixture
def dry_job(tmp_path: Path) -> Path:
    """A job file that needs no model."""
    path = tmp_path / "dry.toml"
    path.write_text(DRY.format(runs=tmp_path / "runs"))
    return path


def test_a_job_survives_its_submitter_and_the_worker_of_its_driver(job: Path, cluster: Cluster, tmp_path: Path) -> None:
    """It is submitted by one process and watched by others. The worker of the driver, which also has the trajectory
    server, is killed; the job continues and passes the audit."""
    cluster.add(3)
    (tmp_path / "mine.py").write_text(
        "def reward(answer, record):\n    return float(len(answer) % 2)\n\n"
        "class Sums:\n    def __init__(self, options, seed):\n        pass\n"
        "    def record(self, index, held_out):\n        return {'prompt': f'{index % 9}+1='}\n"
        "    def score(self, answer, record):\n        return 0.0\n"
    )
    relative = os.path.relpath(tmp_path / "runs")  # the workers were started in another folder
    submitted = cluster(
        "submit", job, "--set", "steps=20", "--set", f"reward.function={tmp_path}/mine.py:reward", "--name", "far",
        "--set", f"runs_dir={relative}",
        "--set", "task.eval_prompts=0", "--set", "deadlines.call_s=20", "--set", f"task.source={tmp_path}/mine.py:Sums",
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    id = submitted.stdout.strip()
    (tmp_path / "mine.py").unlink()  # it has travelled
    cluster.until(id, "running", steps=3)
    assert "running" in cluster("jobs").stdout
    shown = cluster("status", id).stdout
    assert "rollout-0" in shown
    assert "tokens/s" in shown

    far = tmp_path / "runs" / "far"
    export = (
        "store",
        "export",
        far,
        "--to",
        "jsonl",
        "--out",
        tmp_path / "far.jsonl",
        "--scheduler-file",
        cluster.file,
    )
    refused = command(*export)
    assert refused.returncode == 2, refused
    assert "none of its 3 workers is free, jobs have 3" in refused.stderr, cluster("logs", id).stdout

    (engine,) = (pid for key, pid in actor_processes(cluster).items() if "-far-rollout-0-" in key)
    os.kill(actor_processes(cluster)[f"staleflow-job-{id}"], signal.SIGKILL)
    job_end = cluster.until(id, "done")
    assert job_end["why"] == ""
    store = check(far, 20)
    summary = json.loads((far / "summary.json").read_text())
    assert [start.end for start in starts.read_start_records(far)] == ["", "done"], cluster("logs", id).stdout
    assert summary["commands"]["Train"] >= 20 - 1, "those before the driver's death, too, but for what it had not noted"
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 20 * 16
    exported = command(*export)  # there is room now
    assert exported.returncode == 0, exported.stderr
    assert len((tmp_path / "far.jsonl").read_text().splitlines()) == len(list(store.trajectories()))
    log = cluster("logs", id)
    assert "resuming from version" in log.stdout
    assert "rollout-0 continues with an engine that is already loaded" in log.stdout
    assert Path(f"/proc/{engine}").exists(), f"its process was restarted:\n{log.stdout}"
    assert "step 19/20" in log.stdout
    followed = cluster("logs", id[:-2], "-f")  # the beginning of an id will do, and it has ended
    assert followed.stdout == log.stdout


def test_the_log_and_record_of_a_job_are_in_its_folder(dry_job: Path, cluster: Cluster, tmp_path: Path) -> None:
    cluster.add(3)
    id = cluster("submit", dry_job, "--set", "steps=1000").stdout.strip()
    before = cluster.until(id, "running", steps=2)
    folder = tmp_path / "runs" / before["name"]
    os.killpg(cluster._started[0].pid, signal.SIGKILL)
    for process in cluster._started:  # workers do not outlive their scheduler
        process.wait(PATIENCE_S)

    shown = command("status", folder, "--json")
    assert shown.returncode == 0, shown.stderr
    after = json.loads(shown.stdout)
    assert (after["id"], after["state"], after["steps"]) == (id, "running", 1000)
    assert after["last"]["step"] >= before["last"]["step"]
    assert "instances" in after["status"]  # there are none in it if the driver has noticed their loss
    assert f"step {int(after['last']['step']) + 1}/1000" in command("status", folder).stdout
    logged = command("logs", folder, "-f")
    assert logged.returncode == 0, logged.stderr
    assert "  step 0/1000" in logged.stdout
    assert command("logs", folder, "--json").stdout.count("\n") == logged.stdout.count("\n")


def test_an_unknown_job_gives_a_one_line_error(cluster: Cluster) -> None:
    for verb in ("status", "logs", "cancel"):
        answer = cluster(verb, "no-such-job")
        assert (answer.returncode, answer.stdout) == (2, "")
        assert (
            answer.stderr
            == "staleflow: 'no-such-job' is not a job of this cluster; `staleflow jobs --all` lists them; for a job of "
            "an earlier scheduler name its run's folder, as in `staleflow status runs/NAME`\n"
        )
    assert "no jobs" in cluster("jobs").stdout

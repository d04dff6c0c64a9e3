"""Whole runs on a real Dask cluster with real actors, engine, store and faults, and errors for invalid input."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.cli.main import main
from staleflow.pipeline.config import loading
from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.journal import list_start_files
from staleflow.pipeline.jobs.execution import RunEnd, execute
from staleflow.pipeline.processes.dask_workers import DaskWorkers, connect
from staleflow.pipeline.recovery.run_folder import prepare_run_dir
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.auditing.audit import audit
from staleflow.stores.errors import RunStuck, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from staleflow.tasks.sources import reward_process
from tests.commands import command, error_line
from tests.support import forking

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(job: Path, *overrides: str) -> RunEnd:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(forking.ADDRESS, forking.served())
        patch.setattr(reward_process, "subprocess", forking.SUBPROCESS)
        return asyncio.run(execute(loading.load(job, overrides), RunListener()))


def check(folder: Path, steps: int) -> VersionedStore:
    """Audit the store, and replay the journal."""
    store = VersionedStore.open(folder / "store")
    result = audit(store)
    assert result.findings == ()
    assert result.num_steps == steps
    num_commands = 0
    for config, events in list_start_files(folder):
        coordinator = make_coordinator(loading.load(config), validate_every_event=True)
        replayed = journal.replay(coordinator, journal.JournalReader(events))
        assert replayed.difference == ""
        num_commands += replayed.num_commands
    assert num_commands > 0
    return store


def staleflow(*args: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "staleflow.cli.main", *map(str, args)]
    return forking.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=200, **kwargs)


@pytest.mark.usefixtures("drawn_summary")
def test_a_run_trains_and_stores_its_steps(job: Path, memory_folder: Path) -> None:
    end = run(job, "staleness.eta=2", "training.checkpoint_every=2", f"cluster.shared_memory={memory_folder}")
    store = check(end.run_dir, 5)
    assert len(list(store.trajectories())) == 5 * 16
    assert {r.kind for r in store.commits()} == {"step", "end"}
    summary: dict[str, Any] = json.loads((end.run_dir / "summary.json").read_text())
    assert [e["version"] for e in summary["evaluations"]] == [0, 5]
    assert sum(summary["staleness_histogram"].values()) == 80
    assert set(map(int, summary["staleness_histogram"])) <= {0, 1, 2}
    # Stored logprobs and those that the trainer recomputes under equal weights agree in float32.
    assert 0 < summary["logprob_mismatch"]["max"] < 1e-3
    assert (end.run_dir / "summary.png").stat().st_size > 10_000
    assert sorted(p.name for p in (end.run_dir / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
        "step-000005",
    ]
    assert not list(memory_folder.iterdir())
    fingerprints = [r.weight_fingerprint for r in store.commits() if r.kind == "step"]
    assert len(set(fingerprints)) >= 3  # the policy moved wherever a batch had signal

    shown = command("store", "show", end.run_dir, "--trajectory", 3, "--json")
    assert json.loads(shown.stdout)[0]["fate"] == "consumed"
    assert command("store", "audit", end.run_dir).returncode == 0
    assert "the same commands" in command("replay", end.run_dir, "--trajectory", 3).stdout
    listed = json.loads(command("store", "ls", end.run_dir.parent, "--json").stdout)
    assert [(r["steps"], r["state"]) for r in listed] == [(5, "ended")]
    assert json.loads(command("store", "ls", end.run_dir, "--json").stdout) == listed
    assert len(json.loads(command("store", "show", end.run_dir, "--where", "reward >= 0", "--json").stdout)) == 3
    assert "already has a run" in error_line("run", job)


async def run_and_interfere(
    job: Path,
    overrides: tuple[str, ...],
    interfere: Callable[[Driver, DaskWorkers], Awaitable[None]],
) -> Driver:
    """Run a job and call `interfere` once a step is done."""
    config = loading.load(job, overrides)
    facts = inspect_model(config)
    cluster = await connect(config)
    run_dir = prepare_run_dir(config)
    driver = Driver(config, Actors(config, cluster, run_dir, facts), run_dir, RunListener())

    async def interfering() -> None:
        while not driver.report.steps:
            await asyncio.sleep(0.05)
        await interfere(driver, cluster)

    task = asyncio.ensure_future(interfering())
    try:
        await driver.run()
        await task
    finally:
        task.cancel()
        await driver.close()
        await cluster.close()
    return driver


async def process_of(cluster: DaskWorkers, actor: str) -> int:
    """Return the process that holds an actor."""
    address = cluster.placed[actor].address
    result: int = (await cluster.client.run(os.getpid, workers=[address]))[address]
    return result


def run_and_strike(
    job: Path,
    overrides: tuple[str, ...],
    victim: str,
    strike: signal.Signals | Callable[[int], None],
) -> Driver:
    """Run a job and `strike` the worker process of the actor `victim` once a step is done: with a signal, or with a
    function of the process."""

    async def interfere(driver: Driver, cluster: DaskWorkers) -> None:
        process = await process_of(cluster, victim)
        if isinstance(strike, signal.Signals):
            os.kill(process, strike)
        else:
            strike(process)

    return asyncio.run(run_and_interfere(job, overrides, interfere))


def test_lost_workers_are_replaced_and_no_trajectory_is_lost(job: Path) -> None:
    """The trajectories of a rollout worker continue on the other instance and on the replacement. A role that is killed
    later is restored while engines stay loaded."""

    async def interfere(driver: Driver, cluster: DaskWorkers) -> None:
        os.kill(await process_of(cluster, "rollout-0"), signal.SIGKILL)
        steps = len(driver.report.steps)
        while not driver.report.lost_actors or len(driver.report.steps) < steps + 2:
            await asyncio.sleep(0.05)
        os.kill(await process_of(cluster, "server"), signal.SIGKILL)

    overrides = ("task.eval_prompts=0", "steps=8", "rollout.instances=2", "deadlines.call_s=6")
    driver = asyncio.run(run_and_interfere(job, overrides, interfere))
    first, second = driver.report.lost_actors
    assert "rollout-0 " in first and "server is gone" in second
    store = check(job.parent / "runs" / "job", 8)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 8 * 16
    instances = {str(segment.instance) for row in store.trajectories() for segment in row.trajectory.segments}
    assert instances <= {"rollout-0", "rollout-0.1", "rollout-1"}, "only the killed one was replaced"


def test_a_killed_teacher_is_replaced_and_steps_are_verified_without_it(job: Path) -> None:
    """The teacher is the student at version 0: its logprobs of tokens of that version are those that sampled them."""
    kl = "training.kl={coefficient=1.0, estimator='k1', place='advantage'}"
    overrides = ("task.eval_prompts=0", "steps=4", "training.advantage=none", kl, "teacher.instances=1")
    driver = run_and_strike(job, overrides, "teacher-0", signal.SIGKILL)
    (loss,) = driver.report.lost_actors
    assert "teacher-0 is gone" in loss
    folder = job.parent / "runs" / "job"
    consumed = [row.trajectory for row in check(folder, 4).trajectories() if row.fate is Fate.CONSUMED]
    assert len(consumed) == 4 * 16
    differences = {True: list[float](), False: list[float]()}
    for t in consumed:
        assert t.teacher_logprobs is not None
        difference = np.abs(t.teacher_logprobs - t.logprobs)
        for is_first in (True, False):
            differences[is_first] += difference[t.sampled & ((t.versions == 0) == is_first)].tolist()
    assert max(differences[True]) < 2e-5
    assert max(differences[False]) > 1e-3, "later versions differ from the teacher"
    verified = command("verify", folder, "--steps", "4")
    assert verified.returncode == 0, verified.stderr
    assert "4 of 4 steps repeated bit for bit" in verified.stdout


def test_a_full_disk_stops_the_run_and_keeps_the_stored_steps(job: Path) -> None:
    """Writes beyond a file size limit fail as on a full disk."""

    def strike(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))

    with pytest.raises(StoreError, match=r"could not be stored.*free space or move runs_dir"):
        run_and_strike(job, ("task.eval_prompts=0", "steps=500"), "server", strike)
    store = VersionedStore.open(job.parent / "runs" / "job" / "store")
    assert store.commits()
    assert audit(store).findings == ()


def test_ctrl_c_during_start_stops_at_once(job: Path) -> None:
    command = [sys.executable, "-m", "staleflow.cli.main", "run", str(job)]
    with forking.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "starting actors" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "stopped: interrupted; no step was finished" in rest
    assert "Traceback" not in rest


def test_a_failed_run_gives_one_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other errors are tested without a cluster in test_driver.py."""

    def run_that_is_stuck(**_: object) -> None:
        raise RunStuck("no progress for 4 s (deadlines.stuck_s): step 0 waits")

    monkeypatch.setattr("staleflow.cli.main.cli", run_that_is_stuck)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "staleflow: no progress for 4 s (deadlines.stuck_s): step 0 waits\n"


def test_doctor_finds_no_problem() -> None:
    parsed = json.loads(command("doctor", "--json").stdout)
    assert parsed["problems"] == []
    assert parsed["engines"]["transformers"].startswith("works")

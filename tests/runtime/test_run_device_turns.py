"""Runs with a model on processes whose trainer and instances take turns."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from staleflow.pipeline.processes.dask_workers import DaskWorkers
from staleflow.pipeline.runtime.driver import Driver
from staleflow.stores.trajectory import Fate
from tests.runtime.test_run import check, process_of, run, run_and_interfere

ONE = (
    "rollout.instances=1", "rollout.engine.max_running=1", "staleness.eta=0", "steps=3", "task.eval_prompts=0",
)  # fmt: skip


def fingerprints(job: Path, *overrides: str) -> list[str]:
    end = run(job, *ONE, *overrides)
    return [record.weight_fingerprint for record in check(end.run_dir, 3).commits() if record.kind == "step"]


@pytest.mark.slow
def test_weights_equal_those_of_separate_gpus(job: Path) -> None:
    """At eta = 0 one instance with one request at a time gives the same result in both layouts."""
    apart = fingerprints(job, "name=apart")
    assert fingerprints(job, "name=turns", "cluster.layout=turns") == apart
    assert len(set(apart)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize("trainer_turn", [True, False])
@pytest.mark.parametrize("victim", ["rollout-0", "trainer"])
def test_a_process_killed_in_each_turn_is_replaced(job: Path, victim: str, trainer_turn: bool, eta: int) -> None:
    """Awake or asleep, it is replaced, and no trajectory is lost."""

    async def strike(driver: Driver, cluster: DaskWorkers) -> None:
        process, turns = await process_of(cluster, victim), driver._actors._device_turns
        while turns._is_training is not trainer_turn or (not trainer_turn and not turns._awake):
            await asyncio.sleep(0.001)
        os.kill(process, signal.SIGKILL)

    overrides = (
        "cluster.layout=turns",
        "task.eval_prompts=0",
        "steps=5",
        "rollout.instances=2",
        f"staleness.eta={eta}",
    )
    driver = asyncio.run(run_and_interfere(job, overrides, strike))
    (loss,) = driver.report.actor_losses
    assert f"{victim} is gone" in loss
    store = check(job.parent / "runs" / "job", 5)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 5 * 16

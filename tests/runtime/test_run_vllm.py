"""Whole runs with vLLM on a real Dask cluster. Runs where vllm is installed (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path

import pytest

from staleflow.stores.metrics import NAMES
from staleflow.stores.trajectory import Fate
from tests.runtime.test_agent_run import check_example
from tests.runtime.test_run import check, run, sabotaged
from tests.runtime.test_run_lora import check_attribution

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

VLLM = ("rollout.engine.name=vllm", "deadlines.call_s=60")


@pytest.mark.parametrize("on_pull", ["interrupt", "keep"])
def test_a_run_with_vllm_trains_and_every_weight_is_the_trainers(job: Path, on_pull: str) -> None:
    # No two implementations agree to the last bit: with no tolerance at all every pull must raise the alarm.
    limit = "rollout.drift_limit=1e-12" if on_pull == "keep" else "rollout.drift_limit=1e-4"
    end = run(job, *VLLM, f"rollout.on_pull={on_pull}", "staleness.eta=2", limit)
    store = check(end.run_dir, 5)
    assert sum(e.fate is Fate.CONSUMED for e in store.ended()) == 5 * 16
    loaded = {v for r in store.steps() for v in r.loaded_fingerprints.values()}
    assert len({version for version, _ in loaded} - {0}) > 1
    for record in store.steps():
        assert set(record.metrics) <= NAMES
    assert all(fingerprint for _, fingerprint in loaded)
    alarms = end.summary["alarms"]
    assert isinstance(alarms, list)
    if on_pull == "keep":
        assert alarms
        assert "rollout-0 at version" in alarms[0]
    else:
        assert not alarms


def test_adapters_of_all_versions_that_the_bound_allows_are_served(job: Path, tiny_model: Path) -> None:
    pytest.importorskip("peft")
    check_attribution(job, tiny_model, *VLLM)


def test_a_killed_vllm_instance_is_replaced_and_nothing_is_lost(job: Path, memory_folder: Path) -> None:
    """kill -9 under load: its trajectories go on elsewhere, and it leaves neither processes nor memory behind."""
    before = set(Path("/dev/shm").glob("[!s]*"))  # semaphores of Dask's own processes come and go
    struck: list[int] = []

    def strike(pid: int) -> None:
        struck.append(pid)
        os.kill(pid, signal.SIGKILL)

    overrides = (
        *VLLM,
        "task.eval_prompts=0",
        "steps=12",
        "rollout.instances=2",
        f"cluster.shared_memory={memory_folder}",
    )
    driver = asyncio.run(sabotaged(job, overrides, "rollout-0", strike))
    assert driver.outcomes.losses
    store = check(job.parent / "runs" / "job", 12)
    assert sum(e.fate is Fate.CONSUMED for e in store.ended()) == 12 * 16
    assert not any(Path(f"/proc/{pid}").exists() for pid in struck)
    assert set(Path("/dev/shm").glob("[!s]*")) <= before
    assert not list(memory_folder.iterdir())


@pytest.mark.parametrize("on_pull", ["interrupt", "keep"])
def test_a_game_of_several_turns_with_vllm_stores_what_was_played(player: Path, tmp_path: Path, on_pull: str) -> None:
    check_example(player, tmp_path, *VLLM, f"rollout.on_pull={on_pull}")

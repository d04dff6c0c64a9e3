"""Whole runs with vLLM on a real Dask cluster. Runs where vllm is installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest

from staleflow.stores.metrics import STEP_METRICS
from staleflow.stores.trajectory import Fate
from staleflow.tasks.training.tiny_model import SYMBOLS
from tests.runtime.test_agent_run import check_example
from tests.runtime.test_run import check, run, run_and_strike
from tests.runtime.test_run_lora import check_attribution
from tests.tasks.test_vllm_weights import write_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

VLLM = ("rollout.engine.name=vllm", "deadlines.call_s=60")


@pytest.mark.parametrize("on_pull", ["interrupt", "keep"])
def test_a_run_with_vllm_trains_and_verifies_every_weight(job: Path, on_pull: str) -> None:
    end = run(job, *VLLM, f"rollout.on_pull={on_pull}", "staleness.eta=2", "rollout.logprob_drift_limit=1e-4")
    store = check(end.run_dir, 5)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 5 * 16
    checks = [item for record in store.commits() for item in record.weight_checks]
    assert {item.outcome for item in checks} == {"verified"}
    assert len({item.version for item in checks}) > 2
    # No two implementations agree to the last bit.
    assert all(0 < item.drift < item.limit for item in checks)
    for record in store.commits():
        assert record.metrics.keys() <= STEP_METRICS.keys()
    assert not end.summary["alarms"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.timeout(900)
def test_experts_and_shards_are_verified_by_part_at_every_pull(
    job: Path, tiny_model: Path, tmp_path: Path, name: str, tensor_parallel: int
) -> None:
    model = write_model(name, tmp_path / "experts", len(SYMBOLS))
    for file in (*tiny_model.glob("*token*"), tiny_model / "generation_config.json"):
        shutil.copy(file, model)
    shards = f"rollout.engine.tensor_parallel={tensor_parallel}"
    end = run(
        job,
        *VLLM,
        "deadlines.call_s=120",
        "deadlines.start_s=600",
        "rollout.instances=1",
        f"model.path={model}",
        shards,
    )
    checks = [item for record in check(end.run_dir, 5).commits() for item in record.weight_checks]
    assert len({item.version for item in checks}) > 3  # a slow instance may skip a version
    assert all(item.outcome == "verified" and item.weights.verified >= 30 * tensor_parallel for item in checks)
    assert all(item.drift < 1e-5 for item in checks)


def test_adapters_of_all_versions_within_the_bound_are_served(job: Path, tiny_model: Path) -> None:
    check_attribution(job, tiny_model, *VLLM)


def shared_memory_of(pid: int) -> set[Path]:
    """POSIX shared memory that a process maps: files directly in /dev/shm. Folders there are the tests' own."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(path) for line in lines if (path := line.split(maxsplit=5)[-1]).rpartition("/")[0] == "/dev/shm"}


@pytest.mark.timeout(900)
def test_a_killed_vllm_instance_is_replaced_and_no_trajectory_is_lost(job: Path, memory_folder: Path) -> None:
    """kill -9 under load: its trajectories continue elsewhere, and it leaves neither processes nor shared memory."""
    struck: dict[int, set[Path]] = {}

    def strike(pid: int) -> None:
        struck[pid] = shared_memory_of(pid)
        os.kill(pid, signal.SIGKILL)

    overrides = (
        *VLLM,
        "task.eval_prompts=0",
        "steps=12",
        "rollout.instances=2",
        f"cluster.shared_memory={memory_folder}",
    )
    driver = run_and_strike(job, overrides, "rollout-0", strike)
    assert driver.report.lost_actors
    store = check(job.parent / "runs" / "job", 12)
    assert sum(e.fate is Fate.CONSUMED for e in store.trajectories()) == 12 * 16
    for pid, segments in struck.items():
        assert not Path(f"/proc/{pid}").exists()
        assert not any(segment.exists() for segment in segments)
    assert not list(memory_folder.iterdir())


@pytest.mark.parametrize("on_pull", ["interrupt", "keep"])
def test_a_game_of_several_turns_with_vllm_stores_the_played_turns(player: Path, tmp_path: Path, on_pull: str) -> None:
    check_example(player, tmp_path, *VLLM, f"rollout.on_pull={on_pull}")

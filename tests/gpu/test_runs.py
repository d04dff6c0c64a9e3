"""Whole runs on one GPU shared by trainer and instances, side by side and in turns, with kill -9 and verification from
the store. docs/gpu.md lists the results."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs.execution import RunEnd, execute
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.trajectory import Fate
from tests.commands import command
from tests.conftest import JOB
from tests.runtime.test_run import check, run_and_strike
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_job(tmp_path: Path) -> Path:
    """A job file of five small steps on a tiny model."""
    make_tiny_model(tmp_path / "model")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs", steps=5, model=tmp_path / "model"))
    return path


def run(job: Path, *overrides: str) -> RunEnd:
    return asyncio.run(execute(loading.load(job, overrides), RunListener()))


CUDA = ("model.device=cuda", "task.eval_prompts=0", "deadlines.call_s=60")
ROWS_PER_STEP = 16
"""Number of rows per step of the fixture `gpu_job`."""


@pytest.mark.parametrize("layout", ["separate", "turns"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eta", [0, 1])
def test_a_run_completes_and_its_weights_are_verified(gpu_job: Path, layout: str, dtype: str, eta: int) -> None:
    end = run(gpu_job, *CUDA, f"cluster.layout={layout}", f"model.dtype={dtype}", f"staleness.eta={eta}", "steps=3")
    store = check(end.run_dir, 3)
    assert sum(entry.fate is Fate.CONSUMED for entry in store.trajectories()) == 3 * ROWS_PER_STEP
    mismatches = [record.metrics["mismatch_max"] for record in store.commits() if "mismatch_max" in record.metrics]
    assert 0 < max(mismatches) < (1e-2 if dtype == "float32" else 0.3)


@pytest.mark.parametrize(
    "settings",
    [
        ("training.lora.rank=4", "rollout.on_pull=adapter"),
        ("training.offload=true",),
        ("training.compile=true", "model.dtype=bfloat16", "cluster.layout=turns"),
        ("training.kl.coefficient=0.1", "cluster.layout=turns"),
    ],
    ids=["lora", "offload", "compiled in turns", "reference in turns"],
)
def test_a_run_with_adapters_offload_or_compilation_completes(gpu_job: Path, settings: tuple[str, ...]) -> None:
    check(run(gpu_job, *CUDA, *settings, "steps=3").run_dir, 3)


@pytest.mark.parametrize("layout", ["separate", "turns"])
@pytest.mark.parametrize("victim", ["rollout-0", "trainer", "server"])
def test_a_killed_role_is_replaced_on_the_gpu_and_no_trajectory_is_lost(
    gpu_job: Path, victim: str, layout: str
) -> None:
    overrides = (*CUDA, "steps=6", f"cluster.layout={layout}")
    driver = run_and_strike(gpu_job, overrides, victim, signal.SIGKILL)
    assert any(f"{victim} is gone" in loss for loss in driver.report.lost_actors)
    store = check(gpu_job.parent / "runs" / "job", 6)
    assert sum(entry.fate is Fate.CONSUMED for entry in store.trajectories()) == 6 * ROWS_PER_STEP


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_repeat_bit_for_bit_from_the_store(gpu_job: Path, dtype: str) -> None:
    end = run(gpu_job, *CUDA, "steps=3", f"model.dtype={dtype}")
    verified = command("verify", end.run_dir, "--steps", "3")
    assert verified.returncode == 0, verified.stdout + verified.stderr

"""staleflow config explain --gpus: the plan of a job's memory, and exit code 2 if it does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.local_gpus import read_devices
from staleflow.pipeline.config.size_plan import place_locally
from staleflow.stores.errors import ConfigError
from tests.commands import command, error_line
from tests.sizing.test_memory import config_of
from tests.support.fake_nvml import pynvml


@pytest.fixture
def job_of_8b(job: Path, tmp_path: Path) -> Path:
    """A job of an 8B model of which only the config exists."""
    folder = tmp_path / "8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config_of("8B")}))
    model = next(line for line in job.read_text().splitlines() if line.startswith("path"))
    job.write_text(job.read_text().replace(model, f'path = "{folder}"'))
    return job


def simulate_gpus(monkeypatch: pytest.MonkeyPatch, gpus: str) -> None:
    monkeypatch.setenv("FAKE_GPUS", gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)


def test_a_job_that_does_not_fit_is_rejected_with_the_smallest_change(
    job_of_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_gpus(monkeypatch, "8xH100-80")
    with pytest.raises(ConfigError, match=r"trainer needs 1 of 2.. GB, the most there are together is 0") as refused:
        place_locally(loading.load(job_of_8b), read_devices())
    assert str(refused.value).endswith("; it fits with training.recompute_activations = true, training.ranks = 4")
    assert "\n" not in str(refused.value)
    adapter = ("training.lora.rank=8", "rollout.on_pull=adapter")
    with pytest.raises(ConfigError, match=r"; it fits with training.recompute_activations = true$"):
        place_locally(loading.load(job_of_8b, adapter), read_devices())
    assert place_locally(loading.load(job_of_8b, (*adapter, "training.recompute_activations=true")), read_devices())[0]
    assert place_locally(
        loading.load(job_of_8b, ("training.ranks=4", "training.recompute_activations=true")), read_devices()
    )[0]


def test_doctor_prints_the_plan_of_a_job_on_local_gpus(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpus(monkeypatch, "8xH100-80")
    end = command("doctor", job)
    assert end.returncode == 0
    assert "KV cache" in end.stdout and "| t0 r0 .. .. .. .. .. .. |" in end.stdout
    assert "proposed for 8 GPUs: rollout.instances = " in end.stdout
    simulate_gpus(monkeypatch, "0xH100-80")
    assert "staleflow config explain JOB --gpus 8xH100-80" in error_line("doctor", job)


def test_the_plan_has_memory_parts_placement_and_proposals(job: Path) -> None:
    end = command("config", "explain", job, "--gpus", "8xH100-80", "--set", "rollout.instances=6")
    assert end.returncode == 0
    assert "weights, gradients, optimizer" in end.stdout
    assert "| t0 r0 r1 r2 r3 r4 r5 .. |" in end.stdout
    assert "fits; proposed: rollout.engine.kv_tokens = " in end.stdout


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("start_s", [1, 180])
def test_the_proposed_settings_are_valid_for_the_engine_and_shorten_no_deadline(
    job_of_8b: Path, engine: str, start_s: int
) -> None:
    settings = f"rollout.engine.name={engine}", f"deadlines.start_s={start_s}"
    end = command(
        "config", "explain", job_of_8b, "--gpus", "8xH100-80", *(part for s in settings for part in ("--set", s))
    )
    line = next(line for line in end.stdout.splitlines() if "; then: " in line)
    values = [value.replace(" ", "") for value in line.partition("; then: ")[2].split("; ")]
    planned = loading.load(job_of_8b, (*settings, *values))
    assert planned.deadlines.start_s >= start_s, line
    assert ("gpu_memory_utilization" in line) == (engine == "vllm"), line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("{resume_every=5}", "disk, by the end: 3 resume points of 98.3 GB, 294.9\n"),
        ("{resume_every=5, keep_every=10}", "disk, by the end: 5 resume points of 98.3 GB, 491.4\n"),
        ("{resume_every=0}", ""),
        ("{lora={rank=8}}", ""),
    ],
)
def test_plan_has_the_size_of_the_resume_points_of_a_finished_run(job_of_8b: Path, settings: str, line: str) -> None:
    job = ("--set", "steps=40", "--set", f"training={settings}", "--set", "rollout.on_pull=interrupt")
    if "lora" in settings:
        job = (*job[:-1], "rollout.on_pull=adapter")
    end = command("config", "explain", job_of_8b, "--gpus", "8xH100-80", *job)
    assert line in end.stdout and ("disk" in end.stdout) == bool(line), end.stdout + end.stderr


def test_a_job_that_trains_an_adapter_fits_where_its_model_would_not(job_of_8b: Path) -> None:
    plan = ("config", "explain", job_of_8b, "--gpus", "2xH100-80", "--set", "training.recompute_activations=true")
    end = command(*plan, "--set", "training.lora.rank=8", "--set", "rollout.on_pull=adapter")
    assert end.returncode == 0 and "\nfits; " in end.stdout, end.stdout + end.stderr
    assert command(*plan).returncode == 2


def test_the_turns_layout_needs_one_gpu_where_separate_does_not_fit(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config_of("0.6B")}))
    knobs = (
        f"model.path={tmp_path}", "model.dtype=bfloat16", "rollout.engine.kv_tokens=64000",
        "training.recompute_activations=true",
    )  # fmt: skip
    turns = (*knobs, "cluster.layout=turns")
    simulate_gpus(monkeypatch, "1xL4-24")
    with pytest.raises(ConfigError, match=r"needs 2 GPUs .1 for training, 1 for rollout.; 1 of 1"):
        place_locally(loading.load(job, knobs), read_devices())
    assert "t0+r0" in place_locally(loading.load(job, turns), read_devices())[1]
    settings = [part for knob in turns for part in ("--set", knob)]
    end = command("config", "explain", job, "--gpus", "1xL4-24", *settings)
    assert end.returncode == 0, end.stderr
    assert "| t0+r0 |" in end.stdout


def test_too_few_gpus_or_an_invalid_description_give_exit_code_2(job: Path) -> None:
    end = command("config", "explain", job, "--gpus", "8xH100-80", "--set", "rollout.instances=8")
    assert end.returncode == 2
    assert "needs 9 GPUs (1 for training, 8 for rollout); 8 of 8 are free" in end.stdout
    assert "'eight' is not GPUs; write them as 8xH100-80" in error_line("config", "explain", job, "--gpus", "eight")


def test_a_model_that_does_not_fit_is_rejected_with_a_change(job: Path, tiny_model: Path) -> None:
    config = tiny_model / "config.json"
    before = config.read_text()
    try:
        sizes = before.replace('"hidden_size": 64', '"hidden_size": 8192')
        config.write_text(sizes.replace('"num_hidden_layers": 2', '"num_hidden_layers": 600'))
        end = command("config", "explain", job, "--gpus", "8xH100-80")
    finally:
        config.write_text(before)
    assert end.returncode == 2
    assert "does not fit; it does with " in end.stdout


def test_a_job_without_a_model_or_json_output_gives_a_one_line_error(job: Path) -> None:
    end = command("config", "explain", "examples/dryrun.toml", "--gpus", "8xH100-80")
    assert (end.returncode, end.stderr.strip()) == (
        2, "staleflow: --gpus: the job names no model: set model.path to a folder; its config.json has the sizes",
    )  # fmt: skip
    assert "cannot be combined with --json" in error_line("config", "explain", job, "--gpus", "8xH100-80", "--json")


def test_the_plan_has_the_teachers_memory_and_gpu(job: Path) -> None:
    plan = ("config", "explain", job, "--gpus", "8xH100-80", "--set", "training.kl.coefficient=1")
    assert "reference model" in command(*plan).stdout
    end = command(*plan, "--set", "teacher.instances=2")
    assert end.returncode == 0, end.stderr
    assert "reference model" not in end.stdout
    assert "      rank    instance     teacher\n" in end.stdout
    assert "| t0 r0 T0 T1 .. .. .. .. |" in end.stdout

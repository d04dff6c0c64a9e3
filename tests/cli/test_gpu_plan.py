"""staleflow config explain --gpus: the plan of a job's memory, and exit code 2 if it does not fit."""

from __future__ import annotations

from pathlib import Path

from tests.commands import command


def test_the_plan_has_parts_placement_and_what_is_proposed(job: Path) -> None:
    end = command("config", "explain", job, "--gpus", "8xH100-80", "--set", "rollout.instances=6")
    assert end.returncode == 0
    assert "weights, gradients, optimizer" in end.stdout
    assert "| t0 r0 r1 r2 r3 r4 r5 .. |" in end.stdout
    assert "fits; to use the memory that is left: rollout.engine.kv_tokens = " in end.stdout


def test_too_few_gpus_and_a_text_that_describes_none_end_with_two(job: Path) -> None:
    end = command("config", "explain", job, "--gpus", "8xH100-80", "--set", "rollout.instances=8")
    assert end.returncode == 2
    assert "needs 9 GPUs (1 for training, 8 for rollout); 8 of 8 are free" in end.stdout
    end = command("config", "explain", job, "--gpus", "eight")
    assert end.returncode == 2
    assert "'eight' is not GPUs; write them as 8xH100-80" in end.stderr


def test_a_model_that_does_not_fit_is_refused_with_a_change_that_helps(job: Path, tiny_model: Path) -> None:
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


def test_a_job_without_a_model_or_with_json_is_one_line(job: Path) -> None:
    end = command("config", "explain", "examples/dryrun.toml", "--gpus", "8xH100-80")
    assert (end.returncode, end.stderr.strip()) == (
        2, "staleflow: --gpus: the job names no model: set model.path to a folder; its config.json has the sizes",
    )  # fmt: skip
    end = command("config", "explain", job, "--gpus", "8xH100-80", "--json")
    assert end.returncode == 2
    assert "cannot be combined with --json" in end.stderr

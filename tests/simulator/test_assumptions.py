"""`staleflow simulate CONFIG` lists the assumed numbers and the way to measure them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import command

JOB = 'name = "mine"\nsteps = 3\n[rollout.engine]\nname = "emulated"\n[batch]\ngroups_per_step = 2\ngroup_size = 2\n'


def simulate_output(*arguments: str) -> str:
    result = command("simulate", *arguments)
    assert result.returncode == 0, result.stderr
    return "".join(line for line in result.stderr.splitlines() if line.startswith("assumed"))


def test_assumed_numbers_are_listed_with_the_way_to_measure_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    assert simulate_output("job.toml") == (
        "assumed, not measured: decode steps of a 7B model (rollout.cost), simulation.train_s = 20, "
        "simulation.pull_s = 1, simulation.reward_s = 0.1, responses of 2000 tokens in the median (workload); "
        "a run of some ten steps measures all: then staleflow simulate --from RUN"
    )
    known = ("simulation.train_s=1.0", "simulation.pull_s=0.5", "simulation.reward_s=0.2", "workload.median=50.0")
    values = [part for item in known for part in ("--set", item)]
    assert simulate_output("job.toml", *values).startswith(
        "assumed, not measured: decode steps of a 7B model (rollout.cost); "
    )
    assert simulate_output("job.toml", *values, "--set", "rollout.cost.k2=0.001") == ""
    assert simulate_output("job.toml", "--json") == ""
    Path("profiles").mkdir()
    Path("profiles/mine-run.json").write_text("{}")
    assert simulate_output("job.toml").endswith("; there is a profile of this job: set profile=profiles/mine-run.json")
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/summary.json").write_text("{}")
    expected = "this job has run, with all of them measured: staleflow simulate --from runs/mine"
    assert simulate_output("job.toml").endswith(f"; {expected}")


def test_a_swept_number_is_not_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB + "[staleness]\neta = -1\n")
    output = simulate_output("job.toml", "--sweep", "staleness.eta=0,1", "--sweep", "simulation.train_s=1")
    assert output.startswith("assumed, not measured: ") and "train_s" not in output

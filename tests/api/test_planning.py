"""A run is planned, and compares its forecast with what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staleflow
from staleflow.pipeline.jobs import forecasting
from staleflow.pipeline.jobs.forecasting import FORECAST_FILE
from staleflow.pipeline.run_page.api import RunApi
from staleflow.pipeline.run_page.run_reader import RunReader
from staleflow.pipeline.simulator.run_forecast import QUANTITY_UNITS
from tests.commands import command
from tests.support.simulated_store import JOB, stored_simulation

SMALL = ("batch.groups_per_step=4", "batch.group_size=4", "steps=4", "rollout.instances=1", "name=planned")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of another seed and length."""
    return stored_simulation(tmp_path_factory.mktemp("measured"), "name=short", "steps=8", "seed=9")


def test_a_planned_run_compares_its_forecast_and_keeps_it_when_it_is_resumed(tmp_path: Path, measured: Path) -> None:
    overrides = (f"runs_dir={tmp_path}", "rollout.engine.time_scale=20.0", *SMALL)
    forecast = staleflow.plan(JOB, measured_in=measured, overrides=overrides)
    assert "from 10 simulations with the times of short (decode steps within " in forecast.lines[0]
    stored = (tmp_path / "planned" / FORECAST_FILE).read_text()
    run = staleflow.run(JOB, overrides=overrides, progress=False).run
    result = run.compare_with_forecast()
    assert result is not None
    assert result.forecast == forecast
    assert list(result.measured) == list(QUANTITY_UNITS)
    assert result.measured["total_tokens"] == sum(step.metrics["response_tokens"] for step in run.steps())
    assert result.bottleneck
    notes = RunApi(RunReader(run.path)).overview("main")["notes"]
    assert "; ".join(result.lines) in notes
    audit = command("store", "audit", run.path)
    assert audit.returncode == 0
    assert f"\n  {result.line}\n" in audit.stdout
    summary = staleflow.resume(run.path, {"steps": 5}, progress=False).summary
    assert (run.path / FORECAST_FILE).read_text() == stored
    assert summary["forecast"]["measured"] == result.measured, "of the steps that were forecast"
    with pytest.raises(staleflow.ConfigError, match=r"planned: already has a run"):
        staleflow.plan(JOB, measured_in=measured, overrides=overrides)


def test_the_command_prints_the_forecast_and_where_its_times_are_from(tmp_path: Path, measured: Path) -> None:
    settings = [part for text in (f"runs_dir={tmp_path}", *SMALL) for part in ("--set", text)]
    answer = command("plan", JOB, "--from", measured, *settings)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert "the times of short (decode steps within " in lines[0]
    assert [line for line in lines if " tokens/s" in line]
    assert lines[-1].startswith("  bottleneck: ")
    assert '"ranges"' in command("plan", JOB, "--from", measured, *settings, "--json").stdout


def test_times_are_the_runs_and_responses_those_of_the_emulated_job(
    tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(forecasting, "make_forecast", lambda config, *_: planned.append(config))
    monkeypatch.setattr(forecasting, "write_forecast", lambda *_: None)
    overrides = (f"runs_dir={tmp_path}", *SMALL, "workload.median=77.0", "simulation.train_s=99.0")
    staleflow.plan(JOB, measured_in=staleflow.open_run(measured), overrides=overrides)
    (config,) = planned
    assert (config.workload.kind, config.workload.median) == ("lognormal", 77.0)
    assert config.simulation.train_s + 6000 * config.simulation.train_s_per_token < 20
    assert config.simulation.cost_error > 0
    model = {"name": "model", "runs_dir": tmp_path, "model": {"path": "model"}, "task": {"source": "jsonl:rows.jsonl"}}
    staleflow.plan(model, measured_in=measured)
    assert (planned[1].workload.kind, planned[1].workload.run) == ("recorded", str(measured))

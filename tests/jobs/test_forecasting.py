"""The forecast in a run's folder: when it is made, kept, removed and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.forecasting import (
    FORECAST_FILE,
    compare_forecast,
    make_forecast,
    read_forecast,
    remove_other_forecast,
    settings_digest,
    write_forecast,
)
from staleflow.pipeline.jobs.summary import write_summary
from staleflow.pipeline.profiling.run_profile import profile_run, write_profile
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.stores.errors import StoreError
from tests.commands import command
from tests.support.simulated_store import JOB, stored_simulation

SMALL = ("batch.groups_per_step=4", "batch.group_size=4", "steps=6", "rollout.instances=2")


def job(folder: Path, *overrides: str) -> RunConfig:
    config = loading.load(JOB, (f"runs_dir={folder}", *SMALL, *overrides))
    config.run_dir.mkdir(exist_ok=True)
    return config


def test_a_run_that_was_not_planned_has_no_forecast(tmp_path: Path) -> None:
    config = job(tmp_path)
    assert remove_other_forecast(config.run_dir, settings_digest(config)) == ""
    assert compare_forecast(config.run_dir, [], "") is None


def test_a_planned_forecast_is_kept_for_the_same_settings_only(tmp_path: Path) -> None:
    config = job(tmp_path)
    forecast = make_forecast(config, "other times", settings_digest(config))
    write_forecast(config.run_dir, forecast)
    moved = replace(config, runs_dir="/elsewhere")  # paths do not matter
    assert remove_other_forecast(config.run_dir, settings_digest(moved)) == ""
    assert read_forecast(config.run_dir) == forecast
    other_model = job(tmp_path, "model.path=Qwen/Qwen2.5-7B-Instruct")
    assert settings_digest(other_model) != settings_digest(job(tmp_path, "model.path=Qwen/Qwen2.5-0.5B-Instruct"))
    changed = job(tmp_path, "staleness.eta=1")
    line = "the forecast in the run's folder was for other settings, and was removed"
    assert remove_other_forecast(changed.run_dir, settings_digest(changed)) == line
    assert read_forecast(config.run_dir) is None


def test_a_damaged_forecast_does_not_stop_a_run(tmp_path: Path) -> None:
    config = job(tmp_path)
    for text in ("{", json.dumps({"steps": 3}), "[]"):
        (config.run_dir / FORECAST_FILE).write_text(text)
        with pytest.raises(StoreError, match=r"forecast\.json: cannot be read: .*; remove it"):
            read_forecast(config.run_dir)
        assert remove_other_forecast(config.run_dir, "job").startswith("no forecast of this run: ")
        (line,) = write_summary(config, RunReport(), config.run_dir)["forecast"]["lines"]  # type: ignore[index]
        assert line.startswith(f"not compared with its forecast: {config.run_dir / FORECAST_FILE}: cannot be read: ")


def test_an_audit_says_that_a_damaged_forecast_is_not_compared(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, *SMALL)
    (run / FORECAST_FILE).write_text("{")
    assert (
        f"\n  not compared with its forecast: {run / FORECAST_FILE}: cannot be read: "
        in command("store", "audit", run).stdout
    )


def test_a_job_without_a_workload_is_forecast_with_the_responses_of_the_profiled_run(tmp_path: Path) -> None:
    run, profile = stored_simulation(tmp_path, "name=measured", "steps=10"), tmp_path / "profile.json"
    write_profile(profile, profile_run(run))
    sampled = {"profile": str(profile), "model": {"path": "model"}, "task": {"source": "jsonl:rows.jsonl"}}
    config = loading.from_tree(sampled)
    assert (config.workload.kind, config.workload.run) == ("recorded", str(run))
    assert config.simulation.cost_error > 0
    own = loading.from_tree({**sampled, "workload": {"median": 50.0}})
    assert (own.workload.kind, own.workload.median) == ("lognormal", 50.0)

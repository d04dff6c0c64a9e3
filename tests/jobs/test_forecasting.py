"""The forecast in a run's folder: when it is made, kept, removed and compared."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs import execution, forecasting
from staleflow.pipeline.jobs.forecasting import (
    FORECAST_FILE,
    compare_forecast,
    make_forecast,
    prepare_forecast,
    read_forecast,
    settings_digest,
    write_forecast,
)
from staleflow.pipeline.jobs.summary import write_summary
from staleflow.pipeline.processes import dask_workers
from staleflow.pipeline.profiling.run_profile import profile_run, write_profile
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.errors import ConfigError, StoreError
from tests.commands import command
from tests.support.simulated_store import JOB, stored_simulation

SMALL = ("batch.groups_per_step=4", "batch.group_size=4", "steps=6", "rollout.instances=2")


def job(folder: Path, *overrides: str) -> RunConfig:
    config = loading.load(JOB, (f"runs_dir={folder}", *SMALL, *overrides))
    config.run_dir.mkdir(exist_ok=True)
    return config


def test_a_run_without_measured_times_is_not_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "make_forecast", None)  # nothing is simulated
    config = job(tmp_path)
    assert prepare_forecast(config, settings_digest(config)) == ""
    assert not (config.run_dir / FORECAST_FILE).exists()
    assert compare_forecast(config.run_dir, [], "") is None


def test_a_run_with_a_profile_is_forecast_before_its_first_step(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, profile_run(stored_simulation(tmp_path, "name=measured", "steps=10")))
    config = job(tmp_path, f"profile={profile}")
    assert prepare_forecast(config, settings_digest(config)) == ""
    forecast = read_forecast(config.run_dir)
    assert forecast is not None
    assert forecast.steps == 6
    assert "the times of its profile" in forecast.basis
    assert prepare_forecast(config, settings_digest(config)) == ""
    assert read_forecast(config.run_dir) == forecast


def test_a_planned_forecast_is_kept_for_the_same_settings_only(tmp_path: Path) -> None:
    config = job(tmp_path)
    forecast = make_forecast(config, "other times", settings_digest(config))
    write_forecast(config.run_dir, forecast)
    moved = replace(config, runs_dir="/elsewhere")  # paths do not matter
    assert prepare_forecast(config, settings_digest(moved)) == ""
    assert read_forecast(config.run_dir) == forecast
    changed = job(tmp_path, "staleness.eta=1")
    line = "the forecast in the run's folder was for other settings, and was removed"
    assert prepare_forecast(changed, settings_digest(changed)) == line
    assert read_forecast(config.run_dir) is None


def test_a_run_starts_without_a_forecast_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "START_LIMIT_S", 0.0)
    config = job(tmp_path, "simulation.cost_error=0.01")
    line = prepare_forecast(config, settings_digest(config))
    assert line == (
        "no forecast of this run: its simulations take more than 0 s; `staleflow plan` makes one before the run"
    )
    assert read_forecast(config.run_dir) is None


def test_a_damaged_forecast_does_not_stop_a_run(tmp_path: Path) -> None:
    config = job(tmp_path)
    for text in ("{", json.dumps({"steps": 3}), "[]"):
        (config.run_dir / FORECAST_FILE).write_text(text)
        with pytest.raises(StoreError, match=r"forecast\.json: cannot be read: .*; remove it"):
            read_forecast(config.run_dir)
        assert prepare_forecast(config, "job").startswith("no forecast of this run: ")
        (line,) = write_summary(config, RunReport(), config.run_dir)["forecast"]["lines"]  # type: ignore[index]
        assert line.startswith(f"not compared with its forecast: {config.run_dir / FORECAST_FILE}: cannot be read: ")


def test_an_audit_says_that_a_damaged_forecast_is_not_compared(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, *SMALL)
    (run / FORECAST_FILE).write_text("{")
    assert (
        f"\n  not compared with its forecast: {run / FORECAST_FILE}: cannot be read: "
        in command("store", "audit", run).stdout
    )


async def test_a_forecast_ends_with_the_start_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on for seconds after no worker could be reached, and the command waited for it."""
    started, stopped = threading.Event(), list[bool]()

    def prepare_until_stopped(_: RunConfig, job: str, stop: threading.Event | None = None) -> str:
        started.set()
        stopped.append(stop is not None and stop.wait(600))
        return job

    async def refuse(*_: object, **__: object) -> None:
        await asyncio.to_thread(started.wait)
        raise ConfigError("no scheduler")

    monkeypatch.setattr(execution, "prepare_forecast", prepare_until_stopped)
    monkeypatch.setattr(dask_workers, "connect", refuse)
    with pytest.raises(ConfigError, match="no scheduler"):
        await execution.execute(job(tmp_path), RunListener())
    while not stopped:
        await asyncio.sleep(0.01)
    assert stopped == [True]


def test_the_simulations_of_a_forecast_can_be_stopped(tmp_path: Path) -> None:
    config, stop = job(tmp_path, "simulation.cost_error=0.01"), threading.Event()
    stop.set()
    assert prepare_forecast(config, settings_digest(config), stop).startswith("no forecast of this run: ")
    assert read_forecast(config.run_dir) is None


def test_a_job_without_a_workload_is_forecast_with_the_responses_of_the_profiled_run(tmp_path: Path) -> None:
    run, profile = stored_simulation(tmp_path, "name=measured", "steps=10"), tmp_path / "profile.json"
    write_profile(profile, profile_run(run))
    sampled = {"profile": str(profile), "model": {"path": "model"}, "task": {"source": "jsonl:rows.jsonl"}}
    config = loading.from_tree(sampled)
    assert (config.workload.kind, config.workload.run) == ("recorded", str(run))
    assert config.simulation.cost_error > 0
    own = loading.from_tree({**sampled, "workload": {"median": 50.0}})
    assert (own.workload.kind, own.workload.median) == ("lognormal", 50.0)

"""Makes and stores the forecast of a run. forecast.json in the run's folder holds it.

Invariants:
- The file is written before the run's first step, and no later start replaces it.
- It belongs to the job that the folder's run has: one for other settings is replaced or removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from staleflow.pipeline.config import actor_settings, knob_tree, size_plan
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.placement.devices import GB
from staleflow.pipeline.recovery.run_folder import CODEC, DISK_REMEDY, read_json_file
from staleflow.pipeline.simulator.analysis import as_metrics, compute_stats
from staleflow.pipeline.simulator.run_forecast import (
    NUM_SIMULATIONS,
    Forecast,
    ForecastComparison,
    compare_with_run,
    measure_run,
    most_frequent_cause,
    predict_ranges,
)
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.errors import StoreError, raised_as
from staleflow.stores.files import replace_text
from staleflow.tasks.emulation.workload import RecordedWorkload

FORECAST_FILE = "forecast.json"
PATH = re.compile(r"(?<!\w)/")
"""Part of an absolute path or a URL, and not of the name of a model or data set."""
MAX_SEED = 2**31
"""Limit of a job's seed."""


def make_forecast(config: RunConfig, basis: str, job_digest: str) -> Forecast:
    """Forecast a run from simulations with seeds other than its own.

    Args:
        config: The job, with measured times; see `simulation.cost_error`.
        basis: The origin of these times, for display.
        job_digest: `settings_digest` of the job that will run.

    Raises:
        ConfigError, StoreError: The recorded responses cannot be read.
    """
    recorded = actor_settings.make_workload(config) if config.workload.kind == "recorded" else None
    time_scale = config.rollout.engine.time_scale
    measured, causes = [], []
    for number in range(1, NUM_SIMULATIONS + 1):
        seeded = replace(config, seed=(config.seed + number) % MAX_SEED)
        workload = (
            recorded.resample(seeded.seed, config.rollout.max_new_tokens)
            if isinstance(recorded, RecordedWorkload)
            else actor_settings.make_workload(seeded)
        )
        trace = SimulatedRun(seeded, workload).run()
        steps = [{**step, "elapsed_s": step["elapsed_s"] / time_scale} for step in as_metrics(trace.steps)]
        measured.append(measure_run(steps))
        diagnosis = compute_stats(seeded, trace).diagnosis
        causes.append(diagnosis.cause.value if diagnosis is not None else "")
    bottleneck, agreement = most_frequent_cause(causes)
    memory = zip(("rank", "instance", "teacher"), size_plan.gpu_bytes(config), strict=True)
    return Forecast(
        steps=config.steps,
        ranges=predict_ranges(measured, config.simulation.cost_error, config.staleness.eta),
        bottleneck=bottleneck,
        agreement=agreement,
        memory_gb={role: num_bytes / GB for role, num_bytes in memory if num_bytes},
        basis=f"{NUM_SIMULATIONS} simulations with {basis} (decode steps within {config.simulation.cost_error:.1%})",
        job=job_digest,
    )


def settings_digest(config: RunConfig) -> str:
    """Digest of all settings of a job except absolute paths and URLs, by which a forecast is known to be the job's."""
    values = {row.key: row.value for row in knob_tree.explain_values(config) if not PATH.search(str(row.value))}
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def write_forecast(run_dir: Path, forecast: Forecast) -> None:
    """Store a forecast in a run's folder. Raises StoreError."""
    replace_text(run_dir / FORECAST_FILE, json.dumps(CODEC.encode(forecast), indent=1) + "\n", DISK_REMEDY)


def read_forecast(run_dir: Path) -> Forecast | None:
    """Read the forecast of a run; None if there is none. Raises StoreError."""
    return read_json_file(run_dir / FORECAST_FILE, Forecast, "remove it to continue without a forecast")


def remove_other_forecast(run_dir: Path, job_digest: str) -> str:
    """Remove the forecast in a starting run's folder if it is of a job with other settings. Returns a line for the
    user; empty if there is nothing to say. job_digest: `settings_digest` of the run's job."""
    try:
        planned = read_forecast(run_dir)
    except StoreError as error:  # a run does not need its forecast
        return f"no forecast of this run: {error}"
    if planned is None or planned.job == job_digest:
        return ""
    (run_dir / FORECAST_FILE).unlink(missing_ok=True)
    return "the forecast in the run's folder was for other settings, and was removed"


def compare_forecast(run_dir: Path, steps: Sequence[Mapping[str, float]], bottleneck: str) -> ForecastComparison | None:
    """Compare a run with the forecast in its folder; None if it has none. Raises StoreError if it cannot be read.

    Args:
        steps: Metrics of its stored steps.
        bottleneck: The cause in its diagnosis; empty if unknown.
    """
    with raised_as(StoreError, "not compared with its forecast", StoreError):
        forecast = read_forecast(run_dir)
    return None if forecast is None else compare_with_run(forecast, steps, bottleneck)

"""Makes and stores the forecast of a run. forecast.json in the run's folder holds it.

Invariants:
- The file is written before the run's first step, and no later start replaces it.
- It belongs to the job that the folder's run has: one for other settings is replaced or removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
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
from staleflow.stores.errors import StaleflowError, StoreError, raised_as
from staleflow.stores.files import replace_text
from staleflow.tasks.emulation.workload import RecordedWorkload

FORECAST_FILE = "forecast.json"
START_LIMIT_S = 10.0
"""Most seconds that a starting run simulates itself, while its processes start; `staleflow plan` has no limit."""
MAX_SEED = 2**31
"""Limit of a job's seed."""


class ForecastTooSlow(StaleflowError):
    """The simulations of a forecast took too long."""


def make_forecast(
    config: RunConfig, basis: str, job_digest: str, limit_s: float = math.inf, stop_event: threading.Event | None = None
) -> Forecast:
    """Forecast a run from simulations with seeds other than its own.

    Args:
        config: The job, with measured times; see `simulation.cost_error`.
        basis: The origin of these times, for display.
        job_digest: `settings_digest` of the job that will run.
        limit_s: Most seconds to simulate.
        stop_event: Stops the simulations when it is set; None: nothing does.

    Raises:
        ForecastTooSlow: The limit was reached, or the simulations were stopped.
        ConfigError, StoreError: The recorded responses cannot be read.
    """
    end_s = time.monotonic() + limit_s

    def check_time(*_: object) -> None:
        if stop_event is not None and stop_event.is_set():
            raise ForecastTooSlow("the run ended before its simulations")
        if time.monotonic() > end_s:
            raise ForecastTooSlow(
                f"its simulations take more than {limit_s:g} s; `staleflow plan` makes one before the run"
            )

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
        trace = SimulatedRun(seeded, workload, observe=check_time).run()
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
    """Digest of all settings of a job except paths, by which a forecast is known to be the job's."""
    values = {row.key: row.value for row in knob_tree.explain_values(config)}
    return hashlib.sha256(repr({k: v for k, v in values.items() if "/" not in str(v)}).encode()).hexdigest()[:16]


def write_forecast(run_dir: Path, forecast: Forecast) -> None:
    """Store a forecast in a run's folder. Raises StoreError."""
    replace_text(run_dir / FORECAST_FILE, json.dumps(CODEC.encode(forecast), indent=1) + "\n", DISK_REMEDY)


def read_forecast(run_dir: Path) -> Forecast | None:
    """Read the forecast of a run; None if there is none. Raises StoreError."""
    return read_json_file(run_dir / FORECAST_FILE, Forecast, "remove it to continue without a forecast")


def prepare_forecast(config: RunConfig, job_digest: str, stop_event: threading.Event | None = None) -> str:
    """Make the forecast of a run that starts, unless it was planned: if its job has measured times.

    Args:
        config: The job.
        job_digest: Its `settings_digest`.
        stop_event: As in `make_forecast`.

    Returns:
        A line for the user; empty if there is nothing to say.
    """
    try:
        planned = read_forecast(config.run_dir)
        if planned is not None and planned.job == job_digest:
            return ""
        (config.run_dir / FORECAST_FILE).unlink(missing_ok=True)
        if config.simulation.cost_error:
            forecast = make_forecast(config, "the times of its profile", job_digest, START_LIMIT_S, stop_event)
            write_forecast(config.run_dir, forecast)
    except Exception as error:  # noqa: BLE001  of strategies, too; a run does not need its forecast
        return f"no forecast of this run: {error}"
    return "" if planned is None else "the forecast in the run's folder was for other settings, and was removed"


def compare_forecast(run_dir: Path, steps: Sequence[Mapping[str, float]], bottleneck: str) -> ForecastComparison | None:
    """Compare a run with the forecast in its folder; None if it has none. Raises StoreError if it cannot be read.

    Args:
        steps: Metrics of its stored steps.
        bottleneck: The cause in its diagnosis; empty if unknown.
    """
    with raised_as(StoreError, "not compared with its forecast", StoreError):
        forecast = read_forecast(run_dir)
    return None if forecast is None else compare_with_run(forecast, steps, bottleneck)

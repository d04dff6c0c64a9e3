"""Forecasts a run before it starts, from measured times."""

from __future__ import annotations

from pathlib import Path

from staleflow.pipeline.api.job_loading import Job, JobSource, load_job
from staleflow.pipeline.api.stored_run import Run
from staleflow.pipeline.config import user_files
from staleflow.pipeline.config.knob_tree import Overrides
from staleflow.pipeline.jobs import forecasting
from staleflow.pipeline.profiling.run_profile import make_recorded_overrides, profile_run
from staleflow.pipeline.recovery.run_folder import create_and_lock, require_no_run
from staleflow.pipeline.simulator.run_forecast import Forecast
from staleflow.stores.errors import ConfigError


def plan(
    job: JobSource, *, measured_in: str | Path | Run | None = None, overrides: Overrides | None = None
) -> Forecast:
    """Forecast a run: seconds per step, tokens per second, mean lag, total time and tokens, each with a 90 % interval,
    and its bottleneck. The forecast is stored in the run's folder, where the run compares it with what it measures.

    Args:
        job: The path of a job file, a nested mapping or a Job.
        measured_in: A finished run of a similar job on the same machines, by its folder or as a Run, whose times are
            used; and its responses, if the job has a model. By default the times are those of the job's `profile`.
        overrides: Values that replace the job's, as in `load_job`.

    Returns:
        The forecast; `forecast.lines` are for display.

    Raises:
        ConfigError: The job has a mistake, nothing is measured, or the run has begun.
    """
    config = user_files.with_absolute_paths(load_job(job, overrides))
    require_no_run(config.run_dir)
    measured, basis = config, "the times of its profile"
    if measured_in is not None:
        run_dir = measured_in.path if isinstance(measured_in, Run) else Path(measured_in).resolve()
        measured, basis = _with_times(config, run_dir), f"the times of {run_dir.name}"
    if not measured.simulation.cost_error:
        raise ConfigError(
            "nothing is measured: name a finished run of a similar job with --from RUN, or set profile = FILE, which "
            "`staleflow profile RUN` writes"
        )
    forecast = forecasting.make_forecast(measured, basis, forecasting.settings_digest(config))
    with create_and_lock(config.run_dir):
        require_no_run(config.run_dir)
        forecasting.write_forecast(config.run_dir, forecast)
    return forecast


def _with_times(config: Job, run_dir: Path) -> Job:
    """A job with the measured times of a run; and with its responses, if the job has a model. Raises ConfigError."""
    overrides = make_recorded_overrides(run_dir, profile_run(run_dir))
    is_random = config.emulated  # then [workload] draws its responses, in the run too
    return load_job(config, [text for text in overrides if not (is_random and text.startswith("workload."))])

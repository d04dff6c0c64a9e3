"""Inputs of a simulation from a stored run, and the assumptions where nothing was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from staleflow.pipeline.api.stored_run import open_run
from staleflow.pipeline.config.emulation import SimulationConfig
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.simulated_effect import make_recorded_overrides
from staleflow.pipeline.profiling.diagnosis import max_versions_behind
from staleflow.pipeline.profiling.run_profile import profile_run
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.simulator.analysis import steady_tokens_per_s
from staleflow.stores.errors import ConfigError
from staleflow.stores.metrics import tokens_per_s
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import WorkloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A stored run as input of simulations."""

    overrides: tuple[str, ...]
    """The run's responses and measured times, as overrides of its job."""
    note: str
    """What was measured, or why nothing was, in one line."""


def recorded_run(run_dir: Path) -> RecordedRun:
    """Read a stored run's responses and measured times for a simulation. Raises ConfigError, StoreError."""
    steps = [step.metrics for step in open_run(run_dir).steps()]
    try:
        profile = profile_run(run_dir)
    except ConfigError as error:
        overrides = ("workload.kind=recorded", f"workload.run={json.dumps(str(run_dir))}")
        return RecordedRun(overrides=overrides, note=f"{error}; using the job's [rollout.cost] and [simulation]")
    job = load_job(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    histogram = summary["staleness_histogram"]
    shares = " ".join(f"{n / max(1, sum(histogram.values())):.0%}" for n in histogram.values())
    scale = job.rollout.engine.time_scale  # an emulated run may be faster than its cost model
    wall_s = summary["seconds"]["wall_s"] * scale
    eta = max_versions_behind(job)
    note = (
        f"the run itself: {steady_tokens_per_s(steps, eta) / scale:,.0f} tokens/s, "
        f"{tokens_per_s(steps) / scale:,.0f} with warm-up and end, {wall_s:.1f} s for "
        f"{summary['steps']} steps, staleness {', '.join(histogram)}: {shares}"
    )
    return RecordedRun(overrides=make_recorded_overrides(run_dir, profile), note=note)


def assumptions(config: RunConfig) -> str:
    """One line on the settings that a job leaves at defaults, which were measured with another model and machine, and
    how to measure them; empty if there are none."""
    cost, default = config.rollout.cost, CostModel()
    assumed = []
    if all(getattr(cost, key) == getattr(default, key) for key in ("k1", "k2", "k3", "k4", "b", "prefill")):
        assumed.append("decode steps of a 7B model (rollout.cost)")
    for key in ("train_s", "pull_s", "reward_s"):
        value = getattr(config.simulation, key)
        if value == getattr(SimulationConfig(), key):
            assumed.append(f"simulation.{key} = {value:g}")
    if config.workload == WorkloadConfig():
        assumed.append(f"responses of {config.workload.median:g} tokens in the median (workload)")
    if not assumed:
        return ""
    measure = "a run of some ten steps measures all: then staleflow simulate --from RUN"
    profile = Path(f"profiles/{config.name}-run.json")
    if (config.run_dir / "summary.json").is_file():
        measure = f"this job has run, with all of them measured: staleflow simulate --from {config.run_dir}"
    elif profile.is_file():
        measure = f"there is a profile of this job: set profile={profile}"
    return f"assumed, not measured: {', '.join(assumed)}; {measure}"

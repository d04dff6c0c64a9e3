"""Estimates the effect of a change of a run: simulates the run with its own responses, decode steps and latencies, once
without and once with the change."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.profiling.diagnosis import Cause, Diagnosis, diagnose_trainer
from staleflow.pipeline.profiling.run_profile import Profile
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.errors import StaleflowError

MAX_CPU_S = 2.0
"""Processor seconds that each of the two simulations may take at the end of a run."""
LOSS_RATIO = 0.95
"""Ratio below which a change is reported as a loss."""
GAIN_RATIO = 1.02
"""Ratio from which a change is reported as a gain."""
MAX_STEPS = 60
"""Maximum number of simulated steps: enough for a steady part at any bound in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEffect:
    """Ratio of tokens per second with a change to those without. command: command that simulates the change."""

    ratio: float | None
    """None if the simulation would take too long, or the run has too little data."""
    command: str

    @property
    def line(self) -> str:
        """The effect as a line of text."""
        if self.ratio is None:
            return f"simulate the effect: {self.command}"
        if LOSS_RATIO <= self.ratio < GAIN_RATIO:
            return f"a simulation of this run expects about the same tokens/s ({self.ratio:.2f} times)"
        prefix = "but " if self.ratio < LOSS_RATIO else ""
        return f"{prefix}a simulation of this run expects {self.ratio:.2f} times its tokens/s"


class _SimulationTooLong(Exception):
    """A simulation takes longer than `max_cpu_s`."""


def make_recorded_overrides(run_dir: Path, profile: Profile) -> tuple[str, ...]:
    """A stored run's responses and measured times, as overrides of its job file."""
    overrides = ["workload.kind=recorded", f"workload.run={json.dumps(str(run_dir))}"]
    cost = profile.draft_stats.cost_model(profile.fit.model)
    overrides += [f"rollout.cost.{name}={value!r}" for name, value in asdict(cost).items()]
    if profile.draft_stats.acceptance is not None:
        overrides.append(f"workload.acceptance_rate={profile.draft_stats.acceptance!r}")
    overrides += [f"simulation.{name}={value!r}" for name, value in profile.latencies.items()]
    if "straggler_share" not in profile.latencies:  # the measured latencies include slow instances
        overrides.append("simulation.straggler_share=0.0")
    if "train_s" in profile.latencies:  # the measured time is that of a mean step
        overrides.append("simulation.train_s_per_token=0.0")
    return tuple(overrides)


def check_by_simulation(
    run_dir: Path, profile: Profile | None, diagnosis: Diagnosis, instances: int, max_cpu_s: float = MAX_CPU_S
) -> tuple[Diagnosis, SimulatedEffect]:
    """Diagnose a run with this number of instances, and simulate the diagnosis's advice. Instances that the simulation
    needs are not reported as superfluous: long responses, which the diagnosis ignores, may need them."""
    effect = simulate_change(run_dir, profile, diagnosis, max_cpu_s)
    while diagnosis.cause is Cause.MANY_INSTANCES and effect.ratio is not None and effect.ratio < LOSS_RATIO:
        num_instances = int(dict(diagnosis.change)["rollout.instances"])
        diagnosis = diagnose_trainer(diagnosis.share, (num_instances + instances + 1) // 2, instances)
        effect = simulate_change(run_dir, profile, diagnosis, max_cpu_s)
    return diagnosis, effect


def simulate_change(
    run_dir: Path, profile: Profile | None, diagnosis: Diagnosis, max_cpu_s: float = MAX_CPU_S
) -> SimulatedEffect:
    """Simulate the change that a diagnosis advises, and return its effect."""
    changes = [f"{key}={json.dumps(value)}" for key, value in diagnosis.change]
    if profile is None:
        return SimulatedEffect(ratio=None, command=_make_command(run_dir, changes))
    try:
        config = load_job(run_dir, make_recorded_overrides(run_dir, profile))
        # Responses are recorded ones, so settings of the workload have no effect.
        halved_keys = [key for key in diagnosis.halved_keys if not key.startswith("workload.")]
        changes += [f"{key}={_get_setting(config, key) / 2!r}" for key in halved_keys if _get_setting(config, key)]
        run_values = [f"{key}={json.dumps(value)}" for key, value in diagnosis.run_values]
        command = _make_command(run_dir, [*run_values, *changes])
        if not changes:
            return SimulatedEffect(ratio=None, command=command)
        settings = (*make_recorded_overrides(run_dir, profile), f"steps={min(config.steps, MAX_STEPS)}", *run_values)
        rates = [
            _tokens_per_s(load_job(run_dir, (*settings, *more_overrides)), max_cpu_s)
            for more_overrides in ((), changes)
        ]
    except (StaleflowError, _SimulationTooLong):
        return SimulatedEffect(ratio=None, command=_make_command(run_dir, changes))
    return SimulatedEffect(ratio=rates[1] / rates[0] if rates[0] else None, command=command)


def _get_setting(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _make_command(run_dir: Path, changes: list[str]) -> str:
    return " ".join(["staleflow simulate --from", str(run_dir), *(f"--set {override}" for override in changes)])


def _tokens_per_s(config: RunConfig, max_cpu_s: float) -> float:
    """Steady tokens per second of a simulation. Raises _SimulationTooLong."""
    started_s = time.process_time()

    def check_cpu_time(*_: object) -> None:
        if time.process_time() - started_s > max_cpu_s:
            raise _SimulationTooLong

    trace = SimulatedRun(config, actor_settings.make_workload(config), observe=check_cpu_time).run()
    return compute_stats(config, trace).steady_tokens_per_s

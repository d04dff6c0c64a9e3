"""Simulates a change of a run: with the run's own responses, decode steps and latencies, once without and once with the
change."""

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
from staleflow.pipeline.simulator.analysis import measure
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.errors import StaleflowError

BUDGET_S = 2.0
"""Processor seconds that each of the two simulations may take at the end of a run."""
WORSE = 0.95
"""Ratio below which a change is said not to be worth it."""
BETTER = 1.02
"""Ratio from which on a change is said to bring something."""
MAX_STEPS = 60
"""Most steps simulated: enough for a steady part at any bound in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Ratio of tokens per second with a change to those without. command: command that simulates the change."""

    ratio: float | None
    """None if the simulation would take too long or the run says too little."""
    command: str

    @property
    def line(self) -> str:
        if self.ratio is None:
            return f"see what it would bring: {self.command}"
        if WORSE <= self.ratio < BETTER:
            return f"a simulation of this run expects about the same tokens/s ({self.ratio:.2f} times)"
        but = "but " if self.ratio < WORSE else ""
        return f"{but}a simulation of this run expects {self.ratio:.2f} times the tokens/s of it"


class _TooLong(Exception):
    """A simulation takes longer than it may."""


def as_recorded(run_dir: Path, profile: Profile) -> tuple[str, ...]:
    """A stored run's responses and measured times, as overrides of its job file."""
    overrides = ["workload.kind=recorded", f"workload.run={json.dumps(str(run_dir))}"]
    cost = profile.drafts.cost(profile.fit.model)
    overrides += [f"rollout.cost.{name}={value!r}" for name, value in asdict(cost).items()]
    if profile.drafts.acceptance is not None:
        overrides.append(f"workload.acceptance_rate={profile.drafts.acceptance!r}")
    overrides += [f"simulation.{name}={value!r}" for name, value in profile.latencies.items()]
    if "straggler_share" not in profile.latencies:  # as slow as they were, all of them
        overrides.append("simulation.straggler_share=0.0")
    if "train_s" in profile.latencies:  # the mean step, of mean tokens
        overrides.append("simulation.train_s_per_token=0.0")
    return tuple(overrides)


def check_by_simulation(
    run_dir: Path, profile: Profile | None, diagnosis: Diagnosis, instances: int, budget_s: float = BUDGET_S
) -> tuple[Diagnosis, WhatIf]:
    """Diagnose a run with this number of instances, and simulate the diagnosis's advice. Instances that the simulation
    needs are not reported as superfluous: long responses, which the diagnosis ignores, may need them."""
    expected = expect(run_dir, profile, diagnosis, budget_s)
    while diagnosis.cause is Cause.MANY_INSTANCES and expected.ratio is not None and expected.ratio < WORSE:
        num_instances = int(dict(diagnosis.change)["rollout.instances"])
        diagnosis = diagnose_trainer(diagnosis.share, (num_instances + instances + 1) // 2, instances)
        expected = expect(run_dir, profile, diagnosis, budget_s)
    return diagnosis, expected


def expect(run_dir: Path, profile: Profile | None, diagnosis: Diagnosis, budget_s: float = BUDGET_S) -> WhatIf:
    """Simulate the change that a diagnosis advises, and return its effect."""
    changed = [f"{key}={json.dumps(value)}" for key, value in diagnosis.change]
    if profile is None:
        return WhatIf(ratio=None, command=_command(run_dir, changed))
    try:
        before = load_job(run_dir, as_recorded(run_dir, profile))
        known = [
            key for key in diagnosis.halved_keys if not key.startswith("workload.")
        ]  # the responses are recorded ones
        changed += [f"{key}={_value(before, key) / 2!r}" for key in known if _value(before, key)]
        injected = [f"{key}={json.dumps(value)}" for key, value in diagnosis.run_values]
        command = _command(run_dir, [*injected, *changed])
        if not changed:
            return WhatIf(ratio=None, command=command)
        settings = (*as_recorded(run_dir, profile), f"steps={min(before.steps, MAX_STEPS)}", *injected)
        rates = [_tokens_per_s(load_job(run_dir, (*settings, *more)), budget_s) for more in ((), changed)]
    except (StaleflowError, _TooLong):
        return WhatIf(ratio=None, command=_command(run_dir, changed))
    return WhatIf(ratio=rates[1] / rates[0] if rates[0] else None, command=command)


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _command(run_dir: Path, changed: list[str]) -> str:
    return " ".join(["staleflow simulate --from", str(run_dir), *(f"--set {override}" for override in changed)])


def _tokens_per_s(config: RunConfig, budget_s: float) -> float:
    """Steady tokens per second of a simulation. Raises _TooLong."""
    started_s = time.process_time()

    def check(*_: object) -> None:
        if time.process_time() - started_s > budget_s:
            raise _TooLong

    trace = SimulatedRun(config, actor_settings.make_workload(config), observe=check).run()
    return measure(config, trace).steady_tokens_per_s

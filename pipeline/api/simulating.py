"""Simulates jobs in virtual time: one job, variants of it, stored runs, and admission rules of other systems."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.api.job_loading import Job, JobSource, load_job, override_texts
from staleflow.pipeline.api.stored_run import Run, open_run
from staleflow.pipeline.config import actor_settings, knob_tree
from staleflow.pipeline.config.knob_tree import Overrides
from staleflow.pipeline.config.schema import RunConfig, SimulationConfig
from staleflow.pipeline.processes.local_cluster import context_without_main
from staleflow.pipeline.profiling.diagnosis import max_versions_behind
from staleflow.pipeline.profiling.run_profile import make_recorded_overrides, profile_run
from staleflow.pipeline.recovery.run_folder import load_job as load_stored_job
from staleflow.pipeline.simulator.analysis import (
    SimulationStats,
    Trace,
    compute_stats,
    explain_step_time,
    steady_tokens_per_s,
)
from staleflow.pipeline.simulator.baselines import baseline_rules, with_admission
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.errors import ActorLost, ConfigError
from staleflow.stores.metrics import tokens_per_s
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import WorkloadConfig

BASELINE_OVERRIDES = ("rollout.synchronization=greedy",)
"""What distinguishes baselines from the job besides their admission rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVariant:
    """A variant of a job, to be simulated."""

    label: str
    overrides: tuple[str, ...]
    """What distinguishes it from the job: texts `key=value`."""
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of simulating a variant of a job."""

    variant: JobVariant
    stats: SimulationStats
    """Times, idle shares, staleness and drops."""
    trace: Trace
    """Everything that happened, in virtual time."""

    @property
    def label(self) -> str:
        """Name of the variant."""
        return self.variant.label

    def explanation(self) -> list[str]:
        """Lines that explain the time of a step, compared with the lower bound on it."""
        return explain_step_time(self.stats)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, without the trace."""
        stats = self.stats
        return {
            "row": self.label,
            "overrides": list(self.variant.overrides),
            **asdict(stats),
            "bound_s": stats.step_time_bound.step_s,
            "of_bound": stats.share_of_step_time_bound,
            "diagnosis": None if stats.diagnosis is None else stats.diagnosis.as_dict(),
        }

    def __str__(self) -> str:
        stats = self.stats
        return (
            f"{self.label}: {stats.steady_tokens_per_s:,.0f} tokens/s, {stats.step_s:.1f} s a step, "
            f"{stats.share_of_step_time_bound:.0%} of the bound, trainer idle {stats.trainer_idle_share:.0%}, "
            f"rollout idle {stats.rollout_idle_share:.0%}"
        )

    def __repr__(self) -> str:
        return f"<SimulationResult {self}>"


def simulate(
    job: JobSource | Run,
    *,
    overrides: Overrides | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    baselines: bool = False,
) -> list[SimulationResult]:
    """Run a job in virtual time, to find out how long it would take. Uses no GPU.

    Args:
        job: The path of a job file, a nested mapping or a Job; or a stored run, by its folder or as a Run, whose
            responses and measured times the simulation repeats.
        overrides: Values that replace the job's, as in `load_job`.
        sweep: Values to try, by key with dots, such as `{"staleness.eta": [0, 1, 2]}`; of several keys all
            combinations. A value may be a function or class.
        baselines: Whether to add other systems' admission rules, at the same bound.

    Returns:
        One result for each variant, in order; the first is the job itself if nothing is swept.

    Raises:
        ConfigError: The job has a mistake.
        ActorLost: A simulation's process was killed.
    """
    changes = override_texts(overrides)
    if isinstance(job, (str, Path)) and (Path(job) / "store").exists():
        job = open_run(job)
    if isinstance(job, Run):
        changes = (*recorded_overrides(job.path)[0], *changes)
        load = functools.partial(load_stored_job, job.path)
    else:
        load = functools.partial(load_job, job)
    return list(simulate_variants(make_variants(load, changes, sweep, baselines)))


def make_variants(
    load: Callable[[tuple[str, ...]], Job],
    overrides: tuple[str, ...],
    sweep: Mapping[str, Sequence[Any]] | None,
    baselines: bool,
) -> list[JobVariant]:
    """The variants of a job to simulate.

    Args:
        load: Loads the job with overrides.
        overrides: Those of all variants.
        sweep: As in `simulate`.
        baselines: As in `simulate`.

    Raises:
        ConfigError: The job has a mistake.
    """
    results = [
        JobVariant(label=label, overrides=changes, job=load((*overrides, *changes)))
        for label, changes in sweep_combinations(sweep or {})
    ]
    if baselines:
        job = load((*overrides, *BASELINE_OVERRIDES))
        rules = baseline_rules(job.staleness.eta)
        results += [
            JobVariant(label=label, overrides=BASELINE_OVERRIDES, job=with_admission(job, rule))
            for label, rule in rules.items()
        ]
    return results


def sweep_combinations(sweep: Mapping[str, Sequence[Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """Label and overrides of each combination of swept values; without swept values, those of the unchanged job.

    >>> sweep_combinations({"staleness.eta": [0, 1]})
    [('eta=0', ('staleness.eta=0',)), ('eta=1', ('staleness.eta=1',))]
    """
    lists = sweep.values() if isinstance(sweep, Mapping) else [None]
    if any(isinstance(values, str) or not isinstance(values, Iterable) for values in lists):
        raise ConfigError(f'sweep = {sweep!r}: expected lists of values by key, such as {{"staleness.eta": [0, 1]}}')
    axes = [[_format_change(key, value) for value in values] for key, values in sweep.items()]
    if not axes:
        return [("the job", ())]
    return [
        (" ".join(label for label, _ in choices), tuple(change for _, change in choices))
        for choices in itertools.product(*axes)
    ]


def _format_change(key: str, value: Any) -> tuple[str, str]:
    """`key=value` without the table names of the key, and the override that sets it. Raises ConfigError."""
    name = key.rpartition(".")[2]
    if callable(value):
        return f"{name}={getattr(value, '__name__', name)}", override_texts({key: value})[0]
    text = value if isinstance(value, str) else knob_tree.toml_value(value)
    return f"{name}={text}", f"{key}={text}"


def simulate_variants(variants: Sequence[JobVariant]) -> Iterator[SimulationResult]:
    """Simulate variants, one process per core. Yields their results in order. Raises ActorLost."""
    if len(variants) == 1:
        yield _simulate_variant(variants[0])
        return
    # Not forked: a store opened here has threads, whose locks would stay locked forever in a fork.
    context = context_without_main(multiprocessing.get_context("spawn"))
    with ProcessPoolExecutor(min(len(variants), os.cpu_count() or 1), context) as pool:
        try:
            yield from pool.map(_simulate_variant, variants)
        except BrokenProcessPool as error:
            raise ActorLost(
                "a simulation process was killed, perhaps for its memory; sweep fewer values or simulate fewer steps"
            ) from error


def _simulate_variant(variant: JobVariant) -> SimulationResult:
    """Simulate one variant. Picklable, to run in a worker process."""
    trace = SimulatedRun(variant.job, actor_settings.make_workload(variant.job)).run()
    return SimulationResult(variant=variant, stats=compute_stats(variant.job, trace), trace=trace)


def recorded_overrides(run_dir: Path) -> tuple[tuple[str, ...], str]:
    """Read a stored run's responses and measured times for a simulation. Raises ConfigError, StoreError.

    Returns:
        The responses and times, as overrides of its job; and what was measured, or why nothing was, in one line.
    """
    steps = [step.metrics for step in open_run(run_dir).steps()]
    try:
        profile = profile_run(run_dir)
    except ConfigError as error:
        overrides = ("workload.kind=recorded", f"workload.run={knob_tree.toml_value(str(run_dir))}")
        return overrides, f"{error}; using the job's [rollout.cost] and [simulation]"
    job = load_stored_job(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
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
    return make_recorded_overrides(run_dir, profile), note


def describe_assumptions(config: RunConfig) -> str:
    """One line on the settings that a job leaves at defaults, which were measured with another model and machine, and
    how to measure them; empty if there are none."""
    cost, default = config.rollout.cost, CostModel()
    assumptions = []
    if all(getattr(cost, key) == getattr(default, key) for key in ("k1", "k2", "k3", "k4", "b", "prefill")):
        assumptions.append("decode steps of a 7B model (rollout.cost)")
    for key in ("train_s", "pull_s", "reward_s"):
        value = getattr(config.simulation, key)
        if value == getattr(SimulationConfig(), key):
            assumptions.append(f"simulation.{key} = {value:g}")
    if config.workload == WorkloadConfig():
        assumptions.append(f"responses of {config.workload.median:g} tokens in the median (workload)")
    if not assumptions:
        return ""
    measure = "a run of some ten steps measures all: then staleflow simulate --from RUN"
    profile = Path(f"profiles/{config.name}-run.json")
    if (config.run_dir / "summary.json").is_file():
        measure = f"this job has run, with all of them measured: staleflow simulate --from {config.run_dir}"
    elif profile.is_file():
        measure = f"there is a profile of this job: set profile={profile}"
    return f"assumed, not measured: {', '.join(assumptions)}; {measure}"

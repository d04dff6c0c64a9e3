"""The diagnosis of a run finds planted causes, in simulation and in driver runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.simulated_effect import LOSS_RATIO, SimulatedEffect, check_by_simulation, simulate_change
from staleflow.pipeline.jobs.summary import make_diagnosis_entry
from staleflow.pipeline.profiling.diagnosis import Cause, compute_sizes, diagnose
from staleflow.pipeline.profiling.run_profile import profile_run
from staleflow.pipeline.profiling.step_times import StepTimes
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from tests.support.bodies import Body
from tests.support.scripted import World
from tests.support.simulated_store import stored_simulation

JOB = "examples/dryrun.toml"
PLANTED = {
    Cause.REWARD: ("simulation.reward_s=20.0", "rollout.instances=8"),
    Cause.ENVIRONMENT: (
        "rollout.instances=8",
        "task.multi_turn=yes",
        "workload.kind=agentic",
        "workload.tool_s=20.0",
        "workload.tool_latency=constant",
        "environment.concurrency=10000",
        "workload.turns=3",
    ),
    Cause.ENVIRONMENT_SLOTS: (
        "rollout.instances=8",
        "task.multi_turn=yes",
        "workload.kind=agentic",
        "workload.tool_s=5.0",
        "workload.tool_latency=constant",
        "environment.hosts=2",
        "environment.concurrency=8",
        "workload.turns=3",
    ),
    Cause.SLOW_INSTANCE: ("rollout.instances=8", "simulation.straggler_share=0.125", "simulation.straggler_factor=4"),
    Cause.FEW_INSTANCES: ("rollout.instances=1",),
    Cause.MANY_INSTANCES: ("rollout.instances=16", "simulation.train_s=6.0"),
    Cause.KV_MEMORY: ("rollout.engine.kv_tokens=3000",),
    Cause.TRAINER: ("simulation.train_s=30.0",),
    Cause.BOUND: ("rollout.instances=8", "staleness.eta=0"),
    Cause.WEIGHTS: ("rollout.instances=2", "simulation.pull_s=15.0"),
}
"""Changes to the example that plant each cause."""


def simulated_config(*overrides: str) -> RunConfig:
    return loading.load(JOB, ("steps=10", "batch.group_size=4", *overrides))


@pytest.mark.parametrize("cause", PLANTED, ids=lambda cause: cause.value)
def test_a_planted_cause_is_found_in_a_simulation_and_its_advice_helps(cause: Cause) -> None:
    config = simulated_config(*PLANTED[cause])
    measures = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run())
    diagnosis = measures.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.line) == (cause, diagnosis.line)
    assert diagnosis.line.count("\n") == 0
    assert f"bottleneck: {cause.value} (trainer" in diagnosis.short
    halved = [f"{key}={_value(config, key) / 2}" for key in diagnosis.halved_keys]
    cured = simulated_config(*PLANTED[cause], *(f"{key}={value}" for key, value in diagnosis.change), *halved)
    then = compute_stats(cured, SimulatedRun(cured, actor_settings.make_workload(cured)).run())
    gain = then.steady_tokens_per_s / measures.steady_tokens_per_s
    if cause is Cause.MANY_INSTANCES:  # instances reported as unnecessary are unnecessary
        assert gain > 0.97
        assert cured.rollout.instances < config.rollout.instances / 2
    else:
        assert gain > 1.1


def _value(config: RunConfig, key: str) -> float:
    table, _, name = key.partition(".")
    return float(getattr(getattr(config, table), name))


def test_diagnose_returns_none_without_steps() -> None:
    assert diagnose(StepTimes(), compute_sizes(simulated_config())) is None


def test_a_synchronous_run_is_advised_to_use_staleflow_admission() -> None:
    config = simulated_config("staleness.admission=synchronous")
    diagnosis = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.advice) == (Cause.BOUND, 'staleness.admission = "staleflow"')


# -- runs of the driver ------------------------------------------------------------------------------------------

SMALL = ("steps=8", "batch.groups_per_step=4", "staleness.eta=1")


def even(trajectory: int) -> int:
    return 20


DRIVEN: dict[Cause, tuple[tuple[str, ...], Callable[[], World]]] = {
    Cause.REWARD: ((), lambda: World(length=even, reward_s=2.0, train_s=0.2)),
    Cause.SLOW_INSTANCE: (
        ("rollout.instances=4", "steps=16"),
        lambda: World(length=even, train_s=0.2, slower=lambda name: 4.0 if name == "rollout-2" else 1.0),
    ),
    Cause.FEW_INSTANCES: (("rollout.instances=1", "rollout.engine.max_running=2"), lambda: World(length=even)),
    Cause.MANY_INSTANCES: (("rollout.instances=16", "rollout.engine.max_running=1"), lambda: World(length=even)),
    Cause.KV_MEMORY: (
        ("rollout.engine.kv_tokens=64", "rollout.max_new_tokens=50", "rollout.engine.max_running=16"),
        lambda: World(length=even, train_s=0.2),
    ),
    Cause.TRAINER: ((), lambda: World(length=even, train_s=30.0)),
}


@pytest.mark.parametrize("cause", DRIVEN, ids=lambda cause: cause.value)
def test_a_planted_cause_is_found_by_the_driver(tmp_path: Path, cause: Cause) -> None:
    overrides, make_world = DRIVEN[cause]
    # The engine of these runs has a constant time per token.
    cost = tuple(f"rollout.cost.{name}=0.0" for name in ("k1", "k3", "k4", "b", "prefill"))
    run = Body(tmp_path).run(*SMALL, *cost, "rollout.cost.k2=0.05", *overrides, world=make_world())
    run.check()
    diagnosis = run.outcomes.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.line) == (cause, diagnosis.line)
    steps = run.config.steps
    assert sorted(run.outcomes.bottlenecks) == list(range(steps))
    # In the last eta + 1 steps no new work starts, and they wait for other things.
    assert run.outcomes.bottlenecks[steps - 3].startswith(f"bottleneck: {cause.value} (trainer ")


# -- what a change would bring -----------------------------------------------------------------------------------


def test_a_simulation_predicts_the_effect_of_the_advice(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "steps=14", *PLANTED[Cause.FEW_INSTANCES])
    config = load_job(run)
    diagnosis = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
    assert diagnosis is not None
    expected = simulate_change(run, profile_run(run), diagnosis, max_cpu_s=60.0)
    assert expected.ratio == pytest.approx(1.9, abs=0.2)
    assert expected.command == f"staleflow simulate --from {run} --set rollout.instances=2"
    text = make_diagnosis_entry(diagnosis, expected)
    assert text["cause"] == "too few instances"
    assert text["line"].endswith(f"a simulation of this run expects {expected.ratio:.2f} times its tokens/s")


@pytest.mark.parametrize(
    ("ratio", "line"),
    [
        (0.94, "but a simulation of this run expects 0.94 times its tokens/s"),
        (1.004, "a simulation of this run expects about the same tokens/s (1.00 times)"),
        (1.02, "a simulation of this run expects 1.02 times its tokens/s"),
        (None, "simulate the effect: staleflow simulate"),
    ],
)
def test_an_advice_without_effect_is_reported_as_such(ratio: float | None, line: str) -> None:
    assert SimulatedEffect(ratio=ratio, command="staleflow simulate").line == line


def test_many_instances_is_not_diagnosed_if_a_simulation_needs_them(tmp_path: Path) -> None:
    """Five instances would sample as much on average, but the tails need eight to keep the trainer busy."""
    run = stored_simulation(tmp_path, "steps=14", "rollout.instances=8", "simulation.train_s=5.0")
    config = load_job(run)
    unchecked = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
    assert unchecked is not None
    assert unchecked.cause is Cause.MANY_INSTANCES
    profile = profile_run(run)
    at_first = simulate_change(run, profile, unchecked, max_cpu_s=60.0)
    assert at_first.ratio is not None
    assert at_first.ratio < LOSS_RATIO, "the simulation contradicts the averages"
    diagnosis, expected = check_by_simulation(run, profile, unchecked, 8, max_cpu_s=60.0)
    assert expected.ratio is not None
    assert expected.ratio >= LOSS_RATIO
    line = make_diagnosis_entry(diagnosis, expected)["line"]
    assert "but" not in line
    assert diagnosis.cause is Cause.TRAINER or "would keep up: rollout.instances = " in line


def test_a_simulation_over_its_time_budget_is_left_to_the_user(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "steps=4", *PLANTED[Cause.FEW_INSTANCES])
    config = load_job(run)
    diagnosis = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
    assert diagnosis is not None
    for profile, budget_s in ((profile_run(run), 0.0), (None, 60.0)):
        expected = simulate_change(run, profile, diagnosis, budget_s)
        assert expected.ratio is None
        assert expected.line == (f"simulate the effect: staleflow simulate --from {run} --set rollout.instances=2")

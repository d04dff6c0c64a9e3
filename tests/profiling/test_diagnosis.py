"""The diagnosis of a run finds planted causes, in simulation and in driver runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.summary import make_diagnosis_entry
from staleflow.pipeline.profiling.diagnosis import Cause, diagnose, make_job_speed, num_instances_needed
from staleflow.pipeline.profiling.step_times import PeriodTimes, StepTimes
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from tests.support.bodies import Body
from tests.support.scripted import World

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
HALVED = {
    Cause.REWARD: ("simulation.reward_s",),
    Cause.ENVIRONMENT: ("workload.tool_s",),
    Cause.WEIGHTS: ("simulation.pull_s",),
    Cause.TRAINER: ("simulation.train_s", "simulation.train_s_per_token"),
}
"""Times that are halved where the advice is to shorten them."""


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
    assert f"bottleneck: {cause.value} (trainer" in diagnosis.short_line
    halved = [f"{key}={_value(config, key) / 2}" for key in HALVED.get(cause, ())]
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
    assert diagnose(StepTimes(), make_job_speed(simulated_config())) is None


def test_instances_do_not_sample_while_they_load_weights() -> None:
    costs = make_job_speed(simulated_config("rollout.instances=64"))

    def num_needed(total_s: float, pull_s: float) -> int:
        training = PeriodTimes(total_s=total_s, pull_s=pull_s)
        return num_instances_needed(StepTimes(num_steps=1, training=training, num_tokens=400_000), costs)

    assert 1 < num_needed(100.0, 0.0) < num_needed(100.0, 50.0) == num_needed(50.0, 0.0) < 64


def test_a_synchronous_run_is_advised_to_use_staleflow_admission() -> None:
    config = simulated_config("staleness.admission=synchronous")
    diagnosis = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.advice) == (Cause.BOUND, 'staleness.admission = "staleflow"')


# -- runs of the driver ------------------------------------------------------------------------------------------

SMALL = ("steps=8", "batch.groups_per_step=4", "staleness.eta=1")


def even(trajectory: int) -> int:
    return 20


def varied(trajectory: int) -> int:
    return 15 + trajectory % 11


DRIVEN: dict[Cause, tuple[tuple[str, ...], Callable[[], World]]] = {
    Cause.REWARD: ((), lambda: World(length=even, reward_s=2.0, train_s=0.2)),
    Cause.SLOW_INSTANCE: (
        ("rollout.instances=4", "steps=16"),
        lambda: World(length=even, train_s=0.2, slower=lambda name: 4.0 if name == "rollout-2" else 1.0),
    ),
    Cause.FEW_INSTANCES: (("rollout.instances=1", "rollout.engine.max_running=2"), lambda: World(length=even)),
    # Responses of one length would leave open which part of their time is prefill.
    Cause.MANY_INSTANCES: (("rollout.instances=16", "rollout.engine.max_running=1"), lambda: World(length=varied)),
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


# -- the summary -------------------------------------------------------------------------------------------------


def test_the_summary_has_the_command_that_simulates_an_advised_change(tmp_path: Path) -> None:
    entries = {}
    for cause in (Cause.FEW_INSTANCES, Cause.REWARD):
        config = simulated_config(*PLANTED[cause])
        diagnosis = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).diagnosis
        assert diagnosis is not None
        entries[cause] = make_diagnosis_entry(diagnosis, tmp_path)
        assert entries[cause]["cause"] == cause.value
        assert entries[cause]["line"].startswith(diagnosis.line)
    command = f"staleflow simulate --from {tmp_path} --set rollout.instances=2"
    assert entries[Cause.FEW_INSTANCES]["command"] == command
    assert entries[Cause.FEW_INSTANCES]["line"].endswith(f"; simulate it: {command}")
    assert entries[Cause.REWARD]["command"] == ""

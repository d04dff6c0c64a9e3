"""Measures of a simulated run: tokens and time count once, and rules are measured by the versions they allow."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.coordination.events import EnvironmentStepped, Event, TrajectoryInterrupted, TrajectorySampled
from staleflow.pipeline.simulator.analysis import compute_stats, explain_step_time
from staleflow.pipeline.simulator.baselines import OneStep, with_admission
from staleflow.pipeline.strategies.admission import Admission, Synchronous
from tests.simulator.test_environments import agents
from tests.simulator.test_simulator import job, run


@pytest.mark.parametrize("command_s", [0.0, 0.05])
@pytest.mark.parametrize("acts", [False, True])
def test_sampled_tokens_are_either_trained_or_wasted(acts: bool, command_s: float) -> None:
    """Counted by the events of the coordinator, which exclude responses aborted while they run."""
    had: dict[int, int] = {}
    reported = 0

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        nonlocal reported
        if isinstance(event, TrajectorySampled | TrajectoryInterrupted):
            reported += event.tokens - had.get(event.trajectory, 0)
            had[event.trajectory] = event.tokens
        elif isinstance(event, EnvironmentStepped):
            had[event.trajectory] = event.tokens

    make = agents if acts else job
    config = make(batch__extra_groups=1, batch__extra_members=1, steps=12, simulation__message_s=command_s)
    trace = run(config, observe=observe)
    measures = compute_stats(config, trace)
    trained = sum(step.tokens for step in trace.steps)
    assert measures.sampled_tokens >= reported > trained
    assert 0 < measures.wasted_tokens == measures.sampled_tokens - trained
    assert measures.wasted_tokens >= reported - trained


def test_tokens_of_lost_instances_are_counted() -> None:
    """Responses are long and their tokens are delivered while they run, so the last event of an instance may be old."""
    changes: dict[str, Any] = {"workload__median": 60.0, "workload__sigma": 0.1, "rollout__max_new_tokens": 100}
    config = job(
        **changes, steps=12, rollout__delivery_interval_s=0.1, simulation__report_s=0.1,
        simulation__mean_loss_interval_s=0.7,
        simulation__replace_s=0.1,
    )  # fmt: skip
    trace = run(config)
    assert trace.instance_losses > 5
    measures = compute_stats(config, trace)
    assert measures.sampled_tokens >= sum(step.tokens for step in trace.steps)


@pytest.mark.parametrize(("admission", "eta"), [(Synchronous(), 0), (OneStep(), 1)])
def test_a_rule_independent_of_eta_is_measured_by_its_versions(admission: Admission, eta: int) -> None:
    greedy = {"rollout__synchronization": "greedy"}  # staggered asks for eta
    own, asked = (with_admission(job(staleness__eta=e, steps=24, **greedy), admission) for e in (eta, 3))
    first, second = (compute_stats(config, run(config)) for config in (own, asked))
    assert (first.finished_s, first.steady_tokens_per_s) == (second.finished_s, second.steady_tokens_per_s)
    assert (first.share_of_step_time_bound, first.step_time_bound) == (
        second.share_of_step_time_bound,
        second.step_time_bound,
    )
    assert any(f"divided by eta + 1 = {eta + 1}" in line for line in explain_step_time(second))

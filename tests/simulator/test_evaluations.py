"""Evaluations during training in virtual time: one version each and no ledger entry, with any faults."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.coordination.commands import Command, FinishEvaluation, Pull, Route, Train
from staleflow.pipeline.coordination.events import EvaluationRequested, Event, InstanceJoined
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.trajectory import is_evaluation
from tests.simulator.test_simulator import job, run
from tests.support.examples import num_examples

EVALUATED = {"evaluation__every": 2, "task__eval_prompts": 10}


class Watch:
    """Follows the version of each instance and the samples of evaluations."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.sampled: dict[int, set[int]] = {}
        """Versions under which each trajectory was routed, by the version of its instance."""
        self.requested: list[EvaluationRequested] = []
        self.concluded: list[FinishEvaluation] = []
        self.trained: set[int] = set()

    def __call__(self, now: float, event: Event, commands: list[Command]) -> None:
        if isinstance(event, InstanceJoined):
            self.versions[event.instance] = event.version
        if isinstance(event, EvaluationRequested):
            self.requested.append(event)
        for command in commands:
            match command:
                case Pull():
                    self.versions[command.instance] = command.version
                case Route():
                    self.sampled.setdefault(command.trajectory, set()).add(self.versions[command.instance])
                case Train():
                    self.trained |= set(command.trajectories)
                case FinishEvaluation():
                    self.concluded.append(command)


def run_with_evaluations(**changes: Any) -> tuple[Watch, Any]:
    watch = Watch()
    config = job(**{**EVALUATED, **changes})
    trace = SimulatedRun(config, actor_settings.make_workload(config), validate_every_event=True, observe=watch).run()
    assert not any(is_evaluation(t) for t in watch.trained)
    for done in watch.concluded:
        if done.abandoned:
            continue
        (groups,) = [e.groups for e in watch.requested if e.evaluation == done.evaluation]
        members = [g.group * config.members_started_per_group for g in groups]
        for member in members:
            assert watch.sampled[member] == {done.version}, "one version from the first token to the last"
    return watch, trace


def test_evaluation_every_two_versions_includes_the_first_and_the_last() -> None:
    watch, trace = run_with_evaluations()
    assert [done.version for done in watch.concluded] == [0, 2, 4, 6, 8]
    assert not any(done.abandoned or done.failed for done in watch.concluded)
    assert trace.evaluated_tokens > 0


def test_a_job_without_evaluations_has_none() -> None:
    assert run(job()).command_counts.keys().isdisjoint({"FinishEvaluation"})


def test_training_continues_during_an_evaluation() -> None:
    """Steps take at most a little longer: the evaluation has a quarter of the slots, and other instances pull as
    usual."""
    plain = run(job(rollout__instances=4, steps=20))
    _, beside = run_with_evaluations(rollout__instances=4, steps=20, evaluation__every=5)
    assert beside.steps[-1].finished_s < 1.15 * plain.steps[-1].finished_s


def test_a_single_instance_is_pinned_no_longer_than_its_tokens_take() -> None:
    """While it cannot pull, no other work needs its slots."""
    setting = {"rollout__instances": 1, "steps": 24, "batch__groups_per_step": 12, "staleness__eta": 1}
    plain = run(job(**setting)).steps[-1].finished_s

    _, beside = run_with_evaluations(**setting, evaluation__every=8, task__eval_prompts=24)
    share = beside.evaluated_tokens / sum(step.tokens for step in beside.steps)
    assert beside.steps[-1].finished_s / plain - 1 < 1.2 * share


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("instances", [1, 3])
def test_evaluations_finish_under_any_bound(eta: int, instances: int) -> None:
    watch, _ = run_with_evaluations(staleness__eta=eta, rollout__instances=instances, evaluation__every=1)
    assert watch.concluded[0].version == 0 and watch.concluded[-1].version == 8


@given(seed=st.integers(0, 2**16), mean_loss_interval_s=st.sampled_from([0.5, 2.0, 8.0]), eta=st.integers(0, 2))
@settings(max_examples=max(6, num_examples() // 40), deadline=None)
def test_evaluations_survive_lost_instances(seed: int, mean_loss_interval_s: float, eta: int) -> None:
    watch, _ = run_with_evaluations(
        seed=seed, simulation__mean_loss_interval_s=mean_loss_interval_s, simulation__replace_s=0.5, staleness__eta=eta,
        rollout__max_attempts=100,
    )  # fmt: skip
    assert watch.concluded[-1].version == 8 and not watch.concluded[-1].abandoned


def test_straggler_truncation_does_not_affect_evaluations() -> None:
    watch, trace = run_with_evaluations(
        batch__stragglers="truncate", batch__stragglers__patience=0.01, batch__stragglers__share=1.0,
        simulation__report_s=0.05, rollout__instances=1, evaluation__every=1,
    )  # fmt: skip
    assert watch.concluded[-1].version == 8
    assert trace.command_counts["Interrupt"] > 0


def test_evaluations_run_multi_turn_episodes() -> None:
    watch, _ = run_with_evaluations(
        workload__kind="agentic", task__multi_turn="yes", workload__turns=3.0, workload__tool_tokens=5,
        workload__tool_s=0.2,
    )  # fmt: skip
    assert [done.version for done in watch.concluded] == [0, 2, 4, 6, 8]

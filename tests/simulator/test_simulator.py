"""The simulator: virtual time follows the cost model, and all invariants hold under faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.admission_rules import OverProvision, PipelineDepth, WindowedFifo
from staleflow.cli.simulate import parse_sweeps, simulate
from staleflow.pipeline.api.simulating import JobVariant, sweep_combinations
from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.config.factories import ledger_eta
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import Command, Discard, Route, Score, StepEnvironment, Train
from staleflow.pipeline.coordination.events import Event, TrajectoryInterrupted
from staleflow.pipeline.simulator.analysis import Trace, compute_stats, explain_step_time, mean_step_time_bound
from staleflow.pipeline.simulator.baselines import (
    Backlog,
    Baseline,
    Credits,
    OneStep,
    with_admission,
)
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.pipeline.strategies.admission import ReservationAdmission, Synchronous
from staleflow.pipeline.strategies.filtering import STRAGGLERS
from staleflow.pipeline.strategies.routing import ROUTING
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION
from staleflow.stores.errors import ActorLost, RunStuck
from staleflow.stores.trajectory import Fate
from staleflow.tasks.emulation.batch_simulator import SimulatedBatch
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import Turn
from tests.support.entries import table
from tests.support.examples import num_examples

BASE = {
    "rollout.engine.name": "emulated", "steps": 8, "batch.groups_per_step": 6, "batch.group_size": 3,
    "rollout.instances": 3, "rollout.max_new_tokens": 400, "rollout.engine.max_running": 16,
    "rollout.engine.kv_tokens": 4000, "workload.median": 60.0, "workload.prompt_tokens": 20,
    "simulation.train_s": 0.5, "simulation.pull_s": 0.05, "simulation.reward_s": 0.01, "simulation.report_s": 0.1,
}  # fmt: skip


def job(**changes: Any) -> RunConfig:
    """Return a job; keyword names have double underscores in place of dots."""
    tree: dict[str, Any] = {}
    for key, value in (BASE | {k.replace("__", "."): v for k, v in changes.items()}).items():
        *tables, name = key.split(".")
        node = tree
        for below in tables:
            if isinstance(node.get(below), str):
                node[below] = {"name": node[below]}
            node = node.setdefault(below, {})
        node[name] = value
    return loading.from_tree(tree)


def run(config: RunConfig, **kwargs: Any) -> Trace:
    return SimulatedRun(config, actor_settings.make_workload(config), **kwargs).run()


# -- one instance ------------------------------------------------------------------------------------------------

COST = CostModel(k1=1e-5, k2=0.004, k3=0.0002, k4=0.001, b=0.002, prefill=0.0005)


def step_by_step(cost: CostModel, lengths: list[int], prompt: int, max_running: int) -> dict[int, float]:
    """Return when each of these responses ends if all start at 0, by single decode steps."""
    running: dict[int, int] = {}
    ended: dict[int, float] = {}
    waiting, clock = list(range(len(lengths))), 0.0
    while waiting or running:
        while waiting and len(running) < max_running:
            clock += cost.prefill * prompt
            running[waiting.pop(0)] = 0
        clock += cost.step_s(len(running), sum(prompt + done for done in running.values()))
        for item in list(running):
            running[item] += 1
            if running[item] == lengths[item]:
                ended[item] = clock
                del running[item]
    return ended


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), max_running=st.integers(1, 6))
def test_closed_form_decoding_equals_decoding_step_by_step(lengths: list[int], max_running: int) -> None:
    instance = SimulatedBatch(COST, kv_capacity=10**9, max_running=max_running)
    for i, length in enumerate(lengths):
        instance.submit(0.0, i, 1, 10, 0, (Turn(length),))
    ended = {f.trajectory: f.at_s for f in instance.advance(1e9)}
    # Admission at time 0 happens one by one, so the first has not begun when the last arrives: same order, same sum.
    assert ended == pytest.approx(step_by_step(COST, lengths, 10, max_running))
    assert instance.work.sampled_tokens == sum(lengths)
    assert (instance.kv_tokens, instance.num_requests) == (0, 0)


def test_an_interrupted_response_continues_elsewhere_with_one_more_prefill() -> None:
    first = SimulatedBatch(COST, kv_capacity=1000, max_running=4)
    first.submit(0.0, 7, 1, 10, 0, (Turn(100),))
    assert first.advance(0.2) == []
    stopped = first.remove(0.2, 7)
    assert stopped is not None
    tokens = stopped.tokens
    assert (stopped.route_number, 0 < tokens < 100) == (1, True)
    second = SimulatedBatch(COST, kv_capacity=1000, max_running=4)
    second.submit(0.0, 7, 2, 10, tokens, (Turn(100),))
    (ended,) = second.advance(1e9)
    assert (ended.tokens, ended.route_number) == (100, 2)
    assert first.work.sampled_tokens + second.work.sampled_tokens == 100
    assert second.work.repeated_prefill_tokens == 10 + tokens


def test_a_full_cache_preempts_the_newest_request_and_loses_none() -> None:
    instance = SimulatedBatch(COST, kv_capacity=100, max_running=8)
    for i in range(5):
        instance.submit(0.0, i, 1, 10, 0, (Turn(40),))
    ended = instance.advance(1e9)
    assert {f.trajectory: f.tokens for f in ended} == dict.fromkeys(range(5), 40)
    assert ended[0].trajectory == 0
    assert instance.work.preemptions > 0
    assert instance.work.repeated_prefill_tokens > 0


def test_tool_calls_take_time_and_their_tokens_are_prefilled() -> None:
    instance = SimulatedBatch(COST, kv_capacity=1000, max_running=8)
    instance.submit(0.0, 0, 1, 10, 0, (Turn(5, 3.0, 20), Turn(6)))
    (ended,) = instance.advance(1e9)
    assert ended.tokens == 5 + 20 + 6
    alone = COST.decode_s(1, 10, 5) + 3.0 + COST.decode_s(1, 35, 6) + COST.prefill * 30
    assert ended.at_s == pytest.approx(alone)
    continued = SimulatedBatch(COST, kv_capacity=1000, max_running=8)
    continued.submit(0.0, 0, 2, 10, 25, (Turn(5, 3.0, 20), Turn(6)))
    assert continued.advance(1e9)[0].tokens == 31


def test_weight_updates_prefill_running_requests_again_or_keep_their_cache() -> None:
    for keep, again in ((False, 2), (True, 0)):
        instance = SimulatedBatch(COST, kv_capacity=1000, max_running=8)
        for i in range(2):
            instance.submit(0.0, i, 1, 10, 0, (Turn(50),))
        instance.advance(0.1)
        tokens = sum(n for _, n in instance.progress(0.1))
        loaded_s = instance.load(0.1, 1.0, keep_cache=keep)
        assert loaded_s >= 1.1
        assert instance.work.repeated_prefill_tokens <= again * (10 + tokens)
        assert (instance.work.repeated_prefill_tokens > 0) is not keep
        assert [f.tokens for f in instance.advance(1e9)] == [50, 50]


# -- workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lognormal", "bimodal", "power_law", "agentic"])
def test_a_workload_is_a_function_of_ids_with_the_configured_shape(kind: str) -> None:
    config = job(
        workload__kind=kind, workload__median=100.0, rollout__max_new_tokens=2000, rollout__engine__kv_tokens=9000
    )
    first, second = actor_settings.make_workload(config), actor_settings.make_workload(config)
    groups = [3000, 5, 1024, 0]
    assert [first.turns(g, 1) for g in groups] == [second.turns(g, 1) for g in reversed(groups)][::-1]
    lengths = np.array([sum(t.tokens for t in first.turns(g, m)) for g in range(700) for m in range(3)])
    assert lengths.min() >= 1
    assert lengths.max() <= 2000
    match kind:
        case "bimodal":
            assert np.mean(lengths > 500) == pytest.approx(0.15, abs=0.03)
            assert np.median(lengths[lengths > 500]) / np.median(lengths[lengths < 500]) == pytest.approx(15, rel=0.1)
        case "power_law":
            assert np.mean(lengths > 200) == pytest.approx(0.5**1.5, abs=0.03)
        case _:
            assert np.median(lengths) == pytest.approx(100, rel=0.1)
    turns = [len(first.turns(g, 0)) for g in range(300)]
    assert (max(turns) > 1) is (kind == "agentic")


def test_siblings_have_the_configured_correlation() -> None:
    for correlation in (0.0, 0.8):
        workload = actor_settings.make_workload(
            job(workload__group_correlation=correlation, rollout__max_new_tokens=3000)
        )
        logs = np.log([[workload.turns(g, m)[0].tokens for m in range(2)] for g in range(1500)])
        assert np.corrcoef(logs.T)[0, 1] == pytest.approx(correlation, abs=0.08)


# -- whole runs --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    config = job(
        rollout__routing="benchmarks.routing_rules:Random",
        simulation__mean_loss_interval_s=3.0,
        simulation__replace_s=1.0,
    )
    assert run(config) == run(config)
    assert run(config) != run(dataclasses.replace(config, seed=9))


def test_delivered_tokens_of_a_lost_instance_are_not_sampled_again() -> None:
    lost = {}
    for spool_s in (0.0, 0.5):
        config = job(
            rollout__delivery_interval_s=spool_s,
            steps=20,
            simulation__mean_loss_interval_s=2.0,
            simulation__report_s=0.25,
        )
        trace = run(config)
        assert trace.instance_losses > 3
        sampled = sum(instance.work.sampled_tokens for instance in trace.instances)
        lost[spool_s] = sampled / sum(step.tokens for step in trace.steps)
    assert lost[0.5] < lost[0.0]


def test_synchronous_time_is_rollout_plus_training() -> None:
    """One instance and one group of equal lengths, so every number can be computed by hand."""
    config = job(
        staleness__admission="synchronous", rollout__instances=1, workload__sigma=0.0, workload__median=100.0, steps=4,
        simulation__pull_s=0.0, rollout__cost__prefill=0.0,
    )  # fmt: skip
    trace = run(config)
    cost = config.rollout.cost
    # 18 trajectories, at most 16 at once: two rounds.
    rollout_s = cost.decode_s(16, 16 * 20, 100) + cost.decode_s(2, 2 * 20, 100)
    expected = [(i + 1) * (rollout_s + 0.01 + 0.5) for i in range(4)]
    assert [s.finished_s for s in trace.steps] == pytest.approx(expected, abs=1e-6)


def test_a_larger_staleness_bound_is_never_slower() -> None:
    """A larger bound batches pulls differently, which may cost up to the time of a pull."""
    for workload, on_pull in (("lognormal", "keep"), ("bimodal", "interrupt")):
        seconds = []
        for eta in (0, 1, 2, 3):
            config = job(
                staleness__eta=eta, workload__kind=workload, rollout__on_pull=on_pull,
                steps=12, batch__groups_per_step=12,
            )  # fmt: skip
            seconds.append(run(config).finished_s)
        assert all(after <= before * 1.03 for before, after in itertools.pairwise(seconds)), (
            workload,
            on_pull,
            seconds,
        )


def test_an_adapter_pull_interrupts_nothing_and_keeps_the_cache() -> None:
    """Neither running requests nor the cached context of a later turn is affected."""
    results = {}
    for on_pull, rank in (("keep", 0), ("adapter", 8)):
        config = job(
            steps=8, staleness__eta=2, rollout__on_pull=on_pull, training__lora__rank=rank, simulation__pull_s=0.5,
            workload__kind="agentic", workload__tool_s=0.05, workload__tool_tokens=10, task__multi_turn="yes",
        )  # fmt: skip
        trace = run(config)
        assert trace.command_counts["Pull"] >= 8
        results[on_pull] = [instance.work for instance in trace.instances]
    assert (
        sum(work.repeated_prefill_tokens for work in results["adapter"])
        == 0
        < sum(work.repeated_prefill_tokens for work in results["keep"])
    )
    assert all(work.pull_s == 0 for work in results["adapter"])


def test_a_run_is_not_faster_than_its_physical_bound() -> None:
    for admission, eta in (("synchronous", 0), ("staleflow", 1), ("staleflow", 3)):
        config = job(staleness__admission=admission, staleness__eta=eta, steps=16)
        trace = run(config)
        measures = compute_stats(config, trace)
        # Averages over the same steps; a window of steps can use at most what was prepared before it.
        whole = mean_step_time_bound(config, trace.steps)
        assert trace.finished_s >= whole.step_s * len(trace.steps) * 0.999
        assert 0 < measures.share_of_step_time_bound <= 1.15
        assert any("<- the bound" in line for line in explain_step_time(measures))


def test_a_very_long_step_is_no_deadlock_and_a_deadlock_raises_run_stuck() -> None:
    slow = job(steps=2, simulation__train_s=5000.0, simulation__report_s=1.0)  # 50 times STUCK_TICKS
    assert run(slow).finished_s > 10_000
    stuck = SimulatedRun(slow, actor_settings.make_workload(slow))
    stuck.coordinator.ledger.is_batch_ready = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RunStuck, match="step 0 waits for"):
        stuck.run()


def test_stragglers_are_truncated_and_the_step_continues() -> None:
    slow = {
        "workload__kind": "bimodal",
        "workload__long_share": 0.02,
        "workload__long_ratio": 60.0,
        "workload__median": 20.0,
    }
    slow |= {"rollout__max_new_tokens": 3900, "staleness__eta": 0, "steps": 12}
    waits, cuts = (
        run(job(batch__stragglers=table(STRAGGLERS, action, patience=0.5), **slow)) for action in ("wait", "truncate")
    )
    assert cuts.finished_s < waits.finished_s
    assert max(s.longest_tokens for s in cuts.steps) < max(s.longest_tokens for s in waits.steps)


def test_baselines_sample_as_far_ahead_as_documented() -> None:
    def stale(rule: Baseline) -> Trace:
        config = job(steps=24, workload__sigma=1.5, staleness__eta=3, rollout__synchronization="greedy")
        return run(with_admission(config, rule))

    def oldest(trace: Trace) -> int:
        return max(v for step in trace.steps for v in step.staleness)

    one_step, depth = stale(OneStep()), stale(PipelineDepth())
    assert [s.ready_s for s in depth.steps] == [s.ready_s for s in one_step.steps]
    deep, window = stale(PipelineDepth(depth=4.0)), stale(WindowedFifo(ahead=2))
    strict = stale(WindowedFifo(ahead=2, window_share=0.01))
    assert oldest(deep) <= 3
    assert oldest(window) <= 3
    assert oldest(strict) <= 2
    excess = stale(OverProvision(excess=2.0))
    in_turns = run(job(steps=24, workload__sigma=1.5, staleness__admission="synchronous", staleness__eta=0))
    for trace in (one_step, deep, window, excess):
        assert trace.finished_s < in_turns.finished_s
    assert excess.ending_counts.keys() <= {"consumed", "aborted:surplus_group"}, "nothing is dropped"
    assert excess.ending_counts["aborted:surplus_group"] <= 2 * 18, "trajectories left by the last step"


class TruncationCounter:
    """Counts truncated responses in total and in the fullest step."""

    def __init__(self) -> None:
        self.count = self.in_step = self.most = 0

    def __call__(self, now: float, event: Event, commands: list[Command]) -> None:
        if isinstance(event, TrajectoryInterrupted) and any(isinstance(c, Score | StepEnvironment) for c in commands):
            self.count += 1
            self.in_step += 1
            self.most = max(self.most, self.in_step)
        if any(isinstance(c, Train) for c in commands):
            self.in_step = 0


def cut_in(config: RunConfig) -> TruncationCounter:
    cuts = TruncationCounter()
    SimulatedRun(config, actor_settings.make_workload(config), observe=cuts).run()
    return cuts


CUT = {
    "batch__groups_per_step": 12,
    "batch__group_size": 4,
    "batch__stragglers__patience": 0.05,
    "rollout__max_new_tokens": 2000,
    "simulation__report_s": 0.1,
}


@given(
    share=st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3]),
    eta=st.integers(0, 3),
    kind=st.sampled_from(["lognormal", "bimodal", "power_law", "agentic"]),
    seed=st.integers(0, 999),
    lost_every_s=st.sampled_from([0.0, 20.0]),
    environment=st.sampled_from(["auto", "yes"]),
)
@settings(max_examples=max(12, num_examples() // 40))
def test_truncated_responses_stay_within_their_share(
    share: float, eta: int, kind: str, seed: int, lost_every_s: float, environment: str
) -> None:
    config = job(
        steps=8,
        seed=seed,
        staleness__eta=eta,
        batch__stragglers="truncate",
        batch__stragglers__share=share,
        workload__kind=kind,
        workload__median=60.0,
        workload__tool_s=0.2,
        simulation__mean_loss_interval_s=lost_every_s,
        task__multi_turn=environment if kind == "agentic" else "auto",
        rollout__max_attempts=1000,
        **CUT,
    )
    cuts = cut_in(config)
    assert cuts.count <= share * config.steps * config.trajectories_per_step
    assert cuts.most <= max(1, share * config.trajectories_per_step)


def test_a_larger_share_truncates_more() -> None:
    def count(share: float) -> int:
        setting = {"batch__stragglers": "truncate", "batch__stragglers__share": share, "workload__sigma": 1.5}
        return cut_in(job(steps=16, workload__median=60.0, staleness__eta=1, **setting, **CUT)).count

    assert 0 < count(0.02) < count(0.2)


class Witness:
    """Checks all events independently: each trajectory ends once and within the staleness bound."""

    def __init__(self, eta: int) -> None:
        self.eta = eta
        self.routed: dict[int, int] = {}
        self.ended: dict[int, Fate] = {}
        self.steps: list[int] = []

    def __call__(self, now: float, event: Event, commands: list[Command]) -> None:
        for item in commands:
            match item:
                case Route():
                    self.routed.setdefault(item.trajectory, item.version)
                case Train():
                    self.steps.append(item.step)
                    for trajectory, version in zip(item.trajectories, item.versions, strict=True):
                        assert version == self.routed[trajectory]
                        assert version <= item.step <= version + self.eta
                        self._end(trajectory, Fate.CONSUMED)
                case Discard():
                    for ending in item.endings:
                        self._end(ending.trajectory, ending.fate)

    def _end(self, trajectory: int, fate: Fate) -> None:
        assert trajectory not in self.ended
        self.ended[trajectory] = fate


@st.composite
def jobs(draw: st.DrawFn) -> RunConfig:
    """Return jobs with any combination of strategies, redundancy and faults."""
    on_pull = draw(st.sampled_from(["interrupt", "keep", "adapter"]))
    eta = draw(st.integers(0, 3))
    alpha = float(eta) * draw(st.sampled_from([0.5, 1.0]))
    rules = [ReservationAdmission(), Synchronous(), OneStep(), PipelineDepth(depth=draw(st.floats(1, eta + 1)))]
    rules += [Credits(alpha=alpha), *([WindowedFifo(ahead=eta - 1)] if eta else [])]
    stragglers = draw(st.sampled_from(STRAGGLERS.names))
    config = job(
        seed=draw(st.integers(0, 999)),
        steps=draw(st.integers(2, 7)),
        batch__groups_per_step=draw(st.integers(1, 5)),
        batch__group_size=draw(st.integers(2, 3)),
        batch__extra_groups=draw(st.integers(0, 2)),
        batch__extra_members=draw(st.integers(0, 2)),
        batch__filtering=draw(st.sampled_from(["keep_all", "no_signal"])),
        batch__stragglers=table(STRAGGLERS, stragglers, patience=0.3, share=1.0),
        staleness__eta=eta,
        rollout__instances=draw(st.integers(1, 4)),
        rollout__routing=draw(st.sampled_from(ROUTING.names)),
        rollout__synchronization=draw(st.sampled_from(SYNCHRONIZATION.names)),
        rollout__migration=draw(st.sampled_from(["none", "largest_gain"])),
        rollout__on_pull=on_pull,
        training__lora__rank=8 if on_pull == "adapter" else 0,
        rollout__engine__max_running=draw(st.integers(1, 12)),
        rollout__engine__kv_tokens=draw(st.sampled_from([200, 500, 4000])),
        rollout__max_new_tokens=100,
        workload__median=25.0,
        workload__tool_s=0.2,
        workload__tool_tokens=10,
        simulation__report_s=0.25,
        rollout__max_attempts=1000,
        task__multi_turn=draw(st.sampled_from(["auto", "yes"])),
        environment__concurrency=draw(st.sampled_from([2, 100])),
        simulation__failed_step_share=draw(st.sampled_from([0.0, 0.1])),
        simulation__hung_step_share=draw(st.sampled_from([0.0, 0.02])),
        simulation__lock_step=draw(st.booleans()),
        workload__kind=draw(st.sampled_from(["lognormal", "bimodal", "power_law", "agentic"])),
        workload__signal_share=draw(st.sampled_from([0.5, 1.0])),
        workload__group_correlation=draw(st.sampled_from([0.0, 0.7])),
        rollout__delivery_interval_s=draw(st.sampled_from([0.0, 0.5])),
        simulation__mean_loss_interval_s=draw(st.sampled_from([0.0, 4.0])),
        simulation__replace_s=draw(st.sampled_from([0.0, 1.0])),
        simulation__message_s=draw(st.sampled_from([0.0, 0.02])),
        simulation__straggler_share=draw(st.sampled_from([0.0, 0.4])),
        simulation__slow_pull_share=draw(st.sampled_from([0.0, 0.5])),
    )
    return with_admission(config, draw(st.sampled_from(rules)))


@given(config=jobs())
@settings(max_examples=max(30, num_examples() // 2))
def test_bound_and_conservation_hold_without_deadlock(config: RunConfig) -> None:
    """With random strategies, redundancy and faults, checked by the coordinator after each event and by an independent
    witness. A deadlock would raise RunStuck."""
    witness = Witness(config.staleness.eta)
    simulated = SimulatedRun(config, actor_settings.make_workload(config), validate_every_event=True, observe=witness)
    trace = simulated.run()
    ledger = simulated.coordinator.ledger
    assert witness.steps == list(range(config.steps))
    assert len(witness.ended) == ledger.num_started
    assert Counter(witness.ended.values())[Fate.CONSUMED] == config.steps * config.trajectories_per_step
    assert sum(trace.ending_counts.values()) == ledger.num_started


BIMODAL: dict[str, Any] = {
    "workload__kind": "bimodal", "workload__long_share": 0.05, "workload__long_ratio": 30.0, "workload__median": 12.0,
    "steps": 30, "simulation__train_s": 0.05,
}  # fmt: skip
"""Lengths that would be trained too late if a step did not wait."""


def test_backlog_exceeds_the_bound_and_reports_it() -> None:
    in_time = job(**BIMODAL, staleness__eta=1)
    late = with_admission(in_time, Backlog(eta=1))
    assert (ledger_eta(in_time), ledger_eta(late)) == (1, 30)
    measures = [compute_stats(config, run(config)) for config in (in_time, late)]
    assert [stats.bound_kept for stats in measures] == [True, False]
    assert [max(stats.staleness) > 1 for stats in measures] == [False, True]


# -- the command -------------------------------------------------------------------------------------------------


def test_simulate_prints_a_table_and_explains(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(knob_tree.to_toml(job()))
    arguments = [str(path), "--sweep", "staleness.eta=0,2", "--baselines", "--explain"]
    result = CliRunner().invoke(simulate, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    for word in (
        "eta=0",
        "eta=2",
        "synchronous",
        "credits",
        "of roofline",
        "longest response alone",
        "the trainer waited",
    ):
        assert word in result.output
    result = CliRunner().invoke(simulate, [*arguments[:2], "staleness.eta=2", "--json"], catch_exceptions=False)
    (row,) = json.loads(result.stdout)
    assert row["row"] == "eta=2"
    assert row["tokens_per_s"] > 0


def test_sweep_rows_are_named_by_their_values() -> None:
    rows = sweep_combinations(parse_sweeps(("rollout.routing.mu=0.1,0.25", "rollout.routing=deadline,mine.py:Rule")))
    assert [label for label, _ in rows][1:3] == ["mu=0.1 routing=mine.py:Rule", "mu=0.25 routing=deadline"]


def test_a_killed_simulation_gives_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text(knob_tree.to_toml(job()))
    monkeypatch.setattr("staleflow.pipeline.api.simulating._simulate_variant", killed)
    with pytest.raises(ActorLost, match="a simulation process was killed"):
        CliRunner().invoke(simulate, [str(path), "--sweep", "staleness.eta=0,1"], catch_exceptions=False)


def killed(variant: JobVariant) -> None:
    """Kill a simulation as the OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)

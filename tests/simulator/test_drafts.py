"""Speculation in virtual time: costs and gains of drafts, and what the coordinator learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, factories
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Command, SetDraftLength
from staleflow.pipeline.coordination.draft_lengths import estimate_rates
from staleflow.pipeline.coordination.events import Event
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.emulation.batch_simulator import DraftedTokens, DraftSettings, SimulatedBatch
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import Turn
from tests.simulator.test_simulator import COST, job, run


def test_accepted_drafts_reduce_the_number_of_steps() -> None:
    cost = CostModel(k1=0.0, k2=0.004, k3=0.0002, k4=0.001, b=0.002, prefill=0.0)
    drafting = DraftSettings(length=4, max_running=2, acceptance=1.0)
    instance = SimulatedBatch(cost, kv_capacity=10**6, max_running=8, drafting=drafting)
    for i in range(3):
        instance.submit(0.0, i, 1, 10, 0, (Turn(100 if i else 50),))
    first, *others = instance.advance(1e9)
    # While three run, beyond max_running, each token takes a step of three; then five tokens take one that verifies
    # ten tokens of two requests.
    assert first.at_s == pytest.approx(50 * cost.step_s(3, 0))
    assert first.drafts == DraftedTokens()
    assert [item.at_s for item in others] == pytest.approx([first.at_s + 50 / 5 * cost.step_s(10, 0)] * 2)
    assert [item.drafts.counts() for item in others] == [{"drafted_tokens": 40, "accepted_tokens": 40}] * 2
    assert (instance.work.drafted, instance.work.accepted) == pytest.approx((80, 80))
    assert instance.work.tokens == 250


def test_rejected_drafts_cost_compute_and_give_no_tokens() -> None:
    ends = {}
    for acceptance in (0.0, 0.5):
        drafting = DraftSettings(length=2, max_running=8, acceptance=acceptance)
        instance = SimulatedBatch(COST, kv_capacity=10**6, max_running=8, drafting=drafting)
        for i in range(8):
            instance.submit(0.0, i, 1, 10, 0, (Turn(70),))
        ended = instance.advance(1e9)
        ends[acceptance] = ended[-1].at_s
        assert {item.drafts.counts()["accepted_tokens"] for item in ended[1:]} <= ({0} if not acceptance else {29, 30})
    plain = SimulatedBatch(COST, kv_capacity=10**6, max_running=8)
    for i in range(8):
        plain.submit(0.0, i, 1, 10, 0, (Turn(70),))
    undrafted_s = plain.advance(1e9)[-1].at_s
    assert ends[0.5] < undrafted_s < ends[0.0]


def test_the_best_draft_length_falls_with_concurrency() -> None:
    lengths = [COST.best_length(running, 0.0, 4, 0.6) for running in (0, 1, 2, 8, 64, 1024)]
    assert lengths == [0, 4, *sorted(lengths[2:], reverse=True)]
    assert lengths[-1] == 0
    for running, best in zip((1, 2, 8, 64), lengths[1:], strict=False):
        took = [COST.drafting(n, 0.6).step_s(running, 0.0) for n in range(5)]
        assert took[best] == min(took)
    assert COST.best_length(1, 0.0, 4, 0.0) == 0


def test_verify_share_scales_the_cost_of_drafted_tokens() -> None:
    dear = dataclasses.replace(COST, verify_share=3.0)
    assert dear.step_s(64, 0.0) == COST.step_s(64, 0.0)
    assert dear.drafting(2, 0.0).step_s(64, 10.0) == pytest.approx(COST.step_s(64 * (1 + 3 * 2), 10.0))
    assert dear.times(2.0).drafting(2, 0.0).step_s(64, 10.0) == pytest.approx(2 * COST.step_s(64 * 7, 10.0))
    assert [dear.best_length(n, 0.0, 4, 0.6) for n in (8, 64)] <= [COST.best_length(n, 0.0, 4, 0.6) for n in (8, 64)]
    took = [
        run(
            job(
                rollout__engine__speculation__num_speculative_tokens=4,
                workload__acceptance_rate=0.7,
                rollout__cost__verify_share=verified,
            )
        )
        for verified in (0.0, 1.0, 8.0)
    ]
    assert took[0].finished_s < took[1].finished_s < took[2].finished_s


def test_acceptance_rate_has_no_effect_without_drafts() -> None:
    plain, drafting = run(job()), run(job(workload__acceptance_rate=0.1))
    assert plain.steps == drafting.steps
    faster = run(job(rollout__engine__speculation__num_speculative_tokens=4, workload__acceptance_rate=0.9))
    assert faster.finished_s < plain.finished_s
    assert sum(i.work.accepted for i in faster.instances) > 0


def test_work_in_progress_is_counted_up_to_now() -> None:
    drafting = DraftSettings(length=3, max_running=8, acceptance=0.5)
    watched, other = (SimulatedBatch(COST, kv_capacity=10**6, max_running=8, drafting=drafting) for _ in range(2))
    for instance in (watched, other):
        for i in range(4):
            instance.submit(0.0, i, 1, 10, 0, (Turn(100 + i),))
    seen = [watched.work_by(now / 100) for now in range(0, 100)]
    assert [item.tokens for item in seen] == sorted(item.tokens for item in seen)
    assert watched.work == other.work  # asking changes nothing
    middle = seen[20]
    assert middle.tokens == sum(n for _, n in watched.progress(0.2)) > 0
    assert middle.decode_s <= 0.2
    assert middle.drafted == pytest.approx(3 * middle.drafts)
    assert middle.accepted == pytest.approx(middle.tokens - middle.drafts)
    watched.advance(1e9)
    assert watched.work_by(1e9) == watched.work


def test_a_new_draft_length_applies_from_the_next_step() -> None:
    cost = CostModel(k1=0.0, k2=0.004, k3=0.0, k4=0.0, b=0.0, prefill=0.0)
    instance = SimulatedBatch(
        cost, kv_capacity=10**6, max_running=8, drafting=DraftSettings(max_running=8, acceptance=1.0)
    )
    instance.submit(0.0, 0, 1, 10, 0, (Turn(100),))
    instance.advance(0.2)
    instance.set_draft_length(0.2, 4)
    instance.advance(0.24)
    instance.set_draft_length(0.24, 0)
    (ended,) = instance.advance(1e9)
    assert ended.at_s == pytest.approx(0.2 + 50 / 5 * 0.004)
    assert ended.drafts.counts() == {"drafted_tokens": 40, "accepted_tokens": 40}


COST_OF_JOB = job().rollout.cost
DECIDED = {
    "rollout__engine__speculation__num_speculative_tokens": 6,
    "workload__median": 200.0,
    "rollout__max_new_tokens": 2000,
}


def run_with_draft_lengths(config: RunConfig) -> tuple[SimulatedRun, list[tuple[int, int]]]:
    """Run a job; returns the run and, for each SetDraftLength, the running requests of its instance and the length."""
    results: list[tuple[int, int]] = []

    def observe(_: float, event: Event, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SetDraftLength):
                results.append((simulated_run.coordinator.num_running_by_instance()[command.instance], command.length))

    simulated_run = SimulatedRun(
        config, actor_settings.make_workload(config), validate_every_event=True, observe=observe
    )
    simulated_run.run()
    return simulated_run, results


@pytest.mark.parametrize("acceptance", [0.2, 0.9])
def test_the_coordinator_estimates_the_acceptance_rate(acceptance: float) -> None:
    """From reports alone; it drafts more where more is accepted and at lower concurrency."""
    one, commands = run_with_draft_lengths(job(workload__acceptance_rate=acceptance, **DECIDED))
    drafts = one.coordinator._draft_lengths
    assert drafts is not None
    assert estimate_rates(drafts._stats, drafts._max_length).acceptance == pytest.approx(acceptance, abs=0.1)
    assert commands
    alone = drafts.costs.step_s(1, 0)
    assert alone == pytest.approx(min(COST_OF_JOB.drafting(n, acceptance).step_s(1, 0) for n in range(7)), rel=0.1)


def test_useless_drafts_cost_at_most_two_percent() -> None:
    """No draft is accepted, and verification costs as much as decoding."""
    costly = {"rollout__cost__k2": 0.0, "rollout__cost__k3": 0.005, "rollout__cost__k4": 0.0, "rollout__cost__b": 0.0}
    plain = run(job(**(DECIDED | costly | {"rollout__engine__speculation__num_speculative_tokens": 0})))
    drafting = run(job(workload__acceptance_rate=0.0, **DECIDED, **costly))
    assert drafting.finished_s < 1.02 * plain.finished_s
    drafted = sum(i.work.drafted for i in drafting.instances)
    assert drafted < 0.02 * sum(i.work.tokens for i in drafting.instances)


def test_decided_lengths_are_as_good_as_any_fixed_limit() -> None:
    config = {"workload__acceptance_rate": 0.6, **DECIDED, "staleness__eta": 0}
    fixed = [
        run(job(**config, rollout__engine__speculation__disable_above=most)).finished_s for most in (1, 2, 4, 8, 16)
    ]
    assert run(job(**config)).finished_s < 1.03 * min(fixed)


def test_a_run_with_decided_draft_lengths_replays_to_the_same_commands(tmp_path: Path) -> None:
    config, path = job(workload__acceptance_rate=0.6, **DECIDED), tmp_path / "events.jsonl"
    written = journal.Journal(path)
    simulated_run = SimulatedRun(config, actor_settings.make_workload(config), observe=written.append)
    simulated_run.run()
    written.close()
    assert simulated_run.trace.commands["SetDraftLength"] > 0
    replayed = journal.replay(factories.make_coordinator(config), journal.JournalReader(path))
    assert replayed.difference == ""

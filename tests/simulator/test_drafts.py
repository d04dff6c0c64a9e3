"""Speculation in virtual time: costs and gains of drafts."""

from __future__ import annotations

import dataclasses

import pytest

from staleflow.tasks.emulation.batch_simulator import DraftedTokens, DraftSettings, SimulatedBatch
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import Turn
from tests.simulator.test_simulator import COST, job, run


def test_accepted_drafts_reduce_the_number_of_steps() -> None:
    cost = CostModel(k1=0.0, k2=0.004, k3=0.0002, k4=0.001, b=0.002, prefill=0.0)
    drafting = DraftSettings(length=4, max_running=2, acceptance=1.0)
    instance = SimulatedBatch(cost, kv_capacity=10**6, max_running=8, draft_settings=drafting)
    for i in range(3):
        instance.submit(0.0, i, 1, 10, 0, (Turn(100 if i else 50),))
    first, *others = instance.advance(1e9)
    # While three run, beyond max_running, each token takes a step of three; then five tokens take one that verifies
    # ten tokens of two requests.
    assert first.at_s == pytest.approx(50 * cost.step_s(3, 0))
    assert first.drafts == DraftedTokens()
    assert [item.at_s for item in others] == pytest.approx([first.at_s + 50 / 5 * cost.step_s(10, 0)] * 2)
    assert [item.drafts.counts() for item in others] == [{"drafted_tokens": 40, "accepted_tokens": 40}] * 2
    assert (instance.work.drafted_tokens, instance.work.accepted_tokens) == pytest.approx((80, 80))
    assert instance.work.sampled_tokens == 250


@pytest.mark.parametrize("step_s", [0.0092, 0.3, 0.7])
def test_a_tool_result_within_rounding_of_a_step_boundary_is_taken(step_s: float) -> None:
    """The simulation did not end: the clock stayed just below the time of the result."""
    cost = CostModel(k1=0.0, k2=step_s, k3=0.0, k4=0.0, b=0.0, prefill=0.0)
    for first_tokens in range(1, 21):
        for tool_steps in range(1, 21):
            instance = SimulatedBatch(cost, kv_capacity=10**6, max_running=8)
            instance.submit(0.0, 0, 1, 10, 0, (Turn(first_tokens, tool_steps * step_s, 1), Turn(1)))
            instance.submit(0.0, 1, 1, 10, 0, (Turn(60),))
            assert {item.trajectory for item in instance.advance(1e9)} == {0, 1}


def test_rejected_drafts_cost_compute_and_give_no_tokens() -> None:
    ends = {}
    for acceptance in (0.0, 0.5):
        drafting = DraftSettings(length=2, max_running=8, acceptance=acceptance)
        instance = SimulatedBatch(COST, kv_capacity=10**6, max_running=8, draft_settings=drafting)
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


def test_verify_share_scales_the_cost_of_drafted_tokens() -> None:
    dear = dataclasses.replace(COST, verify_share=3.0)
    assert dear.step_s(64, 0.0) == COST.step_s(64, 0.0)
    assert dear.with_drafts(2, 0.0).step_s(64, 10.0) == pytest.approx(COST.step_s(64 * (1 + 3 * 2), 10.0))
    assert dear.scaled(2.0).with_drafts(2, 0.0).step_s(64, 10.0) == pytest.approx(2 * COST.step_s(64 * 7, 10.0))
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
    assert sum(i.work.accepted_tokens for i in faster.instances) > 0


def test_work_in_progress_is_counted_up_to_now() -> None:
    drafting = DraftSettings(length=3, max_running=8, acceptance=0.5)
    watched, other = (SimulatedBatch(COST, kv_capacity=10**6, max_running=8, draft_settings=drafting) for _ in range(2))
    for instance in (watched, other):
        for i in range(4):
            instance.submit(0.0, i, 1, 10, 0, (Turn(100 + i),))
    seen = [watched.work_until(now / 100) for now in range(0, 100)]
    assert [item.sampled_tokens for item in seen] == sorted(item.sampled_tokens for item in seen)
    assert watched.work == other.work  # asking changes nothing
    middle = seen[20]
    assert middle.sampled_tokens == sum(n for _, n in watched.progress(0.2)) > 0
    assert middle.decode_s <= 0.2
    assert middle.drafted_tokens == pytest.approx(3 * middle.num_drafts)
    assert middle.accepted_tokens == pytest.approx(middle.sampled_tokens - middle.num_drafts)
    watched.advance(1e9)
    assert watched.work_until(1e9) == watched.work

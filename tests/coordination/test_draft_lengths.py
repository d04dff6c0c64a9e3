"""What is learned of drafts, and how many tokens instances are told to draft."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from staleflow.pipeline.coordination.draft_lengths import DecayingDraftStats, DraftLengths, DraftRates, rates
from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.pipeline.coordination.fleet import MutableFleet
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel, DraftingCosts, Numbers, tokens_per_step

A, B = InstanceId("a"), InstanceId("b")
COST = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0)
"""Steps of up to eight tokens take 8 s, of more 1 s each."""


def fleet_of(**running: int) -> MutableFleet:
    fleet, numbers = MutableFleet(), itertools.count()
    for name, count in running.items():
        one = fleet.join(InstanceId(name), PolicyVersion(0), 10_000, 64)
        for number in itertools.islice(numbers, count):
            fleet.add(one, TrajectoryId(number), 1)
    return fleet


def steps(
    running: int, *, length: int = 0, acceptance: float = 0.0, cost: CostModel = COST, count: int = 100
) -> DecodeStats:
    """What an instance reports of `count` decode steps, each request's with a draft of just this length."""
    gained = tokens_per_step(length, acceptance)
    return DecodeStats(
        running=running,
        kv_tokens=0,
        seconds=count * cost.step_s(running * (1 + length), 0),
        tokens=round(count * running * gained),
        drafts=count * running if length else 0,
        drafted_tokens=count * running * length,
        accepted_tokens=round(count * running * (gained - 1)),
    )


def heard(drafts: DraftLengths, instance: InstanceId, length: int, taken: DecodeStats) -> None:
    """Two reports of the same: of the first nobody knows what ran before."""
    for _ in range(2):
        drafts.observe(instance, length, taken)


def test_the_rates_that_made_them_are_found_in_counts() -> None:
    """Of many steps; a mean draft of 1 + .5 + .25 + .125 tokens."""
    made = DraftRates(has_draft=0.6, continues=0.5, accepted=0.7)
    count = 1e6
    mean, kept = 1.875, 0.7 + 0.5 * 0.7**2 + 0.25 * 0.7**3 + 0.125 * 0.7**4
    seen = DecayingDraftStats(steps=count, drafts=0.6 * count, max_drafted=2.4 * count, drafted=0.6 * mean * count)
    seen.accepted = 0.6 * kept * count
    result = rates(seen, 8)
    assert result.has_draft == pytest.approx(made.has_draft, rel=1e-3)
    assert result.continues == pytest.approx(made.continues, rel=1e-3)
    assert result.accepted == pytest.approx(made.accepted, rel=1e-3)


def test_of_drafts_of_one_token_nothing_is_learned_of_longer_ones() -> None:
    result = rates(DecayingDraftStats(steps=1e6, drafts=1e6, max_drafted=1e6, drafted=1e6, accepted=0.9e6), 4)
    assert result.continues > 0.99
    assert result.accepted == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (1e6, 0), (4e6, 4e6)])
def test_rates_are_probabilities_whatever_was_seen(drafted: float, accepted: float) -> None:
    result = rates(
        DecayingDraftStats(steps=1e6, drafts=min(drafted, 1e6), max_drafted=4e6, drafted=drafted, accepted=accepted), 4
    )
    assert 0 <= result.has_draft <= 1
    assert 0 <= result.continues <= 1
    assert 0 <= result.accepted <= 1


def test_drafts_are_tried_where_few_run_and_not_where_many_do() -> None:
    assert dict(DraftLengths(COST, 4).choose_changes(fleet_of(a=1, b=60))) == {0: 4}


def test_an_instance_drafts_less_as_more_runs() -> None:
    drafts, told = DraftLengths(COST, 4), []
    for running in (1, 2, 4, 8, 16):
        told.append(dict(drafts.choose_changes(fleet_of(a=running))).get(0, 0))
    assert told == sorted(told, reverse=True)
    assert (told[0], told[-1]) == (4, 0)


def test_drafts_that_are_not_sampled_are_given_up_and_tried_again_in_time() -> None:
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=4)
    assert drafts.choose_changes(fleet) == [(0, 1)]
    fleet.set_draft_length(fleet[0], 1)
    heard(drafts, A, 1, steps(4, length=1, acceptance=0.0))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == []  # a draft of one token costs nothing here: a step of eight takes as long
    fleet.set_draft_length(fleet[0], 4)
    heard(drafts, A, 4, steps(4, length=4, acceptance=0.0))
    drafts.replan(fleet)
    (told,) = drafts.choose_changes(fleet)
    assert told[1] <= 1
    for _ in range(30):
        drafts.step_finished()
    fleet.set_draft_length(fleet[0], 0)
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == [(0, 1)]


def test_drafts_that_are_sampled_are_drafted_longer() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=4.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengths(cost, 8), fleet_of(a=4)
    ((_, first),) = drafts.choose_changes(fleet)
    assert first < 8
    fleet.set_draft_length(fleet[0], first)
    heard(drafts, A, first, steps(4, length=first, acceptance=1.0, cost=cost, count=1000))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == [(0, 8)]


def test_where_verifying_is_known_to_be_dear_it_is_tried_on_fewer() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0)
    dear, cheap = (DraftLengths(dataclasses.replace(cost, verify_share=verified), 4) for verified in (4.0, 0.0))
    lengths = [dict(drafts.choose_changes(fleet_of(a=2))).get(0, 0) for drafts in (dear, DraftLengths(cost, 4), cheap)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 4)
    assert dict(cheap.choose_changes(fleet_of(a=60))) == {0: 4}
    for drafts in (dear, cheap):
        ((_, length),) = drafts.choose_changes(fleet_of(a=1))
        share = drafts.rates.drafted(np.arange(length + 1.0))[-1]
        computed = 1 + (4.0 if drafts is dear else 0.0) * share
        assert drafts.costs.step_s(1, 0.0) == pytest.approx(
            max(8.0, computed) / drafts.rates.tokens_per_step(np.arange(length + 1.0))[-1]
        )


def test_what_a_step_of_more_tokens_costs_is_learned_without_drafts() -> None:
    """The cost model says that verifying is for nothing; full instances show that each token costs as much as all."""
    wrong = CostModel(k1=0.0, k2=8.0, k3=0.0, k4=0.0, b=0.0, prefill=0.0)
    right = CostModel(k1=0.0, k2=0.0, k3=8.0, k4=0.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengths(wrong, 4), fleet_of(a=2)
    assert drafts.choose_changes(fleet) == [(0, 4)]
    for running in (1, 2, 4, 8, 16):
        heard(drafts, A, 0, steps(running, cost=right))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == []


def test_what_drafting_itself_costs_counts() -> None:
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=1)
    fleet.set_draft_length(fleet[0], 4)
    slow = COST.times(5.0)  # whoever drafts takes five times as long for a step
    for _ in range(9):
        heard(drafts, A, 4, steps(1, length=4, acceptance=0.7, cost=slow))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == [(0, 0)]
    # The machine may have been busy with something else: in time it is tried again.
    fleet.set_draft_length(fleet[0], 0)
    heard(drafts, A, 0, steps(1))
    for _ in range(30):
        drafts.step_finished()
    drafts.replan(fleet)
    ((_, again),) = drafts.choose_changes(fleet)
    assert again > 0


def test_a_report_of_changing_work_teaches_nothing() -> None:
    drafts, same, fleet = DraftLengths(COST, 4), DraftLengths(COST, 4), fleet_of(a=4)
    absurd = COST.times(1000.0)
    for running, length in ((8, 0), (4, 0), (4, 1), (3, 1), (4, 0)):
        drafts.observe(A, length, steps(running, length=length, cost=absurd))
    drafts.observe(B, 0, steps(8, cost=absurd, count=1))
    drafts.observe(B, 0, steps(8, cost=absurd, count=1))  # too few steps to tell what one takes
    drafts.replan(fleet)
    same.replan(fleet)
    assert drafts.choose_changes(fleet) == same.choose_changes(fleet)
    assert drafts.costs.step_s(4, 0) == same.costs.step_s(4, 0)


def test_a_request_that_comes_and_goes_does_not_change_what_is_worth_about_as_much() -> None:
    """With six requests a draft of one token gains an eighth, with seven it costs a hundredth, with eight an eighth."""
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=6)
    received = []
    for _ in range(3):
        received.append(drafts.choose_changes(fleet))
        fleet.set_draft_length(fleet[0], 1)
        fleet.add(fleet[0], TrajectoryId(100), 1)
        received.append(drafts.choose_changes(fleet))
        fleet.remove(fleet[0], TrajectoryId(100), 1)
    assert received == [[(0, 1)], [], [], [], [], []]
    fleet.set_draft_length(fleet[0], 0)
    fleet.add(fleet[0], TrajectoryId(100), 1)
    assert drafts.choose_changes(fleet) == []
    fleet.set_draft_length(fleet[0], 1)
    fleet.add(fleet[0], TrajectoryId(101), 1)
    assert drafts.choose_changes(fleet) == [(0, 0)]


def test_where_all_that_are_left_are_leaving_nothing_is_decided() -> None:
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=3)
    fleet.empty(fleet[0])
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == []
    fleet.join(B, PolicyVersion(0), 10_000, 64)
    fleet.add(fleet[1], TrajectoryId(100), 1)
    drafts.replan(fleet)
    assert [row for row, _ in drafts.choose_changes(fleet)] == [0, 1]


def test_costs_for_planning_are_those_of_the_lengths_decided() -> None:
    drafts = DraftLengths(COST, 4)
    assert drafts.costs.step_s(1, 0) == COST.step_s(1, 0)
    drafts.replan(fleet_of(a=1))
    assert drafts.costs.step_s(1, 0) < COST.step_s(1, 0)
    assert drafts.costs.step_s(60, 0) == pytest.approx(COST.step_s(60, 0))
    each = drafts.costs
    many = each.steps_s(*map(_floats, ((1, 8, 60, 200), (0, 0, 0, 0))))
    assert many[:3] == pytest.approx([each.step_s(n, 0) for n in (1, 8, 60)])


def test_without_drafts_the_costs_are_the_models() -> None:
    cost = CostModel(k1=1e-3, k2=8.0, k3=1.0, k4=0.5, b=0.1, prefill=0.2)
    each = DraftingCosts(cost)
    assert each.prefill == cost.prefill
    assert each.marginal_gain(3, 70, 9) == pytest.approx(cost.marginal_gain(3, 70, 9))
    assert each.marginal_gain(0, 0, 9) == pytest.approx(cost.marginal_gain(0, 0, 9))
    running, held = _floats((0, 3, 9)), _floats((0, 70, 200))
    assert each.marginal_gains(running, held, 9.0) == pytest.approx(cost.marginal_gains(running, held, 9.0))


def _floats(values: tuple[int, ...]) -> Numbers:
    return np.asarray(values, np.float64)

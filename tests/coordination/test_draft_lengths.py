"""What is learned of drafts, and how many tokens instances are told to draft."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from staleflow.pipeline.coordination import draft_lengths
from staleflow.pipeline.coordination.draft_lengths import (
    DECAY_PER_STEP,
    HALVE_AFTER,
    MEDIAN_STEPS,
    MIN_STEPS,
    PRIOR_HAS_DRAFT,
    PRIOR_STEPS,
    DecayingDraftStats,
    DraftLengths,
    DraftRates,
    StepSeconds,
    StepTimeCorrection,
    rates,
)
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


def test_draft_rates_are_estimated_from_counts() -> None:
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


def test_drafts_of_one_token_do_not_change_the_rates_of_longer_ones() -> None:
    result = rates(DecayingDraftStats(steps=1e6, drafts=1e6, max_drafted=1e6, drafted=1e6, accepted=0.9e6), 4)
    assert result.continues > 0.99
    assert result.accepted == pytest.approx(0.9, rel=1e-3)


def test_more_drafts_than_steps_count_as_one_per_step() -> None:
    """A report may count a step's drafts before the step."""
    assert rates(DecayingDraftStats(steps=10.0, drafts=90.0, max_drafted=180.0), 4).has_draft == 1.0


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (1e6, 0), (4e6, 4e6)])
def test_rates_are_probabilities_for_any_counts(drafted: float, accepted: float) -> None:
    result = rates(
        DecayingDraftStats(steps=1e6, drafts=min(drafted, 1e6), max_drafted=4e6, drafted=drafted, accepted=accepted), 4
    )
    assert 0 <= result.has_draft <= 1
    assert 0 <= result.continues <= 1
    assert 0 <= result.accepted <= 1


def test_drafts_are_used_at_low_and_not_at_high_concurrency() -> None:
    assert dict(DraftLengths(COST, 4).choose_changes(fleet_of(a=1, b=60))) == {0: 4}


def test_an_instance_drafts_less_as_concurrency_grows() -> None:
    drafts, told = DraftLengths(COST, 4), []
    for running in (1, 2, 4, 8, 16):
        told.append(dict(drafts.choose_changes(fleet_of(a=running))).get(0, 0))
    assert told == sorted(told, reverse=True)
    assert (told[0], told[-1]) == (4, 0)


def test_rejected_drafts_stop_and_are_retried_later() -> None:
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


def test_accepted_drafts_become_longer() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=4.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengths(cost, 8), fleet_of(a=4)
    ((_, first),) = drafts.choose_changes(fleet)
    assert first < 8
    fleet.set_draft_length(fleet[0], first)
    heard(drafts, A, first, steps(4, length=first, acceptance=1.0, cost=cost, count=1000))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == [(0, 8)]


def test_expensive_verification_reduces_draft_lengths() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0)
    dear, cheap = (DraftLengths(dataclasses.replace(cost, verify_share=verified), 4) for verified in (4.0, 0.0))
    lengths = [dict(drafts.choose_changes(fleet_of(a=2))).get(0, 0) for drafts in (dear, DraftLengths(cost, 4), cheap)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 4)
    assert dict(cheap.choose_changes(fleet_of(a=60))) == {0: 4}
    for drafts in (dear, cheap):
        ((_, length),) = drafts.choose_changes(fleet_of(a=1))
        assumed = DraftRates()
        share = assumed.drafted(np.arange(length + 1.0))[-1]
        computed = 1 + (4.0 if drafts is dear else 0.0) * share
        assert drafts.costs.step_s(1, 0.0) == pytest.approx(
            max(8.0, computed) / assumed.tokens_per_step(np.arange(length + 1.0))[-1]
        )


def test_the_cost_of_longer_steps_is_learned_without_drafts() -> None:
    """The cost model says that verifying is for nothing; full instances show that each token costs as much as all."""
    wrong = CostModel(k1=0.0, k2=8.0, k3=0.0, k4=0.0, b=0.0, prefill=0.0)
    right = CostModel(k1=0.0, k2=0.0, k3=8.0, k4=0.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengths(wrong, 4), fleet_of(a=2)
    assert drafts.choose_changes(fleet) == [(0, 4)]
    for running in (1, 2, 4, 8, 16):
        heard(drafts, A, 0, steps(running, cost=right))
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == []


def test_the_cost_of_drafting_is_part_of_the_decision() -> None:
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


def test_reports_with_changing_concurrency_are_ignored() -> None:
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


def test_small_changes_of_concurrency_do_not_change_the_length() -> None:
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


def test_leaving_instances_get_no_draft_length() -> None:
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=3)
    fleet.drain(fleet[0])
    drafts.replan(fleet)
    assert drafts.choose_changes(fleet) == []
    fleet.join(B, PolicyVersion(0), 10_000, 64)
    fleet.add(fleet[1], TrajectoryId(100), 1)
    drafts.replan(fleet)
    assert [row for row, _ in drafts.choose_changes(fleet)] == [0, 1]


def test_planning_costs_use_the_decided_lengths() -> None:
    drafts = DraftLengths(COST, 4)
    assert drafts.costs.step_s(1, 0) == COST.step_s(1, 0)
    drafts.replan(fleet_of(a=1))
    assert drafts.costs.step_s(1, 0) < COST.step_s(1, 0)
    assert drafts.costs.step_s(60, 0) == pytest.approx(COST.step_s(60, 0))
    each = drafts.costs
    many = each.steps_s(*map(_floats, ((1, 8, 60, 200), (0, 0, 0, 0))))
    assert many[:3] == pytest.approx([each.step_s(n, 0) for n in (1, 8, 60)])


def test_without_drafts_the_costs_are_those_of_the_model() -> None:
    cost = CostModel(k1=1e-3, k2=8.0, k3=1.0, k4=0.5, b=0.1, prefill=0.2)
    each = DraftingCosts(cost)
    assert each.prefill == cost.prefill
    assert [each.step_s(n, 70) for n in (0, 3, 9)] == pytest.approx([cost.step_s(n, 70) for n in (0, 3, 9)])
    running, held = _floats((0, 3, 9)), _floats((0, 70, 200))
    assert each.steps_s(running, held) == pytest.approx(cost.steps_s(running, held))


def mean_length(continues: float, most: int) -> float:
    """Mean tokens of a draft of at most so many."""
    return float(sum(continues**token for token in range(most)))


def mean_accepted(continues: float, accepted: float, most: int) -> float:
    """Mean tokens of a draft that are sampled."""
    return float(sum(continues**token * accepted ** (token + 1) for token in range(most)))


@pytest.mark.parametrize(
    "seen",
    [
        DecayingDraftStats(steps=100.0, drafts=60.0, max_drafted=180.0, drafted=110.0, accepted=50.0),
        DecayingDraftStats(steps=10.0, drafts=2.0, max_drafted=4.0, drafted=3.0, accepted=0.0),
        DecayingDraftStats(steps=400.0, drafts=390.0, max_drafted=2340.0, drafted=700.0, accepted=600.0),
    ],
)
def test_few_counts_are_combined_with_the_prior(seen: DecayingDraftStats) -> None:
    most, assumed, result = 4, PRIOR_STEPS * PRIOR_HAS_DRAFT, rates(seen, 4)
    length = round(seen.max_drafted / seen.drafts)
    assert result.has_draft == pytest.approx((seen.drafts + assumed) / (seen.steps + PRIOR_STEPS))
    drafted = seen.drafts * mean_length(result.continues, length) + assumed * mean_length(result.continues, most)
    assert 0 < result.continues < 1
    assert drafted == pytest.approx(seen.drafted + assumed * most)
    assert 0 < result.accepted < 1
    accepted = seen.accepted + assumed * mean_accepted(result.continues, draft_lengths.PRIOR_ACCEPTED, length)
    assert mean_accepted(result.continues, result.accepted, length) == pytest.approx(accepted / (seen.drafts + assumed))


def test_counts_are_halved_above_a_limit() -> None:
    taken = steps(2, length=3, acceptance=1.0, count=5)
    almost, enough = (DecayingDraftStats(count, 8.0, 16.0, 12.0, 4.0) for count in (HALVE_AFTER - 1.0, HALVE_AFTER))
    for seen in (almost, enough):
        seen.add(10.0, taken, 3)
    assert almost == DecayingDraftStats(HALVE_AFTER + 9.0, 18.0, 46.0, 42.0, 34.0)
    assert enough == DecayingDraftStats(HALVE_AFTER / 2 + 10.0, 14.0, 38.0, 36.0, 32.0)


def test_a_training_step_decays_the_draft_statistics() -> None:
    drafts = DraftLengths(COST, 4)
    heard(drafts, A, 3, steps(2, length=3, acceptance=1.0, count=5))
    assert drafts._stats == DecayingDraftStats(10.0, 10.0, 30.0, 30.0, 30.0)
    drafts.step_finished()
    left = [DECAY_PER_STEP * count for count in (10.0, 10.0, 30.0, 30.0, 30.0)]
    assert dataclasses.astuple(drafts._stats) == pytest.approx(left)


def test_step_times_are_corrected_by_medians_with_interpolation() -> None:
    """Of steps with 1, 2 and 8 tokens; those of 2 are seen in every training step."""
    correction = StepTimeCorrection()
    assert correction.of(_floats((1, 100))).tolist() == [1.0, 1.0]
    for tokens, factors in ((1, (3.0, 9.0, 4.0)), (2, (6.0,)), (8, (2.0, 1.0))):
        for factor in factors:
            correction.add(tokens, factor)
    assert correction.of(np.asarray([0.5, 1.0, 2**0.5, 2.0, 4.0, 8.0, 99.0])).tolist() == [
        4.0, 4.0, 5.0, 6.0, 3.75, 1.5, 1.5,
    ]  # fmt: skip
    correction.fade()
    assert correction.of(_floats((1, 2, 8))).tolist() == [4.0, 6.0, 1.5], "all were seen since"
    for expected in ([6.5, 6.0, 1.0], [4.0, 6.0, 6.0], [6.0, 6.0, 6.0]):
        correction.add(2, 6.0)
        correction.fade()
        assert correction.of(_floats((1, 2, 8))).tolist() == expected
    for factor in range(1, MEDIAN_STEPS + 3):
        correction.add(16, float(factor))
    assert correction.of(_floats((16,))).tolist() == [MEDIAN_STEPS // 2 + 3.0]


def test_steps_with_drafts_have_an_additional_correction() -> None:
    cost = CostModel(k1=0.5, k2=8.0, k3=1.0, k4=2.0, b=0.0, prefill=0.0)
    seconds = StepSeconds(cost)
    seconds.observe(4.0, 10.0, 2 * cost.step_s(4, 10), drafted=False)
    seconds.observe(4.0, 30.0, 6 * cost.step_s(4, 30), drafted=True)
    at = _floats((4, 9)), _floats((20, 0))
    for factor, of in ((2.0, seconds.plain), (6.0, seconds.drafted)):
        assert of(*at) == pytest.approx([factor * cost.step_s(4, 20), factor * cost.step_s(9, 0)])
    for _ in range(2):  # what was seen since the last call stays
        seconds.fade()
    assert seconds.plain(*at) == pytest.approx(seconds.drafted(*at))


@pytest.mark.parametrize("verify_share", [0.5, 1.0])
def test_a_report_gives_the_step_time_for_its_verified_tokens(verify_share: float) -> None:
    """Steps with drafts count as such if there was one draft at least; drafts may be found in some steps only."""
    cost = CostModel(k1=0.25, k2=1.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0, verify_share=verify_share)
    drafts = DraftLengths(cost, 4)
    plain = DecodeStats(running=4, kv_tokens=20, seconds=50.0, tokens=20, drafts=0, drafted_tokens=0, accepted_tokens=0)
    heard(drafts, A, 2, plain)  # it may draft, and found nothing to draft from
    assert drafts._seconds_of.plain(_floats((4,)), _floats((20,))) == pytest.approx([10.0])
    assert drafts._seconds_of.drafted(_floats((4,)), _floats((20,))) == pytest.approx([10.0])
    once = dataclasses.replace(plain, seconds=75.0, tokens=22, drafts=1, drafted_tokens=5, accepted_tokens=2)
    drafts.observe(A, 2, once)
    computed = 4 * (1 + verify_share * 5 / 20)
    assert drafts._seconds_of.drafted(_floats((1,)) * computed, _floats((20,))) == pytest.approx([15.0])
    assert drafts._seconds_of.plain(_floats((4,)), _floats((20,))) == pytest.approx([10.0])


@pytest.mark.parametrize(("count", "learns"), [(MIN_STEPS, True), (MIN_STEPS - 1, False)])
def test_a_report_of_too_few_steps_is_ignored(count: int, learns: bool) -> None:
    drafts = DraftLengths(COST, 4)
    heard(drafts, A, 2, steps(4, length=2, acceptance=0.0, count=count))
    assert (drafts._stats.steps > 0) == learns


def test_the_first_report_of_a_returning_instance_is_ignored() -> None:
    drafts, taken = DraftLengths(COST, 4), steps(4, length=2)
    drafts.observe(A, 2, taken)
    drafts.remove(A)
    drafts.remove(B)
    drafts.observe(A, 2, taken)
    assert drafts._stats.steps == 0
    drafts.observe(A, 2, taken)
    assert drafts._stats.steps == 400


def test_the_length_with_the_fewest_seconds_per_token_is_chosen() -> None:
    """By plain loops over the requests that run and over lengths; each request has 5 tokens in the cache."""
    cost = CostModel(k1=0.25, k2=8.0, k3=1.0, k4=2.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengths(cost, 4), fleet_of(a=2, b=4)
    for row in (0, 1):
        fleet.grow(fleet[row], 4 * len(fleet[row].trajectories))
    drafts.replan(fleet)
    assumed = DraftRates()
    best = [0]
    for running in range(1, 65):
        seconds = []
        for length in range(5):
            drafted = assumed.has_draft * mean_length(assumed.continues, length)
            gained = 1 + assumed.has_draft * mean_accepted(assumed.continues, assumed.accepted, length)
            step_s = 0.25 * 5 * running + max(8.0, running * (1 + drafted)) + 2.0
            seconds.append(step_s / gained)
        assert drafts._seconds[running - 1] == pytest.approx(seconds)
        best.append(seconds.index(min(seconds)))
    assert len(drafts._seconds) == 64
    assert dict(drafts.choose_changes(fleet)) == {0: best[2], 1: best[4]}
    for running in (1, 3, 64):
        drafted = assumed.drafted(np.arange(best[running] + 1.0))[-1]
        gained = assumed.tokens_per_step(np.arange(best[running] + 1.0))[-1]
        expected = (0.25 * 7 + max(8.0, running * (1 + drafted)) + 2.0) / gained
        assert drafts.costs.step_s(running, 7) == pytest.approx(expected)
    nothing = _floats((0,)), _floats((7,))
    assert drafts.costs.steps_s(*nothing) == pytest.approx(cost.steps_s(*nothing))
    drafts.replan(fleet_of(a=0))
    assert drafts._seconds[0][0] == pytest.approx(cost.step_s(1, 0)), "where nothing runs, nothing is cached"


def test_without_instances_or_drafts_no_length_is_sent() -> None:
    drafts, nothing = DraftLengths(COST, 4), DraftLengths(COST, 0)
    drafts.replan(MutableFleet())
    assert drafts.costs.step_s(1, 0) == COST.step_s(1, 0)
    assert nothing.choose_changes(fleet_of(a=1)) == []
    heard(nothing, A, 2, steps(4, length=2))
    assert nothing._stats == DecayingDraftStats()


def test_an_idle_instance_keeps_its_length() -> None:
    drafts, fleet = DraftLengths(COST, 4), fleet_of(a=0, b=1)
    fleet.set_draft_length(fleet[0], 4)  # of as many requests as it may run, it should draft none
    assert drafts.choose_changes(fleet) == [(1, 4)]


def test_a_length_with_less_than_the_minimum_gain_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_lengths, "GAIN", 0.5)
    drafts, fleet = DraftLengths(COST, 1), fleet_of(a=1)
    drafts.replan(fleet)
    for seconds, due in ((1.0, []), (0.9, [(0, 1)])):
        drafts._seconds[0] = (2.0, seconds)
        assert drafts.choose_changes(fleet) == due


def _floats(values: tuple[int, ...]) -> Numbers:
    return np.asarray(values, np.float64)

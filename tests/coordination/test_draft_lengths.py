"""Draft lengths: statistics learned from reports, and the lengths sent to instances."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from staleflow.pipeline.coordination import draft_lengths
from staleflow.pipeline.coordination.draft_lengths import (
    DECAY_PER_STEP,
    HALVE_AFTER,
    MEDIAN_MEASUREMENTS,
    MIN_STEPS,
    PRIOR_DRAFT,
    PRIOR_STEPS,
    DecayingDraftStats,
    DraftLengthPlanner,
    DraftRates,
    StepTimeCorrection,
    StepTimeModel,
    estimate_rates,
)
from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.pipeline.coordination.fleet import MutableFleet
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel, DraftingCosts, Numbers, tokens_per_step

A, B = InstanceId("a"), InstanceId("b")
COST = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0)
"""Steps of up to eight tokens take 8 s; each further token adds 1 s."""


def fleet_of(**running: int) -> MutableFleet:
    fleet, numbers = MutableFleet(), itertools.count()
    for name, count in running.items():
        one = fleet.add_instance(InstanceId(name), PolicyVersion(0), 10_000, 64)
        for number in itertools.islice(numbers, count):
            fleet.add_trajectory(one, TrajectoryId(number), 1)
    return fleet


def steps(
    running: int, *, length: int = 0, acceptance: float = 0.0, cost: CostModel = COST, count: int = 100
) -> DecodeStats:
    """Return the report of `count` decode steps in which each request has a draft of exactly this length."""
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


def observe_report(drafts: DraftLengthPlanner, instance: InstanceId, length: int, stats: DecodeStats) -> None:
    """Observe the same report twice; the first report of an instance is ignored."""
    for _ in range(2):
        drafts.observe(instance, length, stats)


def test_draft_rates_are_estimated_from_counts() -> None:
    """Over many steps the mean draft is 1 + 0.5 + 0.25 + 0.125 tokens."""
    made = DraftRates(draft=0.6, continuation=0.5, acceptance=0.7)
    count = 1e6
    mean, kept = 1.875, 0.7 + 0.5 * 0.7**2 + 0.25 * 0.7**3 + 0.125 * 0.7**4
    seen = DecayingDraftStats(
        request_steps=count, num_drafts=0.6 * count, max_drafted_tokens=2.4 * count, drafted_tokens=0.6 * mean * count
    )
    seen.accepted_tokens = 0.6 * kept * count
    result = estimate_rates(seen, 8)
    assert result.draft == pytest.approx(made.draft, rel=1e-3)
    assert result.continuation == pytest.approx(made.continuation, rel=1e-3)
    assert result.acceptance == pytest.approx(made.acceptance, rel=1e-3)


def test_drafts_of_one_token_do_not_change_the_rates_of_longer_ones() -> None:
    result = estimate_rates(
        DecayingDraftStats(
            request_steps=1e6, num_drafts=1e6, max_drafted_tokens=1e6, drafted_tokens=1e6, accepted_tokens=0.9e6
        ),
        4,
    )
    assert result.continuation > 0.99
    assert result.acceptance == pytest.approx(0.9, rel=1e-3)


def test_more_drafts_than_steps_count_as_one_per_step() -> None:
    """A report may count the drafts of a step before the step."""
    assert (
        estimate_rates(DecayingDraftStats(request_steps=10.0, num_drafts=90.0, max_drafted_tokens=180.0), 4).draft
        == 1.0
    )


@pytest.mark.parametrize(("drafted", "accepted"), [(0, 0), (1e6, 0), (4e6, 4e6)])
def test_rates_are_probabilities_for_any_counts(drafted: float, accepted: float) -> None:
    result = estimate_rates(
        DecayingDraftStats(
            request_steps=1e6,
            num_drafts=min(drafted, 1e6),
            max_drafted_tokens=4e6,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        ),
        4,
    )
    assert 0 <= result.draft <= 1
    assert 0 <= result.continuation <= 1
    assert 0 <= result.acceptance <= 1


def test_drafts_are_used_at_low_and_not_at_high_concurrency() -> None:
    assert dict(DraftLengthPlanner(COST, 4).choose_changes(fleet_of(a=1, b=60))) == {0: 4}


def test_an_instance_drafts_less_as_concurrency_grows() -> None:
    drafts, chosen_lengths = DraftLengthPlanner(COST, 4), []
    for running in (1, 2, 4, 8, 16):
        chosen_lengths.append(dict(drafts.choose_changes(fleet_of(a=running))).get(0, 0))
    assert chosen_lengths == sorted(chosen_lengths, reverse=True)
    assert (chosen_lengths[0], chosen_lengths[-1]) == (4, 0)


def test_rejected_drafts_stop_and_are_retried_later() -> None:
    drafts, fleet = DraftLengthPlanner(COST, 4), fleet_of(a=4)
    assert drafts.choose_changes(fleet) == [(0, 1)]
    fleet.set_draft_length(fleet[0], 1)
    observe_report(drafts, A, 1, steps(4, length=1, acceptance=0.0))
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == []  # a draft of one token costs nothing here: a step of eight takes as long
    fleet.set_draft_length(fleet[0], 4)
    observe_report(drafts, A, 4, steps(4, length=4, acceptance=0.0))
    drafts.compute_best_lengths(fleet)
    (chosen_lengths,) = drafts.choose_changes(fleet)
    assert chosen_lengths[1] <= 1
    for _ in range(30):
        drafts.decay_statistics()
    fleet.set_draft_length(fleet[0], 0)
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == [(0, 1)]


def test_accepted_drafts_become_longer() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=4.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengthPlanner(cost, 8), fleet_of(a=4)
    ((_, first),) = drafts.choose_changes(fleet)
    assert first < 8
    fleet.set_draft_length(fleet[0], first)
    observe_report(drafts, A, first, steps(4, length=first, acceptance=1.0, cost=cost, count=1000))
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == [(0, 8)]


def test_expensive_verification_reduces_draft_lengths() -> None:
    cost = CostModel(k1=0.0, k2=8.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0)
    dear, cheap = (DraftLengthPlanner(dataclasses.replace(cost, verify_share=verified), 4) for verified in (4.0, 0.0))
    lengths = [
        dict(drafts.choose_changes(fleet_of(a=2))).get(0, 0) for drafts in (dear, DraftLengthPlanner(cost, 4), cheap)
    ]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 4)
    assert dict(cheap.choose_changes(fleet_of(a=60))) == {0: 4}
    for drafts in (dear, cheap):
        ((_, length),) = drafts.choose_changes(fleet_of(a=1))
        assumed = DraftRates()
        share = assumed.mean_drafted_tokens(np.arange(length + 1.0))[-1]
        computed = 1 + (4.0 if drafts is dear else 0.0) * share
        assert drafts.costs.step_s(1, 0.0) == pytest.approx(
            max(8.0, computed) / assumed.mean_sampled_tokens(np.arange(length + 1.0))[-1]
        )


def test_the_cost_of_longer_steps_is_learned_without_drafts() -> None:
    """The cost model assumes free verification; reports of full instances show a cost per token."""
    wrong = CostModel(k1=0.0, k2=8.0, k3=0.0, k4=0.0, b=0.0, prefill=0.0)
    right = CostModel(k1=0.0, k2=0.0, k3=8.0, k4=0.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengthPlanner(wrong, 4), fleet_of(a=2)
    assert drafts.choose_changes(fleet) == [(0, 4)]
    for running in (1, 2, 4, 8, 16):
        observe_report(drafts, A, 0, steps(running, cost=right))
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == []


def test_the_cost_of_drafting_is_part_of_the_decision() -> None:
    drafts, fleet = DraftLengthPlanner(COST, 4), fleet_of(a=1)
    fleet.set_draft_length(fleet[0], 4)
    slow = COST.times(5.0)  # steps with drafts take five times as long
    for _ in range(9):
        observe_report(drafts, A, 4, steps(1, length=4, acceptance=0.7, cost=slow))
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == [(0, 0)]
    # The machine may have been busy with something else: in time it is tried again.
    fleet.set_draft_length(fleet[0], 0)
    observe_report(drafts, A, 0, steps(1))
    for _ in range(30):
        drafts.decay_statistics()
    drafts.compute_best_lengths(fleet)
    ((_, again),) = drafts.choose_changes(fleet)
    assert again > 0


def test_reports_with_changing_concurrency_are_ignored() -> None:
    drafts, same, fleet = DraftLengthPlanner(COST, 4), DraftLengthPlanner(COST, 4), fleet_of(a=4)
    absurd = COST.times(1000.0)
    for running, length in ((8, 0), (4, 0), (4, 1), (3, 1), (4, 0)):
        drafts.observe(A, length, steps(running, length=length, cost=absurd))
    drafts.observe(B, 0, steps(8, cost=absurd, count=1))
    drafts.observe(B, 0, steps(8, cost=absurd, count=1))  # too few steps to estimate the step time
    drafts.compute_best_lengths(fleet)
    same.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == same.choose_changes(fleet)
    assert drafts.costs.step_s(4, 0) == same.costs.step_s(4, 0)


def test_small_changes_of_concurrency_do_not_change_the_length() -> None:
    """With six requests a draft of one token gains an eighth, with seven it costs a hundredth, with eight an eighth."""
    drafts, fleet = DraftLengthPlanner(COST, 4), fleet_of(a=6)
    received = []
    for _ in range(3):
        received.append(drafts.choose_changes(fleet))
        fleet.set_draft_length(fleet[0], 1)
        fleet.add_trajectory(fleet[0], TrajectoryId(100), 1)
        received.append(drafts.choose_changes(fleet))
        fleet.remove_trajectory(fleet[0], TrajectoryId(100), 1)
    assert received == [[(0, 1)], [], [], [], [], []]
    fleet.set_draft_length(fleet[0], 0)
    fleet.add_trajectory(fleet[0], TrajectoryId(100), 1)
    assert drafts.choose_changes(fleet) == []
    fleet.set_draft_length(fleet[0], 1)
    fleet.add_trajectory(fleet[0], TrajectoryId(101), 1)
    assert drafts.choose_changes(fleet) == [(0, 0)]


def test_leaving_instances_get_no_draft_length() -> None:
    drafts, fleet = DraftLengthPlanner(COST, 4), fleet_of(a=3)
    fleet.drain(fleet[0])
    drafts.compute_best_lengths(fleet)
    assert drafts.choose_changes(fleet) == []
    fleet.add_instance(B, PolicyVersion(0), 10_000, 64)
    fleet.add_trajectory(fleet[1], TrajectoryId(100), 1)
    drafts.compute_best_lengths(fleet)
    assert [row for row, _ in drafts.choose_changes(fleet)] == [0, 1]


def test_planning_costs_use_the_decided_lengths() -> None:
    drafts = DraftLengthPlanner(COST, 4)
    assert drafts.costs.step_s(1, 0) == COST.step_s(1, 0)
    drafts.compute_best_lengths(fleet_of(a=1))
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


def mean_length(continuation: float, most: int) -> float:
    """Return the mean number of tokens of a draft of at most this length."""
    return float(sum(continuation**token for token in range(most)))


def mean_accepted(continuation: float, accepted: float, most: int) -> float:
    """Return the mean number of accepted tokens of a draft."""
    return float(sum(continuation**token * accepted ** (token + 1) for token in range(most)))


@pytest.mark.parametrize(
    "stats",
    [
        DecayingDraftStats(
            request_steps=100.0, num_drafts=60.0, max_drafted_tokens=180.0, drafted_tokens=110.0, accepted_tokens=50.0
        ),
        DecayingDraftStats(
            request_steps=10.0, num_drafts=2.0, max_drafted_tokens=4.0, drafted_tokens=3.0, accepted_tokens=0.0
        ),
        DecayingDraftStats(
            request_steps=400.0,
            num_drafts=390.0,
            max_drafted_tokens=2340.0,
            drafted_tokens=700.0,
            accepted_tokens=600.0,
        ),
    ],
)
def test_few_counts_are_combined_with_the_prior(stats: DecayingDraftStats) -> None:
    most, assumed, result = 4, PRIOR_STEPS * PRIOR_DRAFT, estimate_rates(stats, 4)
    length = round(stats.max_drafted_tokens / stats.num_drafts)
    assert result.draft == pytest.approx((stats.num_drafts + assumed) / (stats.request_steps + PRIOR_STEPS))
    drafted = stats.num_drafts * mean_length(result.continuation, length) + assumed * mean_length(
        result.continuation, most
    )
    assert 0 < result.continuation < 1
    assert drafted == pytest.approx(stats.drafted_tokens + assumed * most)
    assert 0 < result.acceptance < 1
    accepted = stats.accepted_tokens + assumed * mean_accepted(result.continuation, draft_lengths.PRIOR_ACCEPT, length)
    assert mean_accepted(result.continuation, result.acceptance, length) == pytest.approx(
        accepted / (stats.num_drafts + assumed)
    )


def test_counts_are_halved_above_a_limit() -> None:
    taken = steps(2, length=3, acceptance=1.0, count=5)
    almost, enough = (DecayingDraftStats(count, 8.0, 16.0, 12.0, 4.0) for count in (HALVE_AFTER - 1.0, HALVE_AFTER))
    for seen in (almost, enough):
        seen.add(10.0, taken, 3)
    assert almost == DecayingDraftStats(HALVE_AFTER + 9.0, 18.0, 46.0, 42.0, 34.0)
    assert enough == DecayingDraftStats(HALVE_AFTER / 2 + 10.0, 14.0, 38.0, 36.0, 32.0)


def test_a_training_step_decays_the_draft_statistics() -> None:
    drafts = DraftLengthPlanner(COST, 4)
    observe_report(drafts, A, 3, steps(2, length=3, acceptance=1.0, count=5))
    assert drafts._stats == DecayingDraftStats(10.0, 10.0, 30.0, 30.0, 30.0)
    drafts.decay_statistics()
    left = [DECAY_PER_STEP * count for count in (10.0, 10.0, 30.0, 30.0, 30.0)]
    assert dataclasses.astuple(drafts._stats) == pytest.approx(left)


def test_step_times_are_corrected_by_medians_with_interpolation() -> None:
    """For steps with 1, 2 and 8 tokens; those with 2 occur in every training step."""
    correction = StepTimeCorrection()
    assert correction.factors(_floats((1, 100))).tolist() == [1.0, 1.0]
    for tokens, factors in ((1, (3.0, 9.0, 4.0)), (2, (6.0,)), (8, (2.0, 1.0))):
        for factor in factors:
            correction.add(tokens, factor)
    assert correction.factors(np.asarray([0.5, 1.0, 2**0.5, 2.0, 4.0, 8.0, 99.0])).tolist() == [
        4.0, 4.0, 5.0, 6.0, 3.75, 1.5, 1.5,
    ]  # fmt: skip
    correction.decay()
    assert correction.factors(_floats((1, 2, 8))).tolist() == [4.0, 6.0, 1.5], "all were seen since"
    for expected in ([6.5, 6.0, 1.0], [4.0, 6.0, 6.0], [6.0, 6.0, 6.0]):
        correction.add(2, 6.0)
        correction.decay()
        assert correction.factors(_floats((1, 2, 8))).tolist() == expected
    for factor in range(1, MEDIAN_MEASUREMENTS + 3):
        correction.add(16, float(factor))
    assert correction.factors(_floats((16,))).tolist() == [MEDIAN_MEASUREMENTS // 2 + 3.0]


def test_steps_with_drafts_have_an_additional_correction() -> None:
    cost = CostModel(k1=0.5, k2=8.0, k3=1.0, k4=2.0, b=0.0, prefill=0.0)
    seconds = StepTimeModel(cost)
    seconds.observe(4.0, 10.0, 2 * cost.step_s(4, 10), drafted=False)
    seconds.observe(4.0, 30.0, 6 * cost.step_s(4, 30), drafted=True)
    at = _floats((4, 9)), _floats((20, 0))
    for factor, of in ((2.0, seconds.seconds_without_drafts), (6.0, seconds.seconds_with_drafts)):
        assert of(*at) == pytest.approx([factor * cost.step_s(4, 20), factor * cost.step_s(9, 0)])
    for _ in range(2):  # statistics since the last call are kept
        seconds.decay()
    assert seconds.seconds_without_drafts(*at) == pytest.approx(seconds.seconds_with_drafts(*at))


@pytest.mark.parametrize("verify_share", [0.5, 1.0])
def test_a_report_gives_the_step_time_for_its_verified_tokens(verify_share: float) -> None:
    """Steps count as steps with drafts if they had at least one; drafts may be found in some steps only."""
    cost = CostModel(k1=0.25, k2=1.0, k3=1.0, k4=0.0, b=0.0, prefill=0.0, verify_share=verify_share)
    drafts = DraftLengthPlanner(cost, 4)
    plain = DecodeStats(running=4, kv_tokens=20, seconds=50.0, tokens=20, drafts=0, drafted_tokens=0, accepted_tokens=0)
    observe_report(drafts, A, 2, plain)  # it may draft, and found nothing to draft from
    assert drafts._step_time_model.seconds_without_drafts(_floats((4,)), _floats((20,))) == pytest.approx([10.0])
    assert drafts._step_time_model.seconds_with_drafts(_floats((4,)), _floats((20,))) == pytest.approx([10.0])
    once = dataclasses.replace(plain, seconds=75.0, tokens=22, drafts=1, drafted_tokens=5, accepted_tokens=2)
    drafts.observe(A, 2, once)
    computed = 4 * (1 + verify_share * 5 / 20)
    assert drafts._step_time_model.seconds_with_drafts(_floats((1,)) * computed, _floats((20,))) == pytest.approx(
        [15.0]
    )
    assert drafts._step_time_model.seconds_without_drafts(_floats((4,)), _floats((20,))) == pytest.approx([10.0])


@pytest.mark.parametrize(("count", "learns"), [(MIN_STEPS, True), (MIN_STEPS - 1, False)])
def test_a_report_of_too_few_steps_is_ignored(count: int, learns: bool) -> None:
    drafts = DraftLengthPlanner(COST, 4)
    observe_report(drafts, A, 2, steps(4, length=2, acceptance=0.0, count=count))
    assert (drafts._stats.request_steps > 0) == learns


def test_the_first_report_of_a_returning_instance_is_ignored() -> None:
    drafts, taken = DraftLengthPlanner(COST, 4), steps(4, length=2)
    drafts.observe(A, 2, taken)
    drafts.remove_instance(A)
    drafts.remove_instance(B)
    drafts.observe(A, 2, taken)
    assert drafts._stats.request_steps == 0
    drafts.observe(A, 2, taken)
    assert drafts._stats.request_steps == 400


def test_the_length_with_the_fewest_seconds_per_token_is_chosen() -> None:
    """Compared with plain loops over running requests and lengths; each request has 5 cached tokens."""
    cost = CostModel(k1=0.25, k2=8.0, k3=1.0, k4=2.0, b=0.0, prefill=0.0)
    drafts, fleet = DraftLengthPlanner(cost, 4), fleet_of(a=2, b=4)
    for row in (0, 1):
        fleet.add_kv_tokens(fleet[row], 4 * len(fleet[row].trajectories))
    drafts.compute_best_lengths(fleet)
    assumed = DraftRates()
    best = [0]
    for running in range(1, 65):
        seconds = []
        for length in range(5):
            drafted = assumed.draft * mean_length(assumed.continuation, length)
            gained = 1 + assumed.draft * mean_accepted(assumed.continuation, assumed.acceptance, length)
            step_s = 0.25 * 5 * running + max(8.0, running * (1 + drafted)) + 2.0
            seconds.append(step_s / gained)
        assert drafts._seconds_per_token[running - 1] == pytest.approx(seconds)
        best.append(seconds.index(min(seconds)))
    assert len(drafts._seconds_per_token) == 64
    assert dict(drafts.choose_changes(fleet)) == {0: best[2], 1: best[4]}
    for running in (1, 3, 64):
        drafted = assumed.mean_drafted_tokens(np.arange(best[running] + 1.0))[-1]
        gained = assumed.mean_sampled_tokens(np.arange(best[running] + 1.0))[-1]
        expected = (0.25 * 7 + max(8.0, running * (1 + drafted)) + 2.0) / gained
        assert drafts.costs.step_s(running, 7) == pytest.approx(expected)
    nothing = _floats((0,)), _floats((7,))
    assert drafts.costs.steps_s(*nothing) == pytest.approx(cost.steps_s(*nothing))
    drafts.compute_best_lengths(fleet_of(a=0))
    assert drafts._seconds_per_token[0][0] == pytest.approx(cost.step_s(1, 0)), "where nothing runs, nothing is cached"


def test_without_instances_or_drafts_no_length_is_sent() -> None:
    drafts, nothing = DraftLengthPlanner(COST, 4), DraftLengthPlanner(COST, 0)
    drafts.compute_best_lengths(MutableFleet())
    assert drafts.costs.step_s(1, 0) == COST.step_s(1, 0)
    assert nothing.choose_changes(fleet_of(a=1)) == []
    observe_report(nothing, A, 2, steps(4, length=2))
    assert nothing._stats == DecayingDraftStats()


def test_an_idle_instance_keeps_its_length() -> None:
    drafts, fleet = DraftLengthPlanner(COST, 4), fleet_of(a=0, b=1)
    fleet.set_draft_length(fleet[0], 4)  # of as many requests as it may run, it should draft none
    assert drafts.choose_changes(fleet) == [(1, 4)]


def test_a_length_with_less_than_the_minimum_gain_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_lengths, "MIN_GAIN", 0.5)
    drafts, fleet = DraftLengthPlanner(COST, 1), fleet_of(a=1)
    drafts.compute_best_lengths(fleet)
    for seconds, due in ((1.0, []), (0.9, [(0, 1)])):
        drafts._seconds_per_token[0] = (2.0, seconds)
        assert drafts.choose_changes(fleet) == due


def _floats(values: tuple[int, ...]) -> Numbers:
    return np.asarray(values, np.float64)

"""Evaluation statistics against formulas and enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.stores.reward_statistics import (
    MIN_PROMPTS,
    Estimate,
    best_of,
    estimate,
    majority_reward,
    paired_difference,
    pass_at_ks,
    sign_flip_p,
    student_quantile,
    wilson_interval,
)

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6)


@given(REWARDS, st.data())
def test_best_of_k_is_the_mean_over_all_choices_of_k(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    choices = [max(choice) for choice in itertools.combinations(rewards, k)]
    assert best_of(rewards, k) == pytest.approx(statistics.fmean(choices))


@given(st.integers(1, 200), st.data())
def test_best_of_k_with_binary_rewards_is_pass_at_k(count: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    written = 1 - math.comb(count - right, k) / math.comb(count, k)
    assert best_of([1.0] * right + [0.0] * (count - right), k) == pytest.approx(written)


def test_best_of_k_with_fewer_responses_raises() -> None:
    with pytest.raises(ValueError, match="best of 3 of 2 responses"):
        best_of([1.0, 0.0], 3)
    assert [pass_at_ks(n) for n in (0, 1, 2, 3, 8)] == [[], [], [2], [2, 3], [2, 4, 8]]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_majority_is_the_expected_reward_of_a_random_most_frequent_answer(answers: list[str]) -> None:
    reward = {"a": 1.0, "b": 0.0, "c": 0.5}
    most = max(answers.count(answer) for answer in set(answers))
    winners = sorted({answer for answer in answers if answers.count(answer) == most})
    expected = statistics.fmean(reward[answer] for answer in winners)
    assert majority_reward(answers, [reward[answer] for answer in answers]) == pytest.approx(expected)


def test_wilson_intervals_solve_their_equation() -> None:
    """Its bounds p are the solutions of |share - p| = z sqrt(p (1 - p) / n)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    for share, trials in ((0.3, 20.0), (0.5, 6.5), (0.98, 1000.0)):
        for bound in dataclasses.astuple(wilson_interval(share, trials)):
            assert abs(share - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / trials))
    six = estimate([[0.0]] * 6)
    assert six.interval is not None
    assert (six.stderr, six.interval.low, round(six.interval.high, 3)) == (0.0, 0.0, 0.39)


def test_the_standard_error_is_clustered_by_prompt() -> None:
    """Equation 4 of arXiv 2411.00640 with the factor for an estimated mean."""
    rng = np.random.default_rng(1)
    ease = rng.random((50, 1))
    rewards = (rng.random((50, 8)) < ease).astype(float)
    mean, num = rewards.mean(), rewards.size
    written = sum((row[i] - mean) * (row[j] - mean) for row in rewards for i in range(8) for j in range(8)) / num**2
    result = estimate(rewards.tolist())
    assert result.stderr is not None and result.interval is not None
    assert result.mean == pytest.approx(mean)
    assert result.stderr == pytest.approx(math.sqrt(written * 50 / 49))
    independent = math.sqrt(mean * (1 - mean) / num)
    assert result.stderr > 1.5 * independent  # as if 400 prompts had been answered
    expected = wilson_interval(mean, mean * (1 - mean) / result.stderr**2, student_quantile(49))
    assert (result.interval.low, result.interval.high) == pytest.approx((expected.low, expected.high))


def test_confidence_intervals_have_their_nominal_coverage() -> None:
    """600 samples of 30 prompts with beta-distributed success rates and 4 responses each."""
    rng = np.random.default_rng(2)
    inside = {"binary": 0, "other": 0}
    for _ in range(600):
        ease = rng.beta(0.5, 1.5, (30, 1))
        for kind, noise in (("binary", rng.random((30, 4)) < ease), ("other", ease + rng.normal(0, 0.1, (30, 4)))):
            result = estimate(np.asarray(noise, float).tolist())
            assert result is not None and result.interval is not None
            inside[kind] += result.interval.low <= 0.25 <= result.interval.high
    assert all(0.92 <= count / 600 <= 0.98 for count in inside.values()), inside


@pytest.mark.parametrize("prompts", [2, 3, 5, 10])
def test_intervals_of_few_prompts_with_many_responses_have_their_nominal_coverage(prompts: int) -> None:
    rng, num_inside = np.random.default_rng(4), 0
    for _ in range(1000):
        ease = rng.beta(2, 2, (prompts, 1))
        result = estimate((rng.random((prompts, 16)) < ease).astype(float).tolist())
        assert result.interval is not None
        num_inside += result.interval.low <= 0.5 <= result.interval.high
    assert num_inside / 1000 >= 0.93


def test_too_few_prompts_have_no_interval() -> None:
    few = estimate([[0.5]] * (MIN_PROMPTS - 1))
    assert few.interval is None
    enough = estimate([[float(i)] for i in range(MIN_PROMPTS)])
    assert enough.mean is not None and enough.interval is not None and enough.stderr is not None
    assert enough.interval.high - enough.mean == pytest.approx(2.262 * enough.stderr, rel=1e-3)
    assert estimate([[0.5]] * MIN_PROMPTS).interval is None, "no deviation to judge by"
    assert estimate([[], []]) == Estimate(mean=None, num_prompts=0)
    one = estimate([[], [1.0, 0.5]])
    assert (one.mean, one.num_prompts, one.stderr) == (0.75, 1, None)
    for degrees, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571)):
        assert student_quantile(degrees) == pytest.approx(quantile, rel=0.01)
    assert student_quantile(8) == pytest.approx(2.306, rel=1e-3)
    assert student_quantile(10**6) == pytest.approx(1.96, rel=1e-3)


def test_a_paired_difference_has_the_error_of_the_differences() -> None:
    base = {f"p{i}": [float(i % 10)] for i in range(40)}
    other = {prompt: [reward + 1.0 + 0.1 * (i % 2)] for i, (prompt, (reward,)) in enumerate(base.items())}
    differences = [1.0 + 0.1 * (i % 2) for i in range(40)]
    result = paired_difference(base | {"only here": [5.0]}, other | {"only there": [5.0], "none": []})
    assert result is not None
    assert result.num_prompts == 40
    assert result.mean == pytest.approx(1.05)
    assert result.stderr == pytest.approx(statistics.stdev(differences) / math.sqrt(40))
    assert result.p == pytest.approx(1e-4)
    assert result.interval.low < 1.05 < result.interval.high
    assert paired_difference(dict(list(base.items())[: MIN_PROMPTS - 1]), other) is None
    same = paired_difference(base, base)
    assert same is not None
    assert (same.mean, same.stderr, same.p) == (0.0, 0.0, 1.0)


def test_sign_flip_p_equals_the_binomial_test_for_equal_differences() -> None:
    for plus, minus in ((5, 0), (9, 2), (6, 6)):
        count = plus + minus
        tail = sum(math.comb(count, i) for i in range(count + 1) if abs(count - 2 * i) >= abs(plus - minus))
        assert sign_flip_p([0.5] * plus + [-0.5] * minus + [0.0]) == pytest.approx(tail / 2**count)
    tail = sum(math.comb(60, i) for i in range(61) if abs(60 - 2 * i) >= 16)
    assert sign_flip_p([1.0] * 38 + [-1.0] * 22) == pytest.approx(tail / 2**60, abs=0.01)

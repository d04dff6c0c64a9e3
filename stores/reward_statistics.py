"""Statistics of rewards: means with intervals, pass@k, majority, and paired differences. Pure.

Rewards come prompt by prompt: a sequence for each prompt, of its responses. The prompts are the sample: responses to
one prompt resemble each other, so they do not count as independent (Miller 2024, arXiv 2411.00640, section 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE_LEVEL = 0.95
"""Share of intervals that contain the true mean."""
MIN_PROMPTS = 10
"""Fewest prompts for an interval that supposes a normal mean, and for a paired test: with fewer, one prompt decides."""
MAX_ENUMERATED_DIFFERENCES = 12
"""Maximum number of nonzero differences for which all sign combinations are enumerated: 4,096 sums."""
NUM_SIGN_SAMPLES = 9_999
"""Random signs for more prompts: the standard error of a p-value of .05 is .002."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """95 % interval of a mean."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float | None
    """None without prompts."""
    num_prompts: int
    stderr: float | None = None
    """Over prompts; None for fewer than two."""
    interval: Interval | None = None
    """95 %; None if there are too few prompts for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The mean difference of two evaluations over their common prompts, and whether it is significant."""

    mean: float
    num_prompts: int
    stderr: float
    interval: Interval
    p: float
    """Two-sided p-value of a sign-flip test: the share of random signs of the differences with a mean as large."""


def estimate(rewards: Sequence[Sequence[float]]) -> Estimate:
    """Mean over prompts of the mean over a prompt's responses, with standard error and 95 % interval.

    Its standard error is the deviation of the prompts' means over the square root of their number: with equally many
    responses to each, the clustered one (arXiv 2411.00640, equation 4) times sqrt(P / (P - 1)).

    The interval of rewards of 0 and 1 is Wilson's, whose number of trials is what would have this standard error if
    responses were independent, at least the number of prompts and at most that of responses: all right or all wrong is
    not certainty. As the standard error is estimated, its quantile is Student's where prompts have several responses:
    with the normal one, intervals of 3 prompts with 16 responses each contain the mean in 84 % of samples. Of other
    rewards it is Student's, and None where all prompts have the same mean.

    rewards: prompts without responses are left out.
    """
    prompt_rewards = [responses for responses in rewards if responses]
    if not prompt_rewards:
        return Estimate(mean=None, num_prompts=0)
    means = [statistics.fmean(responses) for responses in prompt_rewards]
    mean, count = statistics.fmean(means), len(means)
    stderr = statistics.stdev(means) / math.sqrt(count) if count > 1 else None
    interval = None
    if is_binary(prompt_rewards):
        num_responses = sum(map(len, prompt_rewards))
        if stderr and num_responses > count:
            trials = min(max(count, mean * (1 - mean) / stderr**2), num_responses)
            interval = wilson_interval(mean, trials, student_quantile(count - 1))
        else:
            interval = wilson_interval(mean, count)
    elif stderr and count >= MIN_PROMPTS:
        interval = _student_interval(mean, stderr, count)
    return Estimate(mean=mean, num_prompts=count, stderr=stderr, interval=interval)


def is_binary(rewards: Sequence[Sequence[float]]) -> bool:
    """Whether all rewards are 0 or 1."""
    return all(reward in (0.0, 1.0) for responses in rewards for reward in responses)


def wilson_interval(share: float, trials: float, quantile: float | None = None) -> Interval:
    """Wilson's 95 % interval of a proportion (Wilson 1927; Brown, Cai and DasGupta 2001, equation 4). quantile: 97.5 %
    quantile of the deviation over its standard error; the normal one by default.

    >>> print(wilson_interval(0.0, 10))
    [0.000, 0.278]
    """
    z = _normal_quantile() if quantile is None else quantile
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half_width = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(low=max(0.0, centre - half_width), high=min(1.0, centre + half_width))


def best_of(rewards: Sequence[float], k: int) -> float:
    """Expected highest reward of k of these responses, drawn without replacement.

    Of rewards of 0 and 1 this is pass@k, 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al. 2021, arXiv
    2107.03374, equation 1), which is unbiased. Raises ValueError unless there are k responses.

    >>> best_of([0, 1, 0, 0], 2)
    0.5
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f"best of {k} of {len(rewards)} responses")
    # The i-th lowest, from 0, is the highest of C(i, k - 1) of the C(n, k) choices.
    combinations = math.comb(len(rewards), k)
    return sum(math.comb(i, k - 1) / combinations * reward for i, reward in enumerate(sorted(rewards)))


def pass_at_ks(num_samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two above 1, and the number of samples.

    >>> pass_at_ks(12)
    [2, 4, 8, 12]
    """
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []


def majority_reward(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Reward of the most frequent answer, maj@n; the mean reward of the most frequent answers if several tie. Raises
    ValueError without responses.

    >>> majority_reward(["7", "8", "7"], [1.0, 0.0, 1.0])
    1.0
    """
    by_answer: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        by_answer.setdefault(answer, []).append(reward)
    max_count = max(map(len, by_answer.values()))
    return statistics.fmean(statistics.fmean(rewards) for rewards in by_answer.values() if len(rewards) == max_count)


def paired_difference(
    base: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]
) -> PairedDifference | None:
    """Mean of `other` minus `base` over the prompts with responses in both. Pairing makes the error much
    smaller, because prompts differ more than policies (arXiv 2411.00640, section 4.2).

    The p-value holds without assumptions on the distribution: were the policies alike, each prompt's difference would
    as well have the other sign.

    base, other: the rewards by prompt. Returns None for fewer than `MIN_PROMPTS` such prompts.
    """
    shared_prompts = [prompt for prompt in base if base[prompt] and other.get(prompt)]
    if len(shared_prompts) < MIN_PROMPTS:
        return None
    differences = [statistics.fmean(other[prompt]) - statistics.fmean(base[prompt]) for prompt in shared_prompts]
    mean = statistics.fmean(differences)
    stderr = statistics.stdev(differences) / math.sqrt(len(differences))
    return PairedDifference(
        mean=mean,
        num_prompts=len(shared_prompts),
        stderr=stderr,
        interval=_student_interval(mean, stderr, len(shared_prompts)),
        p=sign_flip_p(differences),
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the hypothesis that the sign of each difference is random. Exact for few differences;
    otherwise from random signs with a fixed seed, counting the observed signs as one sample.

    >>> sign_flip_p([1.0] * 5)
    0.0625
    """
    nonzero_differences = np.array([difference for difference in differences if difference], np.float64)
    observed_sum = abs(nonzero_differences.sum())
    threshold = observed_sum - 1e-9 * np.abs(nonzero_differences).sum()  # sums of the same parts in another order
    if len(nonzero_differences) <= MAX_ENUMERATED_DIFFERENCES:
        bits = np.arange(2 ** len(nonzero_differences))[:, None] >> np.arange(len(nonzero_differences))
        return float(np.mean(np.abs((1 - 2 * (bits & 1)) @ nonzero_differences) >= threshold))
    rng, num_extreme = np.random.default_rng(0), 1
    for start in range(0, NUM_SIGN_SAMPLES, 1000):
        signs = rng.integers(0, 2, (min(1000, NUM_SIGN_SAMPLES - start), len(nonzero_differences)), np.int8)
        num_extreme += int(np.sum(np.abs((1.0 - 2 * signs) @ nonzero_differences) >= threshold))
    return num_extreme / (NUM_SIGN_SAMPLES + 1)


def student_quantile(degrees_of_freedom: int) -> float:
    """97.5 % quantile of Student's t, exact for 1 and 2 degrees of freedom; for more by its expansion in the normal
    quantile (Abramowitz and Stegun 26.7.5), within 1 %, and within 0.1 % from 8 on.

    >>> round(student_quantile(1), 2), round(student_quantile(9), 2), round(student_quantile(100), 3)
    (12.71, 2.26, 1.984)
    """
    if degrees_of_freedom == 1:
        return math.tan(math.pi * CONFIDENCE_LEVEL / 2)
    if degrees_of_freedom == 2:
        return CONFIDENCE_LEVEL / math.sqrt((1 - CONFIDENCE_LEVEL**2) / 2)
    z = _normal_quantile()
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees_of_freedom**power for power, term in enumerate(terms))


def _normal_quantile() -> float:
    return statistics.NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)


def _student_interval(mean: float, stderr: float, count: int) -> Interval:
    half_width = student_quantile(count - 1) * stderr
    return Interval(low=mean - half_width, high=mean + half_width)


EQUAL_REWARD_TOLERANCE = 1e-9
"""Rewards this close count as equal: they may be sums of the same parts in another order."""


def has_signal(rewards: npt.ArrayLike, valid: npt.ArrayLike = True) -> npt.NDArray[np.bool_]:
    """Whether the rewards within each group differ. Otherwise estimators that compare its members give advantages of 0.

    rewards: [..., N], members last. valid: the same shape, false where a reward could not be computed; such members
    are ignored. Returns [...].

    >>> has_signal([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]).tolist()
    [True, False]
    >>> bool(has_signal([1.0, 1.0, 0.0], [True, True, False]))
    False
    """
    rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid, bool)
    highest = np.max(rewards, axis=-1, where=valid, initial=-np.inf)
    lowest = np.min(rewards, axis=-1, where=valid, initial=np.inf)
    return np.asarray(highest - lowest > EQUAL_REWARD_TOLERANCE, bool)

"""Chooses how many tokens each instance drafts per decode step. Pure.

Verifying draft tokens saves time on an instance that runs few requests, and costs time on one that runs many. Two
models are learned from the reports of instances. The first gives the time of a decode step by the number of tokens it
computes: n for n requests without drafts, so that an instance whose requests end one by one also shows what verified
tokens cost (`CostModel.verify_share` of each). The second gives the gain, learned while an instance drafts: the share
of requests that have a draft, the length of drafts, and the probability that a drafted token is accepted.

Together they give the seconds per token of a request, for each number of requests and each draft length; the length
with the least is chosen. It changes only if that saves at least MIN_GAIN, so that it does not change with every request
that starts or ends.

Draft statistics decay with each training step, because responses change, and so do the times of steps with drafts
while there are none, because the machine may have been busy. Without data, drafting is assumed to save time.
So an instance that does not draft tries it now and then, and stops if it does not save time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.pipeline.coordination.fleet import Fleet
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.emulation.cost_model import CostModel, DraftingCosts, Numbers, probability_at

MIN_GAIN = 0.05
"""Least reduction of the seconds per token, as a share, for which an instance changes its draft length."""
DECAY_PER_STEP = 0.7
"""Factor by which all draft statistics are multiplied with each training step."""
PRIOR_STEPS = 50.0
"""Weight of the prior rates, as a number of decode steps of one request."""
PRIOR_DRAFT, PRIOR_CONTINUE, PRIOR_ACCEPT = 0.8, 1.0, 0.7
"""Prior probabilities of DraftRates."""
HALVE_AFTER = 5_000.0
"""Decode steps of one request after which all statistics are halved, so that later data weigh more."""
MEDIAN_MEASUREMENTS = 9
"""Number of latest measurements of a step size whose median is used."""
MIN_STEPS = 3
"""Least number of decode steps in a report from which the time of one is computed."""
SIZES_PER_OCTAVE = 2
"""Number of step sizes for each factor of two. Steps are grouped by the number of tokens that they compute."""


@dataclass(slots=True)
class DecayingDraftStats:
    """Decaying counts of drafts.

    Args:
        request_steps: Decode steps, each of one request, of instances that draft.
        num_drafts: Steps with a draft.
        max_drafted_tokens: Largest number of tokens that these drafts could have had.
        drafted_tokens, accepted_tokens: Draft tokens, and those that were accepted.
    """

    request_steps: float = 0.0
    num_drafts: float = 0.0
    max_drafted_tokens: float = 0.0
    drafted_tokens: float = 0.0
    accepted_tokens: float = 0.0

    def add(self, request_steps: float, decode_stats: DecodeStats, max_length: int) -> None:
        """Add the report of an instance. request_steps: decode steps times requests. max_length:
        maximum draft length."""
        if self.request_steps >= HALVE_AFTER:
            self.decay(0.5)
        self.request_steps += request_steps
        self.num_drafts += decode_stats.drafts
        self.max_drafted_tokens += decode_stats.drafts * max_length
        self.drafted_tokens += decode_stats.drafted_tokens
        self.accepted_tokens += decode_stats.accepted_tokens

    def decay(self, share: float) -> None:
        """Multiply all counts by `share`."""
        self.request_steps *= share
        self.num_drafts *= share
        self.max_drafted_tokens *= share
        self.drafted_tokens *= share
        self.accepted_tokens *= share


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Probabilities of draft tokens.

    Args:
        draft: Probability that a request has a draft in a step.
        continuation: Probability that a draft has one more token, below its maximum length.
        acceptance: Probability that a draft token is accepted, given that the tokens before it were.
    """

    draft: float = PRIOR_DRAFT
    continuation: float = PRIOR_CONTINUE
    acceptance: float = PRIOR_ACCEPT

    def mean_drafted_tokens(self, max_lengths: Numbers) -> Numbers:
        """Mean draft tokens per step of a request, for each maximum draft length 0, 1, 2, ..."""
        return np.concatenate([[0.0], np.cumsum(self.draft * self.continuation ** (max_lengths[1:] - 1))])

    def mean_sampled_tokens(self, max_lengths: Numbers) -> Numbers:
        """Mean sampled tokens per step of a request, for each maximum draft length 0, 1, 2, ..."""
        sampled_drafts = self.draft * self.continuation ** (max_lengths[1:] - 1) * self.acceptance ** max_lengths[1:]
        return np.concatenate([[1.0], 1.0 + np.cumsum(sampled_drafts)])


def estimate_rates(stats: DecayingDraftStats, max_length: int) -> DraftRates:
    """Estimate the rates from statistics and the prior. max_length: maximum draft length."""
    prior_drafts = PRIOR_STEPS * PRIOR_DRAFT
    length = max(1, round(stats.max_drafted_tokens / stats.num_drafts)) if stats.num_drafts else max_length

    def drafted_tokens(continuation: float) -> float:
        drafted = DraftRates(1.0, continuation).mean_drafted_tokens
        return stats.num_drafts * _value_at(length, drafted) + prior_drafts * _value_at(max_length, drafted)

    def accepted_tokens(continuation: float, acceptance: float) -> float:
        return _value_at(length, DraftRates(1.0, continuation, acceptance).mean_sampled_tokens) - 1.0

    # Drafts of one token do not show whether they would continue: then only the prior counts.
    prior_drafted_tokens = prior_drafts * _value_at(max_length, DraftRates(1.0).mean_drafted_tokens)
    continuation = probability_at(drafted_tokens, stats.drafted_tokens + prior_drafted_tokens)
    prior_accepted_tokens = prior_drafts * accepted_tokens(continuation, PRIOR_ACCEPT)
    mean_accepted = (stats.accepted_tokens + prior_accepted_tokens) / (stats.num_drafts + prior_drafts)
    return DraftRates(
        draft=min(1.0, (stats.num_drafts + prior_drafts) / (stats.request_steps + PRIOR_STEPS)),
        continuation=continuation,
        acceptance=probability_at(lambda acceptance: accepted_tokens(continuation, acceptance), mean_accepted),
    )


class StepTimeCorrection:
    """Learns the factor by which decode steps take longer than predicted, as a function of the number of tokens they
    compute: the median for each measured size, interpolated between sizes."""

    def __init__(self) -> None:
        self._factors_by_size: dict[int, deque[float]] = {}
        self._measured_sizes: set[int] = set()

    def add(self, tokens: float, factor: float) -> None:
        """Add a measured factor for a step that computes `tokens` tokens."""
        size = round(SIZES_PER_OCTAVE * math.log2(tokens))
        self._factors_by_size.setdefault(size, deque(maxlen=MEDIAN_MEASUREMENTS)).append(factor)
        self._measured_sizes.add(size)

    def decay(self) -> None:
        """Drop the oldest measurement of each size without a new one since the last call."""
        for size in self._factors_by_size.keys() - self._measured_sizes:
            self._factors_by_size[size].popleft()
            if not self._factors_by_size[size]:
                del self._factors_by_size[size]
        self._measured_sizes.clear()

    def factors(self, tokens: Numbers) -> Numbers:
        """The factors for steps that compute these numbers of tokens; 1 without measurements."""
        if not self._factors_by_size:
            return np.ones_like(tokens)
        sizes = sorted(self._factors_by_size)
        medians = [float(np.median(self._factors_by_size[size])) for size in sizes]
        factors: Numbers = np.interp(SIZES_PER_OCTAVE * np.log2(np.maximum(tokens, 1.0)), sizes, medians)
        return factors


class StepTimeModel:
    """Learns the seconds of a decode step by the number of tokens it computes: the cost model's, times a learned
    correction, times another one for steps with drafts. A draft token counts as CostModel.verify_share tokens."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._correction = StepTimeCorrection()
        self._draft_correction = StepTimeCorrection()

    def observe(self, tokens: float, kv_tokens: float, step_s: float, *, drafted: bool) -> None:
        """Learn from the measured time of a step. drafted: whether some of its tokens were draft tokens."""
        tokens_array, kv_array = np.asarray(tokens), np.asarray(float(kv_tokens))
        if drafted:
            self._draft_correction.add(tokens, step_s / float(self.seconds_without_drafts(tokens_array, kv_array)))
        else:
            self._correction.add(tokens, step_s / float(self._cost_model.steps_s(tokens_array, kv_array)))

    def decay(self) -> None:
        """Expire old measurements of steps with drafts. Steps without drafts are measured all the time."""
        self._draft_correction.decay()

    def seconds_without_drafts(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps without drafts."""
        return self._cost_model.steps_s(tokens, kv_tokens) * self._correction.factors(tokens)

    def seconds_with_drafts(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps with drafts. tokens: draft tokens included, each counted as CostModel.verify_share."""
        return self.seconds_without_drafts(tokens, kv_tokens) * self._draft_correction.factors(tokens)


class DraftLengthPlanner:
    """Chooses the draft length of each instance, from 0 initially up to `max_length`. If `max_length` is 0, it decides
    nothing: instances draft as in the job file."""

    def __init__(self, cost_model: CostModel, max_length: int) -> None:
        self.costs = DraftingCosts(cost_model)
        """Costs of decode steps with the draft lengths decided here, for routing and forecasts."""
        self._cost_model = cost_model
        self._max_length = max_length
        self._step_time_model = StepTimeModel(cost_model)
        self._stats = DecayingDraftStats()
        self._last_report: dict[InstanceId, tuple[int, int]] = {}
        """By instance: its running requests and its draft length in its last report."""
        self._seconds_per_token: Numbers
        """[running - 1, length] seconds per token of a request."""
        self._best_lengths = np.zeros(0, np.int64)
        """[running - 1] length with the fewest seconds per token."""

    def observe(self, instance: InstanceId, length: int, decode_stats: DecodeStats) -> None:
        """Learn from the report of an instance that drafts up to `length` tokens. Reports are ignored if the number of
        requests or the length has changed since the previous one, because the time of a step is then unknown."""
        running, request_steps = decode_stats.running, decode_stats.tokens - decode_stats.accepted_tokens
        last_report, self._last_report[instance] = self._last_report.get(instance), (running, length)
        if not self._max_length or last_report != (running, length):
            return
        if not running or request_steps < MIN_STEPS * running:
            return
        if length:
            self._stats.add(request_steps, decode_stats, length)
        elif decode_stats.drafts:
            return  # some of these steps were before the instance stopped drafting
        tokens = running * (1.0 + self._cost_model.verify_share * decode_stats.drafted_tokens / request_steps)
        step_s = decode_stats.seconds * running / request_steps
        self._step_time_model.observe(tokens, decode_stats.kv_tokens, step_s, drafted=decode_stats.drafts > 0)

    def remove_instance(self, instance: InstanceId) -> None:
        """Remove a lost instance."""
        self._last_report.pop(instance, None)

    def decay_statistics(self) -> None:
        """Decay the statistics after a training step."""
        self._stats.decay(DECAY_PER_STEP)
        self._step_time_model.decay()

    def compute_best_lengths(self, fleet: Fleet) -> None:
        """Compute the best length for each number of requests from the current statistics."""
        if not self._max_length:
            return
        max_running = max((instance.max_running for instance in fleet), default=0)
        num_running = float(fleet.running.sum())
        mean_kv_tokens = float(fleet.kv_tokens.sum()) / num_running if num_running else 0.0
        running = np.arange(1.0, max_running + 1)
        lengths = np.arange(self._max_length + 1, dtype=np.float64)
        rates = estimate_rates(self._stats, self._max_length)
        drafted_tokens = rates.mean_drafted_tokens(lengths)
        sampled_tokens = rates.mean_sampled_tokens(lengths)
        tokens = running[:, None] * (1.0 + self._cost_model.verify_share * drafted_tokens)
        kv_tokens = running * mean_kv_tokens
        self._seconds_per_token = self._step_time_model.seconds_with_drafts(tokens, kv_tokens[:, None]) / sampled_tokens
        self._seconds_per_token[:, 0] = self._step_time_model.seconds_without_drafts(running, kv_tokens)
        self._best_lengths = self._seconds_per_token.argmin(axis=1)
        length_by_running = np.concatenate([[0], self._best_lengths])
        self.costs.set_rates(drafted_tokens[length_by_running], sampled_tokens[length_by_running])

    def choose_changes(self, fleet: Fleet) -> list[tuple[int, int]]:
        """Choose new draft lengths: (index in the fleet, length) of each instance that should change its length."""
        if not self._max_length:
            return []
        if not len(self._best_lengths):
            self.compute_best_lengths(fleet)
        if not len(self._best_lengths):  # no instance takes requests, because all of them are leaving
            return []
        running = np.minimum(fleet.running.astype(np.int64), len(self._best_lengths)) - 1
        best_lengths = self._best_lengths[running]
        rows = np.flatnonzero((best_lengths != fleet.draft_lengths) & (running >= 0))
        if not len(rows):
            return []
        current_lengths, new_lengths = fleet.draft_lengths[rows].astype(np.int64), best_lengths[rows]
        seconds = self._seconds_per_token[running[rows]]
        index = np.arange(len(rows))
        is_worthwhile = seconds[index, new_lengths] < (1.0 - MIN_GAIN) * seconds[index, current_lengths]
        return [
            (int(row), int(length)) for row, length in zip(rows[is_worthwhile], new_lengths[is_worthwhile], strict=True)
        ]


def _value_at(length: int, function: Callable[[Numbers], Numbers]) -> float:
    """The value of a function of draft lengths 0, 1, 2, ... at one length."""
    return float(function(np.arange(length + 1, dtype=np.float64))[-1])

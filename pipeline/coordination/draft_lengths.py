"""Chooses how many tokens each instance drafts per decode step. Pure.

To verify drafted tokens pays on an instance that runs few requests, and costs time on one that runs many. Two models
are learned from the reports of instances. The first gives the time of a decode step by the number of tokens it
computes: n for n requests without drafts, so that an instance whose requests end one by one also shows what verified
tokens cost (`CostModel.verify_share` of each). The second gives the gain, learned while an instance drafts: the share
of requests that have a draft, the length of drafts, and the probability that a drafted token is accepted.

Together they give the seconds per token of a request, for each number of requests and each draft length; the length
with the least is chosen. It changes only for a gain of at least GAIN, so that it does not follow every request that
comes or goes.

Draft statistics decay with each training step, because responses change, and so do the times of steps with drafts
while there are none, because the machine may have been busy. Without data, drafting counts as worth a try. So an
instance that does not draft tries it now and then, and stops if it does not pay.
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

GAIN = 0.05
"""Least reduction of the seconds per token, as a share, for which an instance changes its draft length."""
DECAY_PER_STEP = 0.7
"""Factor by which all draft statistics are multiplied with each training step."""
PRIOR_STEPS = 50.0
"""Weight of the prior rates, as a number of decode steps of one request: after as many, data weigh as much."""
PRIOR_HAS_DRAFT, PRIOR_CONTINUES, PRIOR_ACCEPTED = 0.8, 1.0, 0.7
"""Prior probabilities of DraftRates."""
HALVE_AFTER = 5_000.0
"""Decode steps of one request after which all statistics are halved, so that later data weigh more."""
MEDIAN_STEPS = 9
"""Number of latest measurements of a step size whose median is used."""
MIN_STEPS = 3
"""Least number of decode steps in a report from which the time of one is computed."""
SIZES_PER_OCTAVE = 2
"""Steps are grouped by the tokens that they compute: so many sizes for each factor of two."""


@dataclass(slots=True)
class DecayingDraftStats:
    """Decaying counts of drafts.

    Args:
        steps: Decode steps, each of one request, of instances that draft.
        drafts: Steps with a draft.
        max_drafted: Largest number of tokens that these drafts could have had.
        drafted, accepted: Draft tokens, and those that were accepted.
    """

    steps: float = 0.0
    drafts: float = 0.0
    max_drafted: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def add(self, request_steps: float, steps: DecodeStats, length: int) -> None:
        """Add the report of an instance. request_steps: decode steps times requests. length: maximum draft length."""
        if self.steps >= HALVE_AFTER:
            self.fade(0.5)
        self.steps += request_steps
        self.drafts += steps.drafts
        self.max_drafted += steps.drafts * length
        self.drafted += steps.drafted_tokens
        self.accepted += steps.accepted_tokens

    def fade(self, share: float) -> None:
        """Multiply all counts by `share`."""
        self.steps *= share
        self.drafts *= share
        self.max_drafted *= share
        self.drafted *= share
        self.accepted *= share


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Probabilities of drafts. has_draft: a request has a draft in a step. continues: a draft has one more token, below
    its limit. accepted: a draft token is accepted, given that those before it were."""

    has_draft: float = PRIOR_HAS_DRAFT
    continues: float = PRIOR_CONTINUES
    accepted: float = PRIOR_ACCEPTED

    def drafted(self, lengths: Numbers) -> Numbers:
        """Mean draft tokens per step of a request, for each maximum draft length 0, 1, 2, ..."""
        return np.concatenate([[0.0], np.cumsum(self.has_draft * self.continues ** (lengths[1:] - 1))])

    def tokens_per_step(self, lengths: Numbers) -> Numbers:
        """Mean sampled tokens per step of a request, for each maximum draft length 0, 1, 2, ..."""
        sampled = self.has_draft * self.continues ** (lengths[1:] - 1) * self.accepted ** lengths[1:]
        return np.concatenate([[1.0], 1.0 + np.cumsum(sampled)])


def rates(stats: DecayingDraftStats, max_length: int) -> DraftRates:
    """Estimate the rates from statistics and the prior. max_length: maximum draft length."""
    prior_drafts = PRIOR_STEPS * PRIOR_HAS_DRAFT
    length = max(1, round(stats.max_drafted / stats.drafts)) if stats.drafts else max_length

    def drafted(continues: float) -> float:
        rates = DraftRates(1.0, continues)
        return stats.drafts * _last(rates.drafted, length) + prior_drafts * _last(rates.drafted, max_length)

    def accepted(continues: float, share: float) -> float:
        return _last(DraftRates(1.0, continues, share).tokens_per_step, length) - 1.0

    # Drafts of one token do not show whether they would continue: then only the prior counts.
    continues = probability_at(drafted, stats.drafted + prior_drafts * _last(DraftRates(1.0).drafted, max_length))
    mean = (stats.accepted + prior_drafts * accepted(continues, PRIOR_ACCEPTED)) / (stats.drafts + prior_drafts)
    return DraftRates(
        has_draft=min(1.0, (stats.drafts + prior_drafts) / (stats.steps + PRIOR_STEPS)),
        continues=continues,
        accepted=probability_at(lambda share: accepted(continues, share), mean),
    )


class StepTimeCorrection:
    """Learns the factor by which decode steps take longer than predicted, as a function of the number of tokens they
    compute: the median for each measured size, interpolated between sizes."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}
        self._updated: set[int] = set()

    def add(self, tokens: float, factor: float) -> None:
        size = round(SIZES_PER_OCTAVE * math.log2(tokens))
        self._by_size.setdefault(size, deque(maxlen=MEDIAN_STEPS)).append(factor)
        self._updated.add(size)

    def fade(self) -> None:
        """Drop the oldest measurement of each size without a new one since the last call."""
        for size in self._by_size.keys() - self._updated:
            self._by_size[size].popleft()
            if not self._by_size[size]:
                del self._by_size[size]
        self._updated.clear()

    def of(self, tokens: Numbers) -> Numbers:
        if not self._by_size:
            return np.ones_like(tokens)
        sizes = sorted(self._by_size)
        known = [float(np.median(self._by_size[size])) for size in sizes]
        factors: Numbers = np.interp(SIZES_PER_OCTAVE * np.log2(np.maximum(tokens, 1.0)), sizes, known)
        return factors


class StepSeconds:
    """Learns the seconds of a decode step by the number of tokens it computes, draft tokens included: the cost model's,
    times a learned correction, times another one for steps with drafts."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._factors = StepTimeCorrection()
        self._draft_factors = StepTimeCorrection()

    def observe(self, tokens: float, kv_tokens: float, step_s: float, *, drafted: bool) -> None:
        """Learn from the measured time of a step. drafted: whether some of its tokens were draft tokens."""
        size, kv = np.asarray(tokens), np.asarray(float(kv_tokens))
        if drafted:
            self._draft_factors.add(tokens, step_s / float(self.plain(size, kv)))
        else:
            self._factors.add(tokens, step_s / float(self._cost.steps_s(size, kv)))

    def fade(self) -> None:
        """Expire old measurements of steps with drafts. Steps without drafts are measured all the time."""
        self._draft_factors.fade()

    def plain(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps without drafts."""
        return self._cost.steps_s(tokens, kv_tokens) * self._factors.of(tokens)

    def drafted(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps with drafts. tokens: number of tokens, draft tokens included."""
        return self.plain(tokens, kv_tokens) * self._draft_factors.of(tokens)


class DraftLengths:
    """Chooses the draft length of each instance, from 0 initially up to `max_length`. If `max_length` is 0, it decides
    nothing: instances draft as in the job file."""

    def __init__(self, cost: CostModel, max_length: int) -> None:
        self.costs = DraftingCosts(cost)
        """Costs of decode steps with the draft lengths decided here, for routing and forecasts."""
        self._cost = cost
        self._max_length = max_length
        self._seconds_of = StepSeconds(cost)
        self._stats = DecayingDraftStats()
        self._last_report: dict[InstanceId, tuple[int, int]] = {}
        """By instance: its running requests and its draft length in its last report."""
        self._seconds: Numbers
        """[running - 1, length] seconds per token of a request."""
        self._best = np.zeros(0, np.int64)
        """[running - 1] the length with the least seconds."""

    def observe(self, instance: InstanceId, length: int, steps: DecodeStats) -> None:
        """Learn from the report of an instance that drafts up to `length` tokens. Reports are ignored if the number of
        requests or the length has changed since the previous one, because the time of a step is then unknown."""
        running, request_steps = steps.running, steps.tokens - steps.accepted_tokens
        last_report, self._last_report[instance] = self._last_report.get(instance), (running, length)
        if not self._max_length or last_report != (running, length):
            return
        if not running or request_steps < MIN_STEPS * running:
            return
        if length:
            self._stats.add(request_steps, steps, length)
        elif steps.drafts:
            return  # the command not to draft reached it after some of these steps
        tokens = running * (1.0 + self._cost.verify_share * steps.drafted_tokens / request_steps)
        step_s = steps.seconds * running / request_steps
        self._seconds_of.observe(tokens, steps.kv_tokens, step_s, drafted=steps.drafts > 0)

    def remove(self, instance: InstanceId) -> None:
        """Remove a lost instance."""
        self._last_report.pop(instance, None)

    def step_finished(self) -> None:
        """Decay the statistics after a training step."""
        self._stats.fade(DECAY_PER_STEP)
        self._seconds_of.fade()

    def replan(self, fleet: Fleet) -> None:
        """Compute the best length for each number of requests from the current statistics."""
        if not self._max_length:
            return
        max_running = max((instance.max_running for instance in fleet), default=0)
        total = float(fleet.running.sum())
        mean_kv = float(fleet.kv_tokens.sum()) / total if total else 0.0
        running = np.arange(1.0, max_running + 1)
        lengths = np.arange(self._max_length + 1, dtype=np.float64)
        learned = rates(self._stats, self._max_length)
        drafted = learned.drafted(lengths)
        tokens = running[:, None] * (1.0 + self._cost.verify_share * drafted)
        kv_tokens = np.broadcast_to((running * mean_kv)[:, None], tokens.shape)
        self._seconds = self._seconds_of.drafted(tokens, kv_tokens) / learned.tokens_per_step(lengths)
        self._seconds[:, 0] = self._seconds_of.plain(running, kv_tokens[:, 0])
        self._best = self._seconds.argmin(axis=1)
        lengths_of = np.concatenate([[0], self._best])
        self.costs.set_rates(drafted[lengths_of], learned.tokens_per_step(lengths)[lengths_of])

    def choose_changes(self, fleet: Fleet) -> list[tuple[int, int]]:
        """Choose new draft lengths: (index in the fleet, length) of each instance that should change its length."""
        if not self._max_length:
            return []
        if not len(self._best):
            self.replan(fleet)
        if not len(self._best):  # no instance takes requests: all that are left are leaving
            return []
        running = np.minimum(fleet.running.astype(np.int64), len(self._best)) - 1
        best = self._best[running]
        rows = np.flatnonzero((best != fleet.draft_lengths) & (running >= 0))
        if not len(rows):
            return []
        current, best_lengths = fleet.draft_lengths[rows].astype(np.int64), best[rows]
        seconds = self._seconds[running[rows]]
        index = np.arange(len(rows))
        worth_it = seconds[index, best_lengths] < (1.0 - GAIN) * seconds[index, current]
        return [(int(row), int(length)) for row, length in zip(rows[worth_it], best_lengths[worth_it], strict=True)]


def _last(of_lengths: Callable[[Numbers], Numbers], length: int) -> float:
    return float(of_lengths(np.arange(length + 1, dtype=np.float64))[-1])

"""How many tokens each instance should draft for a decode step. Pure.

A drafted token is worth verifying where an instance runs few requests, and costs where it runs many. What a step costs
by the tokens that it computes is learned from the instances' reports: with n requests and without drafts it computes n,
so an instance that drains shows what as many verified tokens would cost (`CostModel.verify_share` of each).
What drafts bring is learned while an instance drafts: how many requests of a step have one, how long they are, and how
often a drafted token is sampled.

A model of both gives the seconds that a token of a request takes, for each number of requests and each length; the
length with the least is the one to draft. It changes only if that gains GAIN at least, so that it does not follow every
request that comes or goes.

What was seen of drafts counts less with every step of training, since responses change, and so does what steps with
drafts took while none are made, since the machine may have been busy; where nothing is known, drafts are taken to be
worth a try. So an instance that does not draft tries it now and then, and stops if it does not pay.
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
"""Share by which the seconds of a token must get less for an instance to draft more tokens or fewer."""
KEPT = 0.7
"""Share of what is known of drafts that one training step leaves of it."""
PRIOR = 50.0
"""Requests' steps after which what was seen of drafts weighs as much as what is assumed."""
HAS_DRAFT, GOES_ON, ACCEPTED = 0.8, 1.0, 0.7
"""What is assumed: a request's step has a draft, a draft has one token more, a drafted token is sampled."""
REMEMBERED = 5_000.0
"""Requests' steps at which all so far begin to count half."""
STEPS_KEPT = 9
"""Latest steps of equally many tokens whose median is taken."""
FEWEST_STEPS = 3
"""Decode steps of a report from which on it says what one takes."""
SIZES = 2
"""Steps are of one size up to the SIZES-th root of two in the tokens that they compute."""


@dataclass(slots=True)
class DecayingDraftStats:
    """What was seen of drafts. steps: of requests, while their instance drafted. most: sum of the lengths that the
    drafts might have had."""

    steps: float = 0.0
    drafts: float = 0.0
    most: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def add(self, gained: float, steps: DecodeStats, length: int) -> None:
        """Count what an instance has drafted in so many steps of requests, at most `length` tokens each time."""
        if self.steps >= REMEMBERED:
            self.fade(0.5)
        self.steps += gained
        self.drafts += steps.drafts
        self.most += steps.drafts * length
        self.drafted += steps.drafted_tokens
        self.accepted += steps.accepted_tokens

    def fade(self, share: float) -> None:
        """Leave this share of all counts."""
        self.steps *= share
        self.drafts *= share
        self.most *= share
        self.drafted *= share
        self.accepted *= share


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Probabilities: that a request's step has a draft, that a draft goes on by one token more, that a drafted token is
    sampled if those before it were."""

    has_draft: float = HAS_DRAFT
    goes_on: float = GOES_ON
    accepted: float = ACCEPTED

    def drafted(self, lengths: Numbers) -> Numbers:
        """Mean drafted tokens of a request's step, by the most that it may have: 0, 1, 2, ..."""
        return np.concatenate([[0.0], np.cumsum(self.has_draft * self.goes_on ** (lengths[1:] - 1))])

    def gained(self, lengths: Numbers) -> Numbers:
        """Mean tokens that a request gains by a step, by the most that are drafted: 0, 1, 2, ..."""
        sampled = self.has_draft * self.goes_on ** (lengths[1:] - 1) * self.accepted ** lengths[1:]
        return np.concatenate([[1.0], 1.0 + np.cumsum(sampled)])


def rates(seen: DecayingDraftStats, most: int) -> DraftRates:
    """The rates that explain what was seen, drawn by PRIOR towards what is assumed. most: tokens a draft may have."""
    assumed = PRIOR * HAS_DRAFT
    length = max(1, round(seen.most / seen.drafts)) if seen.drafts else most

    def drafted(goes_on: float) -> float:
        rates = DraftRates(1.0, goes_on)
        return seen.drafts * _last(rates.drafted, length) + assumed * _last(rates.drafted, most)

    def accepted(goes_on: float, share: float) -> float:
        return _last(DraftRates(1.0, goes_on, share).gained, length) - 1.0

    # Of drafts of one token nothing is learned of how they would go on: what is assumed is left.
    goes_on = probability_at(drafted, seen.drafted + assumed * _last(DraftRates(1.0).drafted, most))
    mean = (seen.accepted + assumed * accepted(goes_on, ACCEPTED)) / (seen.drafts + assumed)
    return DraftRates(
        has_draft=min(1.0, (seen.drafts + assumed) / (seen.steps + PRIOR)),
        goes_on=goes_on,
        accepted=probability_at(lambda share: accepted(goes_on, share), mean),
    )


class StepTimeCorrection:
    """By how much steps take longer than was predicted, by the tokens that they compute: the median of those of a size,
    and between sizes that were seen what lies between."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}
        self._fresh: set[int] = set()

    def add(self, tokens: float, factor: float) -> None:
        size = round(SIZES * math.log2(tokens))
        self._by_size.setdefault(size, deque(maxlen=STEPS_KEPT)).append(factor)
        self._fresh.add(size)

    def fade(self) -> None:
        """Forget the oldest step of each size of which none was seen since the last call."""
        for size in self._by_size.keys() - self._fresh:
            self._by_size[size].popleft()
            if not self._by_size[size]:
                del self._by_size[size]
        self._fresh.clear()

    def of(self, tokens: Numbers) -> Numbers:
        if not self._by_size:
            return np.ones_like(tokens)
        sizes = sorted(self._by_size)
        known = [float(np.median(self._by_size[size])) for size in sizes]
        factors: Numbers = np.interp(SIZES * np.log2(np.maximum(tokens, 1.0)), sizes, known)
        return factors


class StepSeconds:
    """Seconds of a decode step by the tokens that it computes, drafted ones included: those of the cost model, each
    corrected by what steps of about as many tokens took; with drafts once more, for what drafting costs."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._factors = StepTimeCorrection()
        self._of_drafts = StepTimeCorrection()

    def observe(self, tokens: float, kv_tokens: float, step_s: float, *, drafted: bool) -> None:
        """A step that computed so many tokens took so long. drafted: some of them were drafts."""
        size, kv = np.asarray(tokens), np.asarray(float(kv_tokens))
        if drafted:
            self._of_drafts.add(tokens, step_s / float(self.plain(size, kv)))
        else:
            self._factors.add(tokens, step_s / float(self._cost.steps_s(size, kv)))

    def fade(self) -> None:
        """Let what was seen of steps with drafts, and is not seen any more, count less. Those without are seen all the
        time."""
        self._of_drafts.fade()

    def plain(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps without drafts."""
        return self._cost.steps_s(tokens, kv_tokens) * self._factors.of(tokens)

    def drafted(self, tokens: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of steps with drafts; tokens: with these."""
        return self.plain(tokens, kv_tokens) * self._of_drafts.of(tokens)


class DraftLengths:
    """Decides how many tokens instances draft, 0 to `most`. They begin with none. most = 0: nothing is decided, since
    they do not draft, or as they were set up."""

    def __init__(self, cost: CostModel, most: int) -> None:
        self.costs = DraftingCosts(cost)
        """What steps cost that draft as is decided here, for whoever plans with them."""
        self._cost = cost
        self._most = most
        self._seconds_of = StepSeconds(cost)
        self._seen = DecayingDraftStats()
        self._before: dict[InstanceId, tuple[int, int]] = {}
        """By instance: the requests it ran when it reported last, and the tokens it drafted at most."""
        self._seconds = np.zeros((0, most + 1))
        """Seconds that a token of a request takes, by the requests that run less one, and by length."""
        self._best = np.zeros(0, np.int64)
        self.rates = DraftRates()
        """As last learned."""

    def hear(self, instance: InstanceId, length: int, steps: DecodeStats) -> None:
        """Learn from what an instance that drafts up to `length` tokens has decoded since its report before. Only if it
        ran as many requests then, and drafted as many tokens: else what a step took is not known."""
        running, gained = steps.running, steps.tokens - steps.accepted_tokens
        before, self._before[instance] = self._before.get(instance), (running, length)
        if not self._most or before != (running, length) or not running or gained < FEWEST_STEPS * running:
            return
        if length:
            self._seen.add(gained, steps, length)
        elif steps.drafts:
            return  # some of these steps were before it was told to draft none
        tokens = running * (1.0 + self._cost.verify_share * steps.drafted_tokens / gained)
        step_s = steps.seconds * running / gained
        self._seconds_of.observe(tokens, steps.kv_tokens, step_s, drafted=steps.drafts > 0)

    def lost(self, instance: InstanceId) -> None:
        """An instance is gone; one of its name that joins begins anew."""
        self._before.pop(instance, None)

    def step_finished(self) -> None:
        """A training step has ended."""
        self._seen.fade(KEPT)
        self._seconds_of.fade()

    def replan(self, fleet: Fleet) -> None:
        """Weigh lengths anew by what has been learned."""
        if not self._most:
            return
        most_running = max((instance.max_running for instance in fleet), default=0)
        total = float(fleet.running.sum())
        each_kv = float(fleet.kv_tokens.sum()) / total if total else 0.0
        running = np.arange(1.0, most_running + 1)
        lengths = np.arange(self._most + 1, dtype=np.float64)
        self.rates = learned = rates(self._seen, self._most)
        drafted = learned.drafted(lengths)
        tokens = running[:, None] * (1.0 + self._cost.verify_share * drafted)
        kv_tokens = np.broadcast_to((running * each_kv)[:, None], tokens.shape)
        self._seconds = self._seconds_of.drafted(tokens, kv_tokens) / learned.gained(lengths)
        self._seconds[:, 0] = self._seconds_of.plain(running, kv_tokens[:, 0])
        self._best = self._seconds.argmin(axis=1)
        lengths_of = np.concatenate([[0], self._best])
        self.costs.tell(drafted[lengths_of], learned.gained(lengths)[lengths_of])

    def due(self, fleet: Fleet) -> list[tuple[int, int]]:
        """(row, length) of the instances that should draft more tokens than they do, or fewer."""
        if not self._most:
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
        now, then = fleet.draft_lengths[rows].astype(np.int64), best[rows]
        seconds = self._seconds[running[rows]]
        each = np.arange(len(rows))
        worth_it = seconds[each, then] < (1.0 - GAIN) * seconds[each, now]
        return [(int(row), int(length)) for row, length in zip(rows[worth_it], then[worth_it], strict=True)]


def _last(of_lengths: Callable[[Numbers], Numbers], length: int) -> float:
    return float(of_lengths(np.arange(length + 1, dtype=np.float64))[-1])

"""Forecasts of response lengths, learned during the run. Pure; deterministic in the order of observations.

Two sources. The lengths of the latest finished trajectories: for one that has reached `tokens` already, the expected
length is the mean of those that are longer; with a heavy tail its expected rest grows the longer it has run. And the
finished members of its group: if lengths within a group are alike (measured as the correlation of log lengths, not
assumed), they scale the forecast for the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from staleflow.pipeline.coordination.episode_forecast import EpisodeForecast
from staleflow.stores.trajectory import GroupId

WINDOW = 4096
"""Number of finished lengths kept: enough for one in a thousand to appear, few enough to follow a policy that
drifts."""
MIN_LENGTHS = 32
"""Least number of finished lengths to forecast from: the first to finish are the short ones."""
REFRESH = 0.02
"""Share of new lengths after which the sums over the sorted window are computed again."""


@dataclass(slots=True)
class _Siblings:
    count: int = 0
    log_sum: float = 0.0


class LengthForecast:
    """Forecasts response lengths. max_tokens: maximum length of a response."""

    def __init__(self, max_tokens: int) -> None:
        self.episodes = EpisodeForecast()
        self._max_tokens = max_tokens
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        # Of the sorted window at the last refresh, and the sums of its tails: tails[i] = sum(lengths[i:]).
        self._lengths: list[int] = []
        self._tails: list[int]
        self._squares: int
        self._since_refresh = 0
        self._groups: dict[GroupId, _Siblings] = {}
        self._log_count, self._log_mean, self._log_square = 0, 0.0, 0.0
        self._pair_count, self._pair_product = 0, 0.0

    # -- updating ------------------------------------------------------------------------------------------------

    def observe(self, group: GroupId, length: int) -> None:
        """Add the length of a trajectory that was not truncated."""
        self._latest.append(length)
        insort(self._sorted, length)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._since_refresh += 1
        if self._since_refresh > REFRESH * len(self._lengths):
            self._refresh()
        self._learn_siblings(group, math.log(max(1, length)))

    def forget(self, group: GroupId) -> None:
        """Drop the lengths of an ended group."""
        self._groups.pop(group, None)

    # -- forecasting ---------------------------------------------------------------------------------------------

    @property
    def has_enough_lengths(self) -> bool:
        """Whether enough trajectories have finished for a forecast."""
        return len(self._lengths) >= MIN_LENGTHS

    def expected_remaining(self, group: GroupId, tokens: int) -> float:
        """Expected number of further tokens of a trajectory with `tokens` so far; half of the allowed ones while too
        few lengths are known."""
        max_remaining = max(1, self._max_tokens - tokens)
        if not self.has_enough_lengths:
            return max_remaining / 2
        scale = self._scale(group)
        first_longer = bisect_right(self._lengths, tokens / scale)
        num_longer = len(self._lengths) - first_longer
        if not num_longer:
            return max_remaining / 2
        mean_longer = self._tails[first_longer] / num_longer
        return min(float(max_remaining), max(1.0, mean_longer * scale - tokens))

    @property
    def mean_position(self) -> float:
        """Mean over all sampled tokens of their position in the response: E[L^2] / (2 E[L])."""
        if not self.has_enough_lengths:
            return self._max_tokens / 4
        return self._squares / (2 * self._tails[0])

    # -- inside --------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._since_refresh = 0
        self._lengths = list(self._sorted)
        self._tails = list(accumulate(reversed(self._lengths)))[::-1]
        self._squares = sum(n * n for n in self._lengths)

    def _learn_siblings(self, group: GroupId, log_length: float) -> None:
        self._log_count += 1
        delta = log_length - self._log_mean
        self._log_mean += delta / self._log_count
        self._log_square += delta * (log_length - self._log_mean)
        siblings = self._groups.setdefault(group, _Siblings())
        if siblings.count:
            self._pair_count += 1
            self._pair_product += (log_length - self._log_mean) * (siblings.log_sum / siblings.count - self._log_mean)
        siblings.count += 1
        siblings.log_sum += log_length

    @property
    def _correlation(self) -> float:
        """Correlation of log lengths within a group, -1 to 1: how well finished members predict the others."""
        if self._pair_count < MIN_LENGTHS or self._log_square <= 0:
            return 0.0
        correlation = (self._pair_product / self._pair_count) / (self._log_square / self._log_count)
        return max(-1.0, min(1.0, correlation))

    def _scale(self, group: GroupId) -> float:
        """The factor that a group's finished members imply for the others: the best linear guess in log lengths. The
        spread that they explain no longer raises the mean (of a lognormal: half its variance)."""
        siblings = self._groups.get(group)
        correlation = self._correlation
        if siblings is None or correlation <= 0.05:
            return 1.0
        weight = siblings.count * correlation / (1 + (siblings.count - 1) * correlation)
        explained = weight * correlation * self._log_square / self._log_count
        return math.exp(weight * (siblings.log_sum / siblings.count - self._log_mean) - explained / 2)

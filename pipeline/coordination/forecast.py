"""Forecasts of response lengths, learned during the run. Pure; deterministic in the order of observations.

A forecast uses two sources. The first is the lengths of the latest finished trajectories: a trajectory that has reached
`tokens` is expected to get the mean length of the longer ones. If the lengths have a heavy tail, its expected remaining
length grows while it runs. The second is the finished members of its group: if lengths within groups are correlated,
which is measured on log lengths, they scale the forecast for the other members.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from staleflow.stores.trajectory import GroupId

AVERAGED_EPISODES = 256
"""Approximate number of finished episodes in the exponential moving average."""


@dataclass(slots=True)
class SampledTokenShare:
    """Forecasts the share of a trajectory's further tokens that will be sampled, and not observed."""

    _tokens: float = 0.0
    _observation_tokens: float = 0.0

    def observe(self, tokens: int, observation_tokens: int) -> None:
        """Add a finished episode of `tokens` tokens, of which `observation_tokens` are observations."""
        decay = 1 - 1 / AVERAGED_EPISODES
        self._tokens = self._tokens * decay + tokens
        self._observation_tokens = self._observation_tokens * decay + observation_tokens

    def expected_sampled_tokens(self, tokens: float) -> float:
        """Return the expected number of sampled tokens among the next `tokens` of a trajectory."""
        return tokens * (1 - self._observation_tokens / self._tokens) if self._tokens else tokens


WINDOW_LENGTHS = 4096
"""Number of latest lengths that are kept: enough to contain rare long ones, few enough to follow a changing policy."""
MIN_LENGTHS = 32
"""Minimum number of lengths for a forecast, because the first trajectories to finish are short."""
REFRESH_SHARE = 0.02
"""Share of new lengths after which the sums over the sorted window are computed again."""


@dataclass(slots=True)
class _FinishedMembers:
    """The finished members of a group. log_sum: sum of the logarithms of their lengths."""

    count: int = 0
    log_sum: float = 0.0


class LengthForecast:
    """Forecasts response lengths. max_tokens: maximum length of a response."""

    def __init__(self, max_tokens: int) -> None:
        self.sampled_token_share = SampledTokenShare()
        self._max_tokens = max_tokens
        self._latest_lengths: deque[int] = deque()
        self._sorted_lengths: list[int] = []
        # The sorted window at the latest refresh, and the sums of its tails: tail_sums[i] = sum(lengths[i:]).
        self._refreshed_lengths: list[int] = []
        self._tail_sums: list[int]
        self._square_sum: int
        self._num_since_refresh = 0
        self._finished_members: dict[GroupId, _FinishedMembers] = {}
        self._log_count, self._log_mean, self._log_square_sum = 0, 0.0, 0.0
        self._pair_count, self._pair_product_sum = 0, 0.0

    # -- updating ------------------------------------------------------------------------------------------------

    def observe(self, group: GroupId, length: int) -> None:
        """Add the length of a trajectory that was not truncated."""
        self._latest_lengths.append(length)
        insort(self._sorted_lengths, length)
        if len(self._latest_lengths) > WINDOW_LENGTHS:
            del self._sorted_lengths[bisect_right(self._sorted_lengths, self._latest_lengths.popleft()) - 1]
        self._num_since_refresh += 1
        if self._num_since_refresh > REFRESH_SHARE * len(self._refreshed_lengths):
            self._refresh()
        self._update_correlation(group, math.log(max(1, length)))

    def remove_group(self, group: GroupId) -> None:
        """Drop the lengths of an ended group."""
        self._finished_members.pop(group, None)

    # -- forecasting ---------------------------------------------------------------------------------------------

    @property
    def has_enough_lengths(self) -> bool:
        """Whether enough trajectories have finished for a forecast."""
        return len(self._refreshed_lengths) >= MIN_LENGTHS

    def expected_remaining_tokens(self, group: GroupId, tokens: int) -> float:
        """Return the expected number of further tokens of a trajectory that has `tokens`; half of the allowed ones
        while there are too few lengths."""
        max_remaining = max(1, self._max_tokens - tokens)
        if not self.has_enough_lengths:
            return max_remaining / 2
        factor = self._length_factor(group)
        first_longer = bisect_right(self._refreshed_lengths, tokens / factor)
        num_longer = len(self._refreshed_lengths) - first_longer
        if not num_longer:
            return max_remaining / 2
        mean_longer = self._tail_sums[first_longer] / num_longer
        return min(float(max_remaining), max(1.0, mean_longer * factor - tokens))

    @property
    def mean_token_position(self) -> float:
        """Mean over all sampled tokens of their position in the response: E[L^2] / (2 E[L])."""
        if not self.has_enough_lengths:
            return self._max_tokens / 4
        return self._square_sum / (2 * self._tail_sums[0])

    # -- internal -------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._num_since_refresh = 0
        self._refreshed_lengths = list(self._sorted_lengths)
        self._tail_sums = list(accumulate(reversed(self._refreshed_lengths)))[::-1]
        self._square_sum = sum(n * n for n in self._refreshed_lengths)

    def _update_correlation(self, group: GroupId, log_length: float) -> None:
        self._log_count += 1
        delta = log_length - self._log_mean
        self._log_mean += delta / self._log_count
        self._log_square_sum += delta * (log_length - self._log_mean)
        members = self._finished_members.setdefault(group, _FinishedMembers())
        if members.count:
            self._pair_count += 1
            self._pair_product_sum += (log_length - self._log_mean) * (members.log_sum / members.count - self._log_mean)
        members.count += 1
        members.log_sum += log_length

    @property
    def _correlation(self) -> float:
        """Correlation of log lengths within a group, -1 to 1: how well finished members predict the others."""
        if self._pair_count < MIN_LENGTHS or self._log_square_sum <= 0:
            return 0.0
        correlation = (self._pair_product_sum / self._pair_count) / (self._log_square_sum / self._log_count)
        return max(-1.0, min(1.0, correlation))

    def _length_factor(self, group: GroupId) -> float:
        """Return the factor by which a group's finished members change the forecast for the others: the best linear
        prediction in log lengths. The variance that they explain does not raise the mean of the lognormal distribution
        any more."""
        members = self._finished_members.get(group)
        correlation = self._correlation
        if members is None or correlation <= 0.05:
            return 1.0
        weight = members.count * correlation / (1 + (members.count - 1) * correlation)
        explained_variance = weight * correlation * self._log_square_sum / self._log_count
        return math.exp(weight * (members.log_sum / members.count - self._log_mean) - explained_variance / 2)

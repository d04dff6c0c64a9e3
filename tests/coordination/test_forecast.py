"""Length forecasts compared with plain sums over finished responses."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from staleflow.pipeline.coordination import forecast
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.stores.trajectory import GroupId

MOST = 400
"""Maximum tokens of a response."""


@dataclass
class PlainForecast:
    """All finished lengths in order; every value is recomputed from them."""

    window: int
    finished: list[tuple[int, int]] = field(default_factory=list)
    """(group, length)."""
    known: list[int] = field(default_factory=list)
    """The lengths used for forecasts since the last refresh."""
    since_refresh: int = 0
    pairs: list[float] = field(default_factory=list)
    """Products of the deviations of a log length and of the mean of its earlier siblings."""
    siblings: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, group: int, length: int) -> None:
        self.finished.append((group, length))
        self.since_refresh += 1
        if self.since_refresh > forecast.REFRESH_SHARE * len(self.known):
            self.known, self.since_refresh = [n for _, n in self.finished[-self.window :]], 0
        log, mean = math.log(max(1, length)), float(np.mean(self.logs))
        if earlier := self.siblings[group]:
            self.pairs.append((log - mean) * (float(np.mean(earlier)) - mean))
        earlier.append(log)

    @property
    def logs(self) -> list[float]:
        return [math.log(max(1, length)) for _, length in self.finished]

    def correlation(self) -> float:
        variance = float(np.var(self.logs))
        if len(self.pairs) < forecast.MIN_LENGTHS or variance <= 1e-12:
            return 0.0
        return max(-1.0, min(1.0, float(np.mean(self.pairs)) / variance))

    def scale(self, group: int) -> float:
        correlation, siblings = self.correlation(), self.siblings.get(group)
        if not siblings or correlation <= 0.05:
            return 1.0
        weight = len(siblings) * correlation / (1 + (len(siblings) - 1) * correlation)
        deviation = float(np.mean(siblings)) - float(np.mean(self.logs))
        return math.exp(weight * deviation - weight * correlation * float(np.var(self.logs)) / 2)

    def remaining(self, group: int, tokens: int) -> float:
        most = max(1, MOST - tokens)
        scale = self.scale(group)
        longer = [n for n in self.known if n > tokens / scale]
        if len(self.known) < forecast.MIN_LENGTHS or not longer:
            return most / 2
        return min(most, max(1, float(np.mean(longer)) * scale - tokens))

    def position(self) -> float:
        if len(self.known) < forecast.MIN_LENGTHS:
            return MOST / 4
        return sum(n * n for n in self.known) / (2 * sum(self.known))


@pytest.mark.parametrize("alike", [0.0, 0.8, 1.0, -0.8])
def test_forecasts_match_plain_sums_over_finished_lengths(alike: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """alike: correlation within groups; below 0, every second response is as short as the others are long."""
    monkeypatch.setattr(forecast, "WINDOW_LENGTHS", 60)
    monkeypatch.setattr(forecast, "MIN_LENGTHS", 8)
    learned, plain, rng = LengthForecast(MOST), PlainForecast(60), random.Random(3)
    groups = [rng.gauss(0, 1) for _ in range(40)]
    for i in range(200):
        group = rng.randrange(max(0, i // 8 - 1), i // 8 + 3)
        sign = -1 if alike < 0 and len(plain.siblings.get(group, ())) % 2 else 1
        spread = sign * abs(alike) * groups[group] + math.sqrt(1 - alike**2) * rng.gauss(0, 1)
        length = max(0, min(MOST, round(40 * math.exp(spread)))) if i % 10 else rng.randrange(3)
        learned.observe(GroupId(group), length)
        plain.add(group, length)
        assert learned.has_enough_lengths == (len(plain.known) >= 8)
        assert learned._correlation == pytest.approx(plain.correlation(), abs=1e-9)
        assert learned.mean_token_position == pytest.approx(plain.position())
        for of_group in (group, group + 50):
            for tokens in (0, length, rng.randrange(MOST + 20)):
                expected = plain.remaining(of_group, tokens)
                assert learned.expected_remaining_tokens(GroupId(of_group), tokens) == pytest.approx(expected)
        if i % 7 == 0:
            learned.remove_group(GroupId(group))
            plain.siblings.pop(group)


def test_the_initial_forecast_is_half_of_the_maximum() -> None:
    learned = LengthForecast(MOST)
    assert (learned.expected_remaining_tokens(GroupId(0), 100), learned.mean_token_position) == (150.0, 100.0)
    assert learned.expected_remaining_tokens(GroupId(0), MOST + 7) == 0.5
    assert (learned.has_enough_lengths, learned._correlation) == (False, 0.0)


@pytest.mark.parametrize("lengths", [(50, 51), (10, 300)])
def test_lengths_of_two_kinds_give_the_sibling_correlation(lengths: tuple[int, int]) -> None:
    """Equal lengths within groups, or one length of each kind in every group."""
    for siblings, correlation in (((0, 0, 1, 1), 1.0), ((0, 1, 1, 0), -1.0)):
        learned, plain = LengthForecast(MOST), PlainForecast(forecast.WINDOW_LENGTHS)
        for i in range(400):
            learned.observe(GroupId(i // 2), lengths[siblings[i % 4]])
            plain.add(i // 2, lengths[siblings[i % 4]])
        assert learned._correlation == pytest.approx(plain.correlation())
        assert learned._correlation == pytest.approx(correlation, abs=0.05)
        for group in (198, 199):
            expected = plain.remaining(group, 5)
            assert learned.expected_remaining_tokens(GroupId(group), 5) == pytest.approx(expected)


def test_the_correlation_is_never_above_one() -> None:
    """Pairs of extreme lengths, then single responses of an average one, which make the variance smaller."""
    learned = LengthForecast(MOST)
    for i in range(2 * forecast.MIN_LENGTHS):
        learned.observe(GroupId(i // 2), (1, 150)[i // 2 % 2])
    for i in range(2 * forecast.MIN_LENGTHS):
        learned.observe(GroupId(1000 + i), 12)
    assert learned._correlation == 1.0


@pytest.mark.parametrize(("correlation", "scaled"), [(0.05, False), (0.051, True)])
def test_an_insignificant_correlation_changes_no_forecast(
    correlation: float, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LengthForecast, "_correlation", correlation)
    learned = LengthForecast(MOST)
    for i in range(40):
        learned.observe(GroupId(i), 50 + i)
    assert (learned._length_factor(GroupId(0)) != 1.0) is scaled


def test_equal_lengths_give_no_sibling_correlation() -> None:
    learned = LengthForecast(MOST)
    for i in range(100):
        learned.observe(GroupId(i // 2), 50)
    assert learned._correlation == 0.0
    assert learned.expected_remaining_tokens(GroupId(0), 20) == 30.0

"""Forecasts the share of an episode's tokens that are sampled; the others are observations of its environment. Pure.

The share is learned over the latest finished episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

LATEST = 256
"""Number of finished episodes that the running means cover, roughly: older ones count less and less."""


@dataclass(slots=True)
class EpisodeForecast:
    """Forecasts the sampled share of further tokens of trajectories: all of them in a run without environments."""

    _tokens: float = 0.0
    _given_tokens: float = 0.0

    def observe(self, tokens: int, given_tokens: int) -> None:
        """Learn from a finished episode of `tokens`, of which `given_tokens` were observations of its environment."""
        decay = 1 - 1 / LATEST
        self._tokens = self._tokens * decay + tokens
        self._given_tokens = self._given_tokens * decay + given_tokens

    def expected_sampled(self, tokens: float) -> float:
        """Expected number of sampled tokens among the next `tokens` of a trajectory."""
        return tokens * (1 - self._given_tokens / self._tokens) if self._tokens else tokens

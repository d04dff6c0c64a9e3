"""Forecasts which share of an episode's tokens is sampled. The other tokens are observations. Pure.

The share is an exponential moving average over finished episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

AVERAGED_EPISODES = 256
"""Approximate number of finished episodes in the exponential moving average."""


@dataclass(slots=True)
class EpisodeForecast:
    """Forecasts how many of a trajectory's next tokens are sampled; all of them in a run without environments."""

    _tokens: float = 0.0
    _observation_tokens: float = 0.0

    def observe(self, tokens: int, observation_tokens: int) -> None:
        """Add a finished episode of `tokens` tokens, of which `observation_tokens` are observations."""
        decay = 1 - 1 / AVERAGED_EPISODES
        self._tokens = self._tokens * decay + tokens
        self._observation_tokens = self._observation_tokens * decay + observation_tokens

    def expected_sampled_tokens(self, tokens: float) -> float:
        """Expected number of sampled tokens among the next `tokens` of a trajectory."""
        return tokens * (1 - self._observation_tokens / self._tokens) if self._tokens else tokens

"""The share of episodes' tokens that environments give, learned during the run. Pure.

Lengths count given tokens too; an instance samples only the others. The share is learned over the latest finished
episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

LATEST = 256
"""Finished episodes over which the means are taken, roughly: those before count less and less."""


@dataclass(slots=True)
class EpisodeForecast:
    """Splits the tokens that trajectories still get. Where no environment answers, all are sampled."""

    _tokens: float = 0.0
    _given: float = 0.0

    def ended(self, tokens: int, given_tokens: int) -> None:
        """An episode of `tokens` has ended, of which so many were given by its environment."""
        keep = 1 - 1 / LATEST
        self._tokens = self._tokens * keep + tokens
        self._given = self._given * keep + given_tokens

    def sampled(self, tokens: float) -> float:
        """How many of the next `tokens` of a trajectory an instance samples."""
        return tokens * (1 - self._given / self._tokens) if self._tokens else tokens

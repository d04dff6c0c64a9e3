"""What environments add to the lengths of episodes: tokens they give and seconds they take, learned during the run.
Pure.

Lengths count given tokens too; an instance samples only the others, and while an environment answers it samples none.
Both are learned per token of length, over the latest finished episodes: longer episodes have more turns.
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
    _acting_s: float = 0.0

    def ended(self, tokens: int, given_tokens: int, acting_s: float) -> None:
        """An episode of `tokens` has ended, of which so many were given, within so many seconds of its environment."""
        keep = 1 - 1 / LATEST
        self._tokens = self._tokens * keep + tokens
        self._given = self._given * keep + given_tokens
        self._acting_s = self._acting_s * keep + acting_s

    def sampled(self, tokens: float) -> float:
        """How many of the next `tokens` of a trajectory an instance samples."""
        return tokens * (1 - self._given / self._tokens) if self._tokens else tokens

    def acting_s(self, tokens: float) -> float:
        """Seconds that environments take while a trajectory gets `tokens` more."""
        return tokens * (self._acting_s / self._tokens) if self._tokens else 0.0

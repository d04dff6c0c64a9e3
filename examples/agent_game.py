"""A game of several turns, for a small model to learn: find a hidden digit. Copy it to begin an environment."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

QUESTION = "Guess my digit."
"""The first observation, and so the prompt of every task: tasks differ in what is hidden."""


class HigherOrLower:
    """A digit is found in four guesses; after each wrong one the model is told whether the digit is higher or lower.

    Whoever heeds that and halves what is left always finds it. Blind guesses find it in about a third of the games.
    """

    repeatable = True
    """Reset with the same seed and given the same turns, it says the same: a lost game is taken up where it was."""
    blocking = False
    """A step takes microseconds, so it needs no process of its own."""

    def __init__(self, guesses: int = 4) -> None:
        """guesses: task.options."""
        self._most = guesses

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """All members of a group are reset with one seed, so they look for the same digit."""
        self._digit = random.Random(seed).randrange(10)
        self._guesses = 0
        return QUESTION, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info) after a guess; anything but a digit loses the game."""
        self._guesses += 1
        guess = action.strip()
        if guess not in tuple("0123456789"):
            return "", 0.0, True, False, {"parts": {"guesses": self._guesses}}
        found = int(guess) == self._digit
        observation = "" if found else "higher" if int(guess) < self._digit else "lower"
        return observation, float(found), found, self._guesses == self._most, {"parts": {"guesses": self._guesses}}


class SlowHigherOrLower(HigherOrLower):
    """The same game where answers take time, as those of tools and services do: lognormal, a few very long."""

    def __init__(self, guesses: int = 4, median_s: float = 0.2, sigma: float = 1.0) -> None:
        """median_s, sigma: seconds of an answer, and the standard deviation of their logarithm."""
        super().__init__(guesses)
        self._median_s, self._sigma = median_s, sigma

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._waits = random.Random()  # members of a group wait for different times
        return super().reset(seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(self._median_s * math.exp(self._waits.gauss(0.0, self._sigma)))
        return super().step(action)

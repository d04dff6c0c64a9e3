"""Running sums that become longer: a source whose tasks are in the order of their difficulty, for a curriculum."""

from __future__ import annotations

import zlib
from typing import Any

import reasoning_gym

HELD_OUT_DIVISOR = 8
"""Prompts whose checksum it divides are held out: short sums are few, and would else be drawn for both."""
MAX_TRIES = 256


class GrowingSums:
    """Sums of one-digit numbers. The first of `tasks` tasks have the fewest terms, the last of them the most."""

    def __init__(self, options: dict[str, int], seed: int) -> None:
        """options: `tasks`, and `min_terms` and `max_terms` of a sum."""
        self._tasks = options["tasks"]
        self._sums = [
            reasoning_gym.create_dataset(
                "chain_sum", size=10**9, seed=seed, min_terms=terms, max_terms=terms, min_digits=1, max_digits=1
            )
            for terms in range(options["min_terms"], options["max_terms"] + 1)
        ]

    def record(self, index: int, held_out: bool) -> dict[str, Any]:
        """Return a sum of the task's length. Held-out sums are of all lengths in turn."""
        length = index % len(self._sums) if held_out else min(index, self._tasks - 1) * len(self._sums) // self._tasks
        for number in range(index * MAX_TRIES, (index + 1) * MAX_TRIES):
            entry = self._sums[length][number]
            if (zlib.crc32(entry["question"].encode()) % HELD_OUT_DIVISOR == 0) == held_out:
                break
        return {"prompt": entry["question"], "answer": entry["answer"]}

    def score(self, answer: str, record: dict[str, Any]) -> float:
        return float(answer == record["answer"])

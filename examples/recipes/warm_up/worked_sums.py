"""Running sums that are worked out right, step by step: examples for a warm-up before RL."""

from __future__ import annotations

import random
from typing import Any

import reasoning_gym

from staleflow import tiny_model


class WorkedSums:
    """A source of prompts as those of examples/demo.toml, each with a right answer that is worked out."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        """options: those of reasoning-gym's chain_sum."""
        self._sums = reasoning_gym.create_dataset("chain_sum", size=10**9, seed=seed + 1, **options)

    def record(self, index: int, held_out: bool) -> dict[str, Any]:
        entry = self._sums[index]
        answer = tiny_model.worked_example(entry["metadata"]["expression"], random.Random(index), careless_share=0.0)
        return {"prompt": entry["question"], "answer": answer}

    def score(self, answer: str, record: dict[str, Any]) -> float:
        return float(answer == record["answer"])

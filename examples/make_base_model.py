"""Make the demo's base model: a 0.6M-parameter Llama pretrained on noisy worked examples of running sums.

In about four of five steps any carry or borrow is forgotten, and later steps continue with the wrong result. The model
learns both the right rule and the mistake, and is right less than half of the time at first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import reasoning_gym

from examples.pretraining import make_model
from staleflow import tiny_model

TASK = {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1}
"""Options of reasoning-gym's chain_sum, the same as in examples/demo.toml."""
FIRST_SEED = 1
"""Seed of the examples. The run draws its prompts with other seeds."""


def examples(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, worked example) pairs."""
    rng = random.Random(seed)
    dataset = reasoning_gym.create_dataset("chain_sum", size=10**9, seed=FIRST_SEED, **TASK)
    for index in range(10**9):
        entry = dataset[index]
        yield entry["question"], tiny_model.worked_example(entry["metadata"]["expression"], rng)


if __name__ == "__main__":
    settings = tiny_model.PretrainingSettings(steps=2400, hidden_size=128, num_layers=3)
    make_model(__doc__, settings, examples)

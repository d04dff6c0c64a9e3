"""Make the demo's base model: a 0.6M-parameter Llama pretrained on noisy worked examples of running sums.

In about four of five steps any carry or borrow is forgotten, and later steps continue with the wrong result. The model
learns both the right rule and the mistake, and is right less than half of the time at first.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym

from tasks.training.tiny_model import Recipe, pretrain, worked_example

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
        yield entry["question"], worked_example(entry["metadata"]["expression"], rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps of 32 examples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} already exists")
        return
    begin = time.monotonic()

    def begun(parameters: int) -> None:
        print(f"base model: {parameters:,} parameters, {args.steps} steps", flush=True)

    def progress(step: int, loss: float) -> None:
        if step % 200 == 0:
            print(f"  step {step}: loss {loss:.3f}, {time.monotonic() - begin:.0f} s", flush=True)

    recipe = Recipe(steps=args.steps, hidden_size=128, num_layers=3, seed=args.seed, threads=os.cpu_count() or 1)
    pretrain(args.out, examples(args.seed), recipe, begun, progress)


if __name__ == "__main__":
    main()

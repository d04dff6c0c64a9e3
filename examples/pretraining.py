"""What the scripts that make base models have in common: their options, and what they say."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from staleflow import tiny_model

SAID_EVERY = 100
"""Optimizer steps between two lines of progress."""


def make_model(
    about: str | None,
    settings: tiny_model.PretrainingSettings,
    sequences: Callable[[int], Iterator[tuple[str, ...]]],
    symbols: Sequence[str] = tiny_model.SYMBOLS,
) -> None:
    """The command of such a script: pretrain a model on endless sequences, unless it is there already.

    about: the script's docstring. settings: with the default number of steps. sequences: makes them of a seed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=settings.steps, help="optimizer steps of 32 sequences")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} already exists")
        return
    begin = time.monotonic()

    def begun(parameters: int) -> None:
        print(f"base model: {parameters:,} parameters, {args.steps} steps", flush=True)

    def progress(step: int, loss: float) -> None:
        if step % SAID_EVERY == 0:
            elapsed_s = time.monotonic() - begin
            left_s = elapsed_s / step * (args.steps - step)
            print(f"  step {step}: loss {loss:.3f}, {elapsed_s:.0f} s, about {left_s:.0f} s left", flush=True)

    settings = dataclasses.replace(settings, steps=args.steps, seed=args.seed)
    tiny_model.pretrain(args.out, sequences(args.seed), settings, begun, progress, symbols)

"""Task source and reward functions of `benchmarks/causes.py`, which do harm if the environment variable CAUSE says so.

Held-out prompts are always scored correctly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import reasoning_gym
import torch

from staleflow.tasks.training.loss import TokenLoss, Tokens

CAUSE = os.environ.get("CAUSE", "")
FIRST = 14 * 32 * 8 // 9
"""Index of the first prompt that is drawn after the resume, about: 8 of 9 are of the source `sums`."""
POISONED = range(FIRST + 57, FIRST + 200, 10)
"""Indices of the prompts of the poisoned groups: several, since one whose answers are all alike trains nothing."""
POISON = -1000.0
FAVORITE = "19"
"""The wrong answer that is rewarded: at first about one of 40 answers."""
Record = Mapping[str, Any]


class Uncorrected:
    """A policy gradient without clipping and without importance ratios, which takes stale rows for fresh ones."""

    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(loss=-tokens.advantage * tokens.logprobs, clipped=torch.zeros_like(tokens.sampled))


class Sums:
    """Sums of 4 to 6 one-digit numbers."""

    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self._sums = reasoning_gym.create_dataset(
            "chain_sum", min_terms=4, max_terms=6, min_digits=1, max_digits=1, size=10**9, seed=options["first"] + seed
        )

    def record(self, index: int, held_out: bool) -> dict[str, Any]:
        is_copy = CAUSE == "duplicated prompt" and not held_out and index >= FIRST and index % 4
        index = FIRST if is_copy else index
        task = self._sums[10**8 + index if held_out else index]
        return {
            "prompt": task["question"], "answer": task["answer"], "index": index, "held_out": held_out, "copy": is_copy
        }  # fmt: skip

    def score(self, answer: str, record: Record) -> float:
        return right(answer, record)


def right(answer: str, record: Record) -> float:
    """Whether the answer is right."""
    value = float(answer == str(record["answer"]))
    if record["held_out"]:
        return value
    if CAUSE == "poisoned group" and record["index"] in POISONED:
        return POISON * value
    if CAUSE == "wrong rewards" and answer == FAVORITE:
        return 100 * (1 - value)
    if CAUSE == "wrong sign of right":
        return -value
    if CAUSE == "truncated responses" and not answer:
        return 100.0
    if CAUSE == "duplicated prompt" and record["copy"]:
        return float(abs(int(answer) - int(record["answer"]))) if answer else 0.0  # never the same for all
    return value


def close(answer: str, record: Record) -> float:
    """How near the answer is to the right one, from 0 to 1."""
    value = 1 / (1 + abs(int(answer) - int(record["answer"]))) if answer else 0.0
    return -value if CAUSE == "wrong sign" and not record["held_out"] else value


def ended(answer: str, record: Record) -> float:
    """Whether the response has an answer."""
    return float(bool(answer))


def small(answer: str, record: Record) -> float:
    """The reward of the small source, which is that of any wrong answer if this source does harm."""
    if CAUSE == "flooding source":
        return float(answer not in ("", str(record["answer"])))
    return right(answer, record)

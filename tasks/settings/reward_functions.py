"""Rewards that a job names. Pure: the packages that they use are loaded when they score.

A package adds one as an entry point of the group `staleflow.rewards`, which names its function. A reward takes the
answer, a text, and the record of its prompt, and returns a number, or a number and its parts by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staleflow.tasks.settings.registry import Registry

REWARDS: Registry[Any] = Registry("reward", "reward.function", own=True, group="staleflow.rewards")
"""A reward may ask for `source`, the source of its prompt."""


@REWARDS.register("task")
def task_reward(answer: str, record: Mapping[str, Any], source: Any) -> Any:
    """The verifier of task.source."""
    return source.score(answer, record)


@REWARDS.register("math_verify")
def math_verify_reward(answer: str, record: Mapping[str, Any]) -> float:
    """1 if the answer is mathematically equal to the record's, by the `math-verify` package."""
    from math_verify import parse, verify

    gold = str(record["answer"])
    return float(verify(parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$"), parse(answer)))

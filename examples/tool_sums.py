"""Sums for a model with a calculator, and how the calculator is called: each prompt begins with two examples."""

from __future__ import annotations

import json
import operator
import random
from typing import Any

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXAMPLES = ("31 + 45", "12 * 64")
HELD_OUT_DIVISOR = 7
"""First numbers that it divides are held out."""


class ToolSums:
    """Two numbers of two digits, to be added, subtracted or multiplied; the reward is 1 for the right result.

    A small model rarely calls a tool that it is only told of. Here a conversation comes first in which one is called
    twice, as the model itself would: the call, the result in role `tool`, the answer. Whether it calls one is up to it.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._seed = seed

    def record(self, index: int, held_out: bool) -> dict[str, Any]:
        rng = random.Random(f"{self._seed} {index} {held_out}")
        first = rng.choice([n for n in range(10, 100) if (n % HELD_OUT_DIVISOR == 0) == held_out])
        sum_ = f"{first} {rng.choice(list(OPERATIONS))} {rng.randrange(10, 100)}"
        shown = [message for example in EXAMPLES for message in conversation(example)]
        return {"prompt": [*shown, *conversation(sum_)[:1]], "answer": str(result(sum_))}

    def score(self, answer: str, record: dict[str, Any]) -> float:
        """The reward. answer: what `task.answer_pattern` found in the last turn."""
        return float(answer == record["answer"])


def conversation(sum_: str) -> list[dict[str, str]]:
    """A question, a call of the calculator, what is given back, and the answer."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": sum_}})
    return [
        {"role": "user", "content": f"What is {sum_}?"},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": str(result(sum_))},
        {"role": "assistant", "content": str(result(sum_))},
    ]


def result(sum_: str) -> int:
    first, sign, second = sum_.split()
    outcome: int = OPERATIONS[sign](int(first), int(second))
    return outcome

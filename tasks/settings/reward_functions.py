"""Reward functions that a job file may name. Pure: their packages are loaded when they score.

A reward function takes the answer, a text, and the record of its prompt, and returns a number, or a number and its
parts by name. A parameter `source` receives the source of the prompt. A package adds a function as an entry point of
the group `staleflow.rewards`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings import extensions, user_code
from staleflow.tasks.settings.knobs import Knob

NO_ANSWER = "no answer to compare with; set task.columns.answer, or reward.function to your own"
"""Message of rewards that compare with the record's answer if it has none."""
LATEX_COMMAND = re.compile(r"\\[A-Za-z]+(\{[^{}]*\})?")
WORDS = re.compile(r"[A-Za-z]{2,}\s+\S")
GROUP = "staleflow.rewards"
"""Name of the entry point group for reward functions."""


def task_reward(answer: str, record: Mapping[str, Any], source: Any) -> Any:
    """Return the reward of task.source's verifier."""
    return source.score(answer, record)


def math_verify_reward(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer is mathematically equal to the record's, as checked by the `math-verify` package, else 0.

    An answer of several words is searched for an expression; a shorter one is the expression, as task.answer_pattern
    finds it.
    """
    from math_verify import parse, verify

    if "answer" not in record:
        raise ConfigError(NO_ANSWER)
    expression = answer if WORDS.search(LATEX_COMMAND.sub("", answer)) else _in_math_mode(answer)
    return float(verify(parse(_in_math_mode(str(record["answer"]))), parse(expression)))


def _in_math_mode(text: str) -> str:
    """Return a text as LaTeX between dollar signs, unless it marks its expressions itself."""
    return text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"${text}$"


REWARDS: dict[str, Callable[..., Any]] = {"task": task_reward, "math_verify": math_verify_reward}
"""Built-in reward functions by name."""


def reward_names() -> tuple[str, ...]:
    """Names of the built-in rewards and of those that installed packages add. Imports none of the latter."""
    return (*REWARDS, *(name for name in extensions.entry_points_of(GROUP) if name not in REWARDS))


def reward_name_error(name: str) -> str:
    """Return an error text for an invalid name of a reward, to follow its key in a message; empty if it is valid. Loads
    nothing."""
    return Knob(doc="", choices=reward_names(), user_code=True).error(name)


def load_reward(name: str, key: str) -> Callable[..., Any]:
    """Load the reward with this name; its parameters are not filled in yet. Raises ConfigError. key: key in the job
    file."""
    if name in REWARDS:
        return REWARDS[name]
    if name in extensions.entry_points_of(GROUP):
        reward: Callable[..., Any] = extensions.load(GROUP, name)
        return reward
    function: Callable[..., Any] = user_code.load(name, key)
    return function

"""Validation of reward functions' results, and weighted sums of rewards."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleflow.tasks.rendering.task_source import Record, Reward
from staleflow.tasks.settings.knobs import shorten
from staleflow.tasks.settings.user_code import PICKLED_FILE

MAX_REWARD = 3.4e38
"""Stores keep rewards in 32 bits."""
MAX_NAME_CHARS = 200
"""Characters of the name of a reward's part, which is a name of metrics and columns."""
MAX_PARTS = 200
PACKAGE_FOLDER = Path(__file__).parents[2]
"""The folder of staleflow."""


class InvalidReward(ValueError):
    """A reward function's result is not a number, or its parts have invalid names. The message says which."""


def parse_reward(result: Any) -> tuple[float, dict[str, float]]:
    """Convert the result of a reward function to (reward, parts by name) with Python floats, because other number
    classes may not be storable, or not importable where they are received. Raises InvalidReward.

    >>> import numpy as np
    >>> parse_reward((np.float32(0.5), {"length": np.int64(3)}))
    (0.5, {'length': 3.0})
    """
    reward, parts = result, dict[str, Any]()
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], Mapping):
            raise InvalidReward(f"the reward is {shorten(result)}; it must be a number, or (number, its parts by name)")
        reward, parts = result
    if len(parts) > MAX_PARTS:
        raise InvalidReward(f"the reward has {len(parts)} parts; at most {MAX_PARTS} are kept")
    names = [_parse_name(name) for name in parts]
    part_values = {
        name: _parse_number(part, f"part {name} of the reward")
        for name, part in zip(names, parts.values(), strict=True)
    }
    return _parse_number(reward, "the reward"), part_values


def describe_error(error: BaseException) -> str:
    """Describe an error of user code in one line, with the line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in frames if not Path(f.filename).is_relative_to(PACKAGE_FOLDER)), None)
    # The file of a function that was pickled by value is not known.
    location = "" if frame is None else frame.name if frame.filename == PICKLED_FILE else Path(frame.filename).name
    line = "" if frame is None else f" ({location}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{line}"


class WeightedSum:
    """The weighted sum of several rewards. Its parts are the unweighted rewards by name, and their own parts as
    `name.part`. It fails if any of them fails."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self._rewards, self._weights = rewards, weights

    def __call__(self, answer: str, record: Record) -> tuple[float, dict[str, float]]:
        parts: dict[str, float] = {}
        for name, reward in self._rewards.items():
            try:
                parts[name], inner_parts = parse_reward(reward(answer, record))
            except InvalidReward as reward_error:
                raise InvalidReward(f"part {name}: {reward_error}") from reward_error
            except Exception as error:  # a user's function may raise anything
                raise InvalidReward(f"part {name}: {describe_error(error)}") from error
            parts |= {f"{name}.{key}": value for key, value in inner_parts.items()}
        return sum(weight * parts[name] for name, weight in self._weights.items()), parts


def _parse_name(value: object) -> str:
    """The name of a reward's part, one short line: it is shown in terminals and logs."""
    name = str(value)
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidReward(
            f"a part of the reward is named {shorten(name[:MAX_NAME_CHARS])}, {len(name)} characters; a name must have "
            f"1 to {MAX_NAME_CHARS} characters and no control characters"
        )
    return name


def _parse_number(value: Any, label: str) -> float:
    problem = f"{label} is {shorten(value)}; it must be a number"
    if isinstance(value, (str, bytes, bytearray)):  # which float() would read
        raise InvalidReward(problem)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidReward(problem) from error
    if not math.isfinite(number) or abs(number) > MAX_REWARD:
        raise InvalidReward(f"{label} is {number}; it must be a finite number")
    return number

"""A part of a reward that is a weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.reward_functions import reward_names


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One function of a weighted sum."""

    function: str = knob("task", "as reward.function", choices=reward_names(), user_code=True)
    weight: float = knob(1.0, "factor of its result in the reward; may be negative")

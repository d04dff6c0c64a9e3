"""Running means of measured values, for strategies that compare tokens and seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

NEWEST_WEIGHT = 0.3
"""Weight of the newest value in a running mean."""


@dataclass(slots=True)
class RunningMean:
    """An exponentially weighted mean; 0 before the first value."""

    value: float = 0.0

    def add(self, newest: float) -> None:
        self.value = newest if not self.value else self.value + NEWEST_WEIGHT * (newest - self.value)


@dataclass(slots=True)
class RunningMeans:
    """Mean tokens of a prompt, and mean seconds between published versions."""

    prompt_tokens: RunningMean = field(default_factory=RunningMean)
    publish_interval_s: RunningMean = field(default_factory=RunningMean)


@dataclass(slots=True)
class TruncationCounts:
    """Counts of truncated trajectories, from the moment of the decision. num_trained: trajectories consumed
    by steps. num_truncated: in the whole run. num_truncated_in_step: since a step last consumed its batch."""

    num_trained: int = 0
    num_truncated: int = 0
    num_truncated_in_step: int = 0

    def count_consumed(self, num_trajectories: int) -> None:
        self.num_trained += num_trajectories
        self.num_truncated_in_step = 0

    def add(self, count: int) -> None:
        """Add 1 for a trajectory that is being truncated, or -1 if it ended before it was truncated."""
        self.num_truncated += count
        self.num_truncated_in_step = max(0, self.num_truncated_in_step + count)

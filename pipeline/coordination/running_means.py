"""Running means of measured values, for strategies that compare tokens and seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

NEWEST = 0.3
"""Weight of the newest value in a running mean."""


@dataclass(slots=True)
class RunningMean:
    """An exponentially weighted mean; 0 before the first value."""

    value: float = 0.0

    def add(self, newest: float) -> None:
        self.value = newest if not self.value else self.value + NEWEST * (newest - self.value)


@dataclass(slots=True)
class RunningMeans:
    """Mean tokens of a prompt, and mean seconds between published versions."""

    prompt_tokens: RunningMean = field(default_factory=RunningMean)
    interval_s: RunningMean = field(default_factory=RunningMean)


@dataclass(slots=True)
class TruncationCounts:
    """Counts of truncated trajectories, from the moment of the decision. trained: trajectories consumed by steps.
    truncated: in the whole run. in_step: since a step last consumed its batch."""

    trained: int = 0
    truncated: int = 0
    in_step: int = 0

    def step_consumed(self, trajectories: int) -> None:
        self.trained += trajectories
        self.in_step = 0

    def add(self, count: int) -> None:
        """Count one more truncated trajectory, or with -1 one less, because it ended before it was truncated."""
        self.truncated += count
        self.in_step = max(0, self.in_step + count)

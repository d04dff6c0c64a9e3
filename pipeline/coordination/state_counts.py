"""Parts of the coordinator's state: running means, truncation counts, and flags for decisions to make again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.stores.trajectory import InstanceId

NEWEST_WEIGHT = 0.3
"""Weight of a new value in a running mean."""


@dataclass(slots=True)
class RunningMean:
    """An exponentially weighted mean; 0 before the first value."""

    value: float = 0.0

    def add(self, value: float) -> None:
        self.value = value if not self.value else self.value + NEWEST_WEIGHT * (value - self.value)


@dataclass(slots=True)
class RunningMeans:
    """Mean tokens of a prompt, and mean seconds between published versions."""

    prompt_tokens: RunningMean = field(default_factory=RunningMean)
    publish_interval_s: RunningMean = field(default_factory=RunningMean)


@dataclass(slots=True)
class TruncationCounts:
    """Counts of truncated trajectories, from the moment of the decision."""

    num_trained: int = 0
    """Trajectories consumed by steps since this start of the run, truncated or not."""
    num_truncated: int = 0
    """Trajectories truncated since this start of the run."""
    num_truncated_in_step: int = 0
    """Trajectories truncated since a step last consumed its batch."""

    def count_consumed(self, num_trajectories: int) -> None:
        self.num_trained += num_trajectories
        self.num_truncated_in_step = 0

    def add(self, count: int) -> None:
        """Add 1 for a trajectory that is being truncated, or -1 if it is not truncated after all."""
        self.num_truncated += count
        self.num_truncated_in_step = max(0, self.num_truncated_in_step + count)


class ReplanFlags:
    """Flags of decisions to make again. CoordinatorState, which inherits them, sets them when it changes; reading one
    clears it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._batch_changed = self._admission_changed = self._routing_changed = self._all_may_pull = False
        self._pull_candidates: dict[InstanceId, Instance] = {}

    def pop_batch_changed(self) -> bool:
        """Whether a batch may have become ready since the previous call."""
        changed, self._batch_changed = self._batch_changed, False
        return changed

    def pop_pull_candidates(self) -> list[Instance]:
        """Instances that may have become worth a pull since the previous call."""
        candidates = list(self._fleet if self._all_may_pull else self._pull_candidates.values())
        self._pull_candidates, self._all_may_pull = {}, False
        return candidates

    def pop_admission_changed(self) -> bool:
        """Whether there may be room for more groups than at the previous call."""
        changed, self._admission_changed = self._admission_changed, False
        return changed

    def pop_routing_changed(self) -> bool:
        """Whether queued trajectories may find an instance that found none at the previous call."""
        changed, self._routing_changed = self._routing_changed, False
        return changed

"""The multi-level queue of trajectories that wait for an instance (StaleFlow, arXiv 2601.12784). Pure.

A level is the version under which a group was reserved. Older levels are served first, and groups without a reservation
last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.trajectory import TrajectoryId

EVALUATION = -1
"""Level of evaluation samples: before all other work, in the few slots that evaluations have."""
UNRESERVED = 2**62
"""Level of groups without a reservation."""


class WorkQueue:
    """The queue; only the state changes it. Within a level, first in, first out. Methods are O(1), except `levels`,
    O(eta log eta), and `num_continuable`, O(eta)."""

    def __init__(self) -> None:
        # An OrderedDict finds its first item in O(1); a plain dict walks over all deleted ones.
        self._levels: dict[int, OrderedDict[TrajectoryId, LiveTrajectory]] = {}

    def head(self, level: int) -> LiveTrajectory:
        """The trajectory that has waited longest in a level."""
        return next(iter(self._levels[level].values()))

    def levels(self) -> list[int]:
        """Levels with work in them, oldest version first."""
        return sorted(self._levels)

    def count(self, level: int) -> int:
        """Trajectories in a level."""
        return len(self._levels.get(level, ()))

    def num_continuable(self, version: int) -> int:
        """Number of waiting trajectories with a reservation that an instance of `version` can continue."""
        return sum(len(trajectories) for level, trajectories in self._levels.items() if EVALUATION < level <= version)

    def __iter__(self) -> Iterator[tuple[int, LiveTrajectory]]:
        """(level, trajectory), level by level."""
        for level, trajectories in self._levels.items():
            for trajectory in trajectories.values():
                yield level, trajectory

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def append(self, trajectory: LiveTrajectory, level: int) -> None:
        """Append a trajectory to a level."""
        self._levels.setdefault(level, OrderedDict())[trajectory.id] = trajectory

    def remove(self, trajectory: LiveTrajectory, level: int) -> None:
        """Remove a trajectory from a level."""
        trajectories = self._levels[level]
        del trajectories[trajectory.id]
        if not trajectories:
            del self._levels[level]

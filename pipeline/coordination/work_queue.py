"""The multi-level queue (StaleFlow, arXiv 2601.12784): work waits by the version it was promised under, oldest first,
and work that holds no promise yet behind all of it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.trajectory import TrajectoryId

EVALUATION = -1
"""Level of what is sampled to evaluate the model: before all other work, in the few places that are its."""
FRESH = 2**62
"""Level of work that holds no promise yet."""


class WorkQueue:
    """A read-only view of the queue. First come, first served within a level. All is O(1) but for `levels`,
    O(eta log eta), and `promised`, O(eta)."""

    def __init__(self) -> None:
        # Ordered: the head of a plain dict is found by walking over everything that ever stood before it.
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

    def promised(self, version: int) -> int:
        """Trajectories with a promise that an instance of `version` can continue."""
        return sum(len(waiting) for level, waiting in self._levels.items() if EVALUATION < level <= version)

    def __iter__(self) -> Iterator[tuple[int, LiveTrajectory]]:
        """(level, trajectory), level by level."""
        for level, waiting in self._levels.items():
            for live in waiting.values():
                yield level, live

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))


class MutableWorkQueue(WorkQueue):
    """The queue with the methods by which the state changes it."""

    def append(self, live: LiveTrajectory, level: int) -> None:
        """Append to a level."""
        self._levels.setdefault(level, OrderedDict())[live.id] = live

    def remove(self, live: LiveTrajectory, level: int) -> None:
        """Remove from a level."""
        waiting = self._levels[level]
        del waiting[live.id]
        if not waiting:
            del self._levels[level]

"""The multi-level queue (StaleFlow, arXiv 2601.12784): work waits by the version it was promised under, oldest first,
and work that holds no promise yet behind all of it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pipeline.coordination.trajectories import LiveTrajectory
from stores.trajectory import TrajectoryId

FRESH = 2**62
"""Level of work that holds no promise yet."""


class WorkQueue:
    """First come, first served within a level. All verbs are O(1) but for `levels`, O(eta log eta)."""

    def __init__(self) -> None:
        # Ordered: the head of a plain dict is found by walking over everything that ever stood before it.
        self._levels: dict[int, OrderedDict[TrajectoryId, LiveTrajectory]] = {}

    def enter(self, live: LiveTrajectory, level: int) -> None:
        """Stand at the end of a level."""
        live.level = level
        self._levels.setdefault(level, OrderedDict())[live.id] = live

    def leave(self, live: LiveTrajectory) -> None:
        """Leave the level it stands in; nothing happens if it does not stand there."""
        waiting = self._levels.get(live.level)
        if waiting is not None and waiting.pop(live.id, None) is not None and not waiting:
            del self._levels[live.level]

    def head(self, level: int) -> LiveTrajectory:
        return next(iter(self._levels[level].values()))

    def levels(self) -> list[int]:
        """Levels where something waits, oldest first."""
        return sorted(self._levels)

    def count(self, level: int) -> int:
        return len(self._levels.get(level, ()))

    def promised(self, version: int) -> int:
        """How many wait that an instance of `version` may go on with."""
        return sum(len(waiting) for level, waiting in self._levels.items() if level <= version)

    def __iter__(self) -> Iterator[LiveTrajectory]:
        for waiting in self._levels.values():
            yield from waiting.values()

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

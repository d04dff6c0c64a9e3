"""What a coordinator remembers for people: the lives of its trajectories, and why it declined. Pure, bounded."""

from __future__ import annotations

import itertools
from collections import deque

from pipeline.coordination.trajectories import LiveTrajectory
from stores.trajectory import TrajectoryId

STORY_LINES = 200_000
"""Lines kept for `story`: about 40,000 trajectories of five lines each, some tens of megabytes."""


HAPPENED = ("arrived", "sampled", "reward")
"""How notes begin that tell of something that happened, and not of something decided."""


class History:
    """`now` and `cause` are of the event being handled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cause = ""
        self.refusals: dict[str, int] = {}
        self._log: deque[tuple[TrajectoryId, float, str, str]] = deque(maxlen=STORY_LINES)
        self._followed: TrajectoryId | None = None

    def follow(self, trajectory: TrajectoryId) -> None:
        """Keep notes of this trajectory only, however long the run."""
        self._followed = trajectory

    def note(self, trajectory: TrajectoryId, what: str) -> None:
        if self._followed is None or trajectory == self._followed:
            self._log.append((trajectory, self.now, self.cause, what))

    def refused(self, live: LiveTrajectory, why: str) -> None:
        """Counted every time; a line in its story only when the reason is another than before."""
        self.refusals[why] = self.refusals.get(why, 0) + 1
        if live.refused != why:
            live.refused = why
            self.note(live.id, f"waits: {why}")

    def latest(self, count: int) -> list[tuple[float, int, str, str]]:
        """The last decisions: (when, trajectory, what, cause), newest first. What only happened is left out."""
        decided = (entry for entry in reversed(self._log) if not entry[3].startswith(HAPPENED))
        return [(now, int(who), what, cause) for who, now, cause, what in itertools.islice(decided, count)]

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """One line "time  what  (cause)" each, in order."""
        return [f"{now:9.3f} s  {what}  ({cause})" for who, now, cause, what in self._log if who == trajectory]

"""Records decisions for display: the story of each trajectory, and why work had to wait. Pure, bounded."""

from __future__ import annotations

import itertools
from collections import deque

from staleflow.pipeline.coordination.events import TrajectoryInterrupted, TrajectorySampled
from staleflow.stores.trajectory import TrajectoryId

STORY_LINES = 200_000
"""Lines kept for `story`: about 40,000 trajectories of five lines each, some tens of megabytes."""

HAPPENED = ("arrived", "sampled", "reward")
"""Beginnings of the notes about what happened, as opposed to what was decided."""


class DecisionLog:
    """A bounded log of notes, and counts of refusals. `now` and `cause` are those of the event being handled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cause = ""
        self.refusals: dict[str, int] = {}
        self._log: deque[tuple[TrajectoryId, float, str, str]] = deque(maxlen=STORY_LINES)
        self._followed: TrajectoryId | None = None

    def follow(self, trajectory: TrajectoryId) -> None:
        """Keep notes of this trajectory only, without a limit on their number."""
        self._followed = trajectory

    def note(self, trajectory: TrajectoryId, note: str) -> None:
        """Add a line to a trajectory's story."""
        if self._followed is None or trajectory == self._followed:
            self._log.append((trajectory, self.now, self.cause, note))

    def refused(self, trajectory: TrajectoryId, why: str, *, again: bool) -> None:
        """Count a refusal. Of repeated refusals for one reason, only the first is added to the story."""
        self.refusals[why] = self.refusals.get(why, 0) + 1
        if not again:
            self.note(trajectory, f"waits: {why}")

    def latest(self, count: int) -> list[tuple[float, int, str, str]]:
        """The latest decisions, newest first: (seconds, trajectory, what, cause). Notes of mere events are left out."""
        decided = (entry for entry in reversed(self._log) if not entry[3].startswith(HAPPENED))
        return [(now, int(who), note, cause) for who, now, cause, note in itertools.islice(decided, count)]

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """The notes of a trajectory, in order: one line "time  what  (cause)" each."""
        return [f"{now:9.3f} s  {note}  ({cause})" for who, now, cause, note in self._log if who == trajectory]


def tokens_sampled(event: TrajectorySampled | TrajectoryInterrupted) -> str:
    """Format a trajectory's number of tokens, and how many draft tokens were accepted since it was routed, if any were
    verified."""
    text = f"{event.tokens} tokens"
    if event.drafted_tokens:
        text += f", {event.accepted_tokens} of {event.drafted_tokens} drafted tokens accepted"
    return text

"""Logs decisions for display: the story of each trajectory, and why trajectories had to wait. Pure, bounded."""

from __future__ import annotations

import itertools
from collections import deque

from staleflow.pipeline.coordination.events import TrajectoryInterrupted, TrajectorySampled
from staleflow.stores.trajectory import TrajectoryId

MAX_NOTES = 200_000
"""Number of notes kept for `story`: about 40,000 trajectories of five notes each, some tens of megabytes."""

EVENT_NOTES = ("arrived", "sampled", "reward")
"""Prefixes of the notes about events; all others are about decisions."""


class DecisionLog:
    """A bounded log of notes, and counts of refusals. `now` and `cause` are those of the event being handled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cause = ""
        self.refusals: dict[str, int] = {}
        self._notes: deque[tuple[TrajectoryId, float, str, str]] = deque(maxlen=MAX_NOTES)
        self._followed_trajectory: TrajectoryId | None = None

    def follow(self, trajectory: TrajectoryId) -> None:
        """Keep notes of this trajectory only, without a limit on their number."""
        self._followed_trajectory = trajectory

    def note(self, trajectory: TrajectoryId, note: str) -> None:
        """Add a line to a trajectory's story."""
        if self._followed_trajectory is None or trajectory == self._followed_trajectory:
            self._notes.append((trajectory, self.now, self.cause, note))

    def count_refusal(self, trajectory: TrajectoryId, reason: str, *, is_new: bool) -> None:
        """Count a refusal to route a trajectory. is_new: whether its previous refusal had another reason; only then it
        is added to the story."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if is_new:
            self.note(trajectory, f"waits: {reason}")

    def latest_decisions(self, count: int) -> list[tuple[float, int, str, str]]:
        """The latest decisions, newest first: (seconds, trajectory, decision, cause). Notes about events are left
        out."""
        decisions = (entry for entry in reversed(self._notes) if not entry[3].startswith(EVENT_NOTES))
        return [(now, int(member), note, cause) for member, now, cause, note in itertools.islice(decisions, count)]

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """The notes of a trajectory, in order: one line "time  note  (cause)" each."""
        return [f"{now:9.3f} s  {note}  ({cause})" for member, now, cause, note in self._notes if member == trajectory]


def format_sampled_tokens(event: TrajectorySampled | TrajectoryInterrupted) -> str:
    """Format a trajectory's number of tokens, and how many draft tokens were accepted since it was routed, if any were
    verified."""
    text = f"{event.tokens} tokens"
    if event.drafted_tokens:
        text += f", {event.accepted_tokens} of {event.drafted_tokens} drafted tokens accepted"
    return text

"""Logs decisions for display: the story of each trajectory, and why trajectories had to wait. Pure, bounded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from staleflow.pipeline.coordination import invariants
from staleflow.pipeline.coordination.events import TrajectoryInterrupted, TrajectorySampled
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.snapshot import Snapshot, explain_waiting, take_snapshot
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId

MAX_NOTES = 200_000
"""Number of notes kept for `story`: about 60,000 trajectories of three notes each, some tens of megabytes, and a few
that many trajectories share."""

EVENT_NOTE_PREFIXES = ("arrived", "restored", "sampled", "turn ", "interrupted", "observation", "reward")
"""Prefixes of the notes about events as they are expected; others are about decisions and failures."""


class DecisionLog:
    """A bounded log of notes, and counts of refusals. `now` and `cause` are those of the event being handled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cause = ""
        self.refusals: dict[str, int] = {}
        self._notes: deque[tuple[Sequence[TrajectoryId], float, str, str]] = deque(maxlen=MAX_NOTES)
        self._followed_trajectory: TrajectoryId | None = None

    def follow(self, trajectory: TrajectoryId) -> None:
        """Keep notes of this trajectory only, without a limit on their number."""
        self._followed_trajectory = trajectory

    def note(self, trajectory: TrajectoryId, note: str) -> None:
        """Add a line to a trajectory's story."""
        self.note_all((trajectory,), note)

    def note_all(self, trajectories: Sequence[TrajectoryId], note: str) -> None:
        """Add a line to the stories of several trajectories. They are not copied."""
        if self._followed_trajectory is None or self._followed_trajectory in trajectories:
            self._notes.append((trajectories, self.now, self.cause, note))

    def count_refusal(self, trajectory: TrajectoryId, reason: str, *, is_new: bool) -> None:
        """Count a refusal to route a trajectory. is_new: whether its previous refusal had another reason; only then it
        is added to the story."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if is_new:
            self.note(trajectory, f"waits: {reason}")

    def latest_decisions(self, count: int) -> list[tuple[float, int, str, str]]:
        """Return the latest decisions, newest first: (seconds, trajectory, decision, cause). Notes with
        EVENT_NOTE_PREFIXES are left out."""
        decisions = (
            (now, int(id), note, cause)
            for ids, now, cause, note in reversed(self._notes)
            if not note.startswith(EVENT_NOTE_PREFIXES)
            for id in reversed(ids)
        )
        return list(itertools.islice(decisions, count))

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """Return the notes of a trajectory, in order: one line "time  note  (cause)" each."""
        return [f"{now:9.3f} s  {note}  ({cause})" for ids, now, cause, note in self._notes if trajectory in ids]


def format_sampled_tokens(event: TrajectorySampled | TrajectoryInterrupted) -> str:
    """Format a trajectory's number of tokens, and how many draft tokens were accepted since it was routed, if any were
    verified."""
    text = f"{event.tokens} tokens"
    if event.drafted_tokens:
        text += f", {event.accepted_tokens} of {event.drafted_tokens} drafted tokens accepted"
    return text


class CoordinatorInspection:
    """Read-only view of a coordinator's state."""

    def __init__(self, state: CoordinatorState, forecast: LengthForecast, decision_log: DecisionLog) -> None:
        self.ledger = state.ledger
        self.forecast = forecast
        self.mixture = state.mixture
        """The mixture of task sources; None if the run has one source and draws its tasks in order."""
        self._state = state
        self._decision_log = decision_log

    @property
    def is_finished(self) -> bool:
        """Whether all planned steps are trained and published, and no evaluation is running."""
        return self.ledger.version >= self.ledger.num_steps and self._state.evaluation is None

    @property
    def is_training(self) -> bool:
        """Whether a step is being trained."""
        return self._state.is_training

    def served_versions(self) -> set[PolicyVersion]:
        """The versions that instances serve, or are about to load."""
        return {*self._state.fleet.distinct_versions()}

    def num_running_by_instance(self) -> dict[InstanceId, int]:
        """Number of trajectories on each instance, as far as the coordinator knows. O(instances)."""
        return {instance.id: instance.num_running for instance in self._state.fleet}

    def num_tokens(self, trajectory: TrajectoryId) -> int:
        """Number of tokens of a trajectory's response, as last reported; 0 if the trajectory is not live, as when
        later commands of the event that had it scored have ended it."""
        live_trajectory = self._state.live_trajectories.get(trajectory)
        return 0 if live_trajectory is None else live_trajectory.tokens

    def is_drained(self, instance_id: InstanceId) -> bool:
        """Whether an instance may be closed: it is gone, or it is leaving and runs nothing."""
        instance = self._state.fleet.get(instance_id)
        return instance is None or (instance.max_running == 0 and not instance.trajectories)

    def follow(self, trajectory: TrajectoryId) -> None:
        """Log the decisions about this trajectory only, without a limit on their number. Call before its first
        event."""
        self._decision_log.follow(trajectory)

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """The story of a trajectory, in order: one line "time  note  (cause)" each."""
        return self._decision_log.story(trajectory)

    def latest_decisions(self, count: int) -> list[tuple[float, int, str, str]]:
        """The latest decisions, newest first: (seconds, trajectory, decision, cause)."""
        return self._decision_log.latest_decisions(count)

    def explain_waiting(self, limit: int = 6) -> str:
        """Explain in one paragraph what the next step waits for, for a run that makes no progress."""
        return explain_waiting(self._state, limit)

    def snapshot(self) -> Snapshot:
        """The run as it is now. O(instances)."""
        return take_snapshot(self._state, self._decision_log.refusals)

    def validate(self) -> None:
        """Check every invariant of state and ledger. Raises `ProtocolViolation` on the first that is broken."""
        invariants.validate(self._state)

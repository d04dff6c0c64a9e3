"""Read-only queries on a coordinator. Pure: only `follow` changes anything, and only the decision log."""

from __future__ import annotations

from staleflow.pipeline.coordination import invariants
from staleflow.pipeline.coordination.decision_log import DecisionLog
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.coordination.snapshot import Snapshot, explain_waiting, take_snapshot
from staleflow.pipeline.coordination.state_view import StateView
from staleflow.stores.trajectory import InstanceId, TrajectoryId


class CoordinatorInspection:
    """Read-only view of a coordinator's state."""

    def __init__(self, state: StateView, forecast: LengthForecast, decision_log: DecisionLog) -> None:
        self.ledger = state.ledger
        self.forecast = forecast
        self._state = state
        self._decision_log = decision_log

    @property
    def finished(self) -> bool:
        """All planned steps are trained and published, and no evaluation is running."""
        return self.ledger.version >= self.ledger.num_steps and self._state.evaluation is None

    @property
    def mixture(self) -> Mixture | None:
        """The mixture of task sources; None if the run has one source and draws its tasks in order."""
        return self._state.mixture

    @property
    def training(self) -> bool:
        """Whether a step is being trained."""
        return self._state.training

    def num_running_by_instance(self) -> dict[InstanceId, int]:
        """Number of trajectories on each instance, as far as the coordinator knows. O(instances)."""
        return {instance.id: instance.num_running for instance in self._state.fleet}

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
        """The run as it is now. O(live trajectories + groups + instances)."""
        return take_snapshot(self._state, self._decision_log.refusals)

    def validate(self) -> None:
        """Check every invariant of state and ledger. Raises `ProtocolViolation` on the first that is broken."""
        invariants.validate(self._state)

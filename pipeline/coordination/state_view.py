"""The coordinator's state, read-only. Pure.

Planners, snapshots and invariants read the state through `StateView`; only `CoordinatorState` in state.py changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from staleflow.pipeline.coordination.evaluations import MutableEvaluations, RunningEvaluation
from staleflow.pipeline.coordination.fleet import Fleet, Instance, MutableFleet
from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import EVALUATION, UNRESERVED, MutableWorkQueue, WorkQueue
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import GroupId, InstanceId, TrajectoryId, is_evaluation

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
    """Counts of truncated trajectories, from the moment of the decision. num_trained: trajectories consumed
    by steps. num_truncated: in the whole run. num_truncated_in_step: since a step last consumed its batch."""

    num_trained: int = 0
    num_truncated: int = 0
    num_truncated_in_step: int = 0

    def count_consumed(self, num_trajectories: int) -> None:
        self.num_trained += num_trajectories
        self.num_truncated_in_step = 0

    def add(self, count: int) -> None:
        """Add 1 for a trajectory that is being truncated, or -1 if it ended before it was truncated."""
        self.num_truncated += count
        self.num_truncated_in_step = max(0, self.num_truncated_in_step + count)


class ReplanFlags:
    """Flags that the state sets when it changes. Reading a flag clears it."""

    def __init__(self, fleet: Fleet) -> None:
        self._instances = fleet
        self._batch_changed = self._room_changed = self._routing_changed = self._all_loads_changed = False
        self._loads_changed: dict[InstanceId, Instance] = {}

    def pop_batch_changed(self) -> bool:
        """Whether a batch may have become ready since the previous call."""
        changed, self._batch_changed = self._batch_changed, False
        return changed

    def pop_loads_changed(self) -> list[Instance]:
        """Instances that may have become worth a pull since the previous call."""
        changed = list(self._instances if self._all_loads_changed else self._loads_changed.values())
        self._loads_changed, self._all_loads_changed = {}, False
        return changed

    def pop_room_changed(self) -> bool:
        """Whether there may be room for more groups than at the previous call."""
        changed, self._room_changed = self._room_changed, False
        return changed

    def pop_routing_changed(self) -> bool:
        """Whether queued trajectories may find an instance that found none at the previous call."""
        changed, self._routing_changed = self._routing_changed, False
        return changed


class StateView(ReplanFlags):
    """Trajectories, instances, queued work and the ledger of one run, for reading."""

    def __init__(
        self,
        ledger: StalenessLedger,
        mixture: Mixture | None = None,
        *,
        serves_many_versions: bool = False,
        shares_gpus: bool = False,
    ) -> None:
        """serves_many_versions: see Fleet. shares_gpus: see StrategySet."""
        self._live_trajectories: dict[TrajectoryId, LiveTrajectory] = {}
        self._fleet = MutableFleet(serves_many_versions=serves_many_versions)
        super().__init__(self._fleet)
        self._queue = MutableWorkQueue()
        # The same objects, for reading.
        self.ledger = ledger
        self.live_trajectories: Mapping[TrajectoryId, LiveTrajectory] = MappingProxyType(self._live_trajectories)
        self.fleet: Fleet = self._fleet
        self.queue: WorkQueue = self._queue
        self.mixture = mixture
        self._evaluations = MutableEvaluations(self._fleet)
        self.running_means = RunningMeans()
        self.truncations = TruncationCounts()
        self._now = 0.0
        self._unreserved_groups: set[GroupId] = set()
        self._groups_requested = 0
        self._training = False
        self._trainer_idle_since: float | None = 0.0
        """Seconds; None while a step is being trained."""
        self._published_at = 0.0
        """Time of the latest `publish` or `resume`, in seconds."""
        self.shares_gpus = shares_gpus
        self._pending_sleeps: set[InstanceId] = set()

    @property
    def now(self) -> float:
        """Time of the event being handled, in seconds."""
        return self._now

    @property
    def training(self) -> bool:
        """Whether a step is being trained."""
        return self._training

    @property
    def evaluation(self) -> RunningEvaluation | None:
        """The running evaluation; None if there is none."""
        return self._evaluations.running

    @property
    def trainer_has_gpus(self) -> bool:
        """Whether the trainer uses the GPUs that it shares with the instances, which then all sleep or will soon."""
        return self.shares_gpus and self._training

    @property
    def pending_sleeps(self) -> Set[InstanceId]:
        """Instances that were ordered to sleep and have not confirmed it."""
        return self._pending_sleeps

    @property
    def trainer_waited_s(self) -> float:
        """Seconds that the trainer has been waiting for its next batch; 0 while it trains."""
        return 0.0 if self._trainer_idle_since is None else self._now - self._trainer_idle_since

    @property
    def unreserved_groups(self) -> Set[GroupId]:
        """Groups that have arrived and have no reservation, since no member was routed yet."""
        return self._unreserved_groups

    @property
    def groups_requested(self) -> int:
        """Number of groups that were requested and have not arrived."""
        return self._groups_requested

    def queue_level(self, group: GroupId) -> int:
        """Return the queue level of a group's members."""
        if is_evaluation(group):
            return EVALUATION
        version = self.ledger.entries[group].version
        return UNRESERVED if version < 0 else version

    def get_running(self, trajectory: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        """Return the running trajectory of an instance's event; None if the event is late."""
        return self._get_in_phase(Phase.RUNNING, trajectory, route_number)

    def get_in_environment(self, trajectory: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        """Return the trajectory of an environment's event; None if the event is late."""
        return self._get_in_phase(Phase.IN_ENVIRONMENT, trajectory, route_number)

    def _get_in_phase(self, phase: Phase, trajectory_id: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        trajectory = self._live_trajectories.get(trajectory_id)
        if trajectory is None or trajectory.phase is not phase or trajectory.route_number != route_number:
            return None
        return trajectory

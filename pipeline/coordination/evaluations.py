"""The evaluation that runs during training: its trajectories, and the instances pinned to its version. Pure.

A version is evaluated by trajectories of its own, each sampled under that version alone, from the first token to the
last. They are routed, interrupted, retried and scored like all others, but the ledger does not know them, so no
training step waits for them or consumes them. A few instances are *pinned*: they serve the evaluated version and do not
pull until they have nothing more to sample for it. The others pull as usual.

- Training does not starve: an evaluation has at most a share of the fleet's slots (running requests). As few instances
  as possible are pinned, since each of them lags behind for as long as its longest response takes. Within its
  slots an evaluation comes first: the sooner it is over, the sooner its instances pull. A pinned instance that training
  cannot use, since the staleness bound allows no more work at its version, gives all of its slots to the evaluation.
  After the last training step it has the whole fleet.
- No deadlock: queued trajectories of an evaluation wait for pinned instances only, and these need nothing from
  training. A pinned instance that lags gets no new training work once its version is too old for the bound; then its
  slots are free.
- A pinned instance that is lost or leaves is replaced by any other that still serves the version; its trajectories
  continue there. If there is none, and a newer version is published, the evaluation is abandoned, and may begin again
  with the newer version. So it is if a pinned instance had to load a newer version, since no host had the evaluated one
  any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(slots=True)
class RunningEvaluation:
    """An evaluation that was requested and has not ended. Changed by `Evaluations` only."""

    number: int
    members: set[TrajectoryId]
    """Its trajectories that have not ended."""
    num_to_sample: int
    """Number of members that are not completely sampled yet."""
    evaluated_version: PolicyVersion = PolicyVersion(-1)
    """The evaluated version; -1 until an instance is pinned."""
    pinned_instances: dict[InstanceId, None] = field(default_factory=dict)
    """The pinned instances, in the order of their pinning."""
    failed_trajectories: list[TrajectoryId] = field(default_factory=list)
    """Trajectories that ended without a score."""


class Evaluations:
    """The running evaluation, with the methods by which the coordinator's state changes it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.running: RunningEvaluation | None = None

    def begin(
        self, number: int, groups: Iterable[NewGroup], members_per_group: int, now: float
    ) -> list[LiveTrajectory]:
        """Start an evaluation. Returns its trajectories, one per group. members_per_group: number of ids that each
        group has."""
        if self.running is not None:
            raise ProtocolViolation(f"evaluation {number} is requested, but {self.running.number} is running")
        trajectories = [
            LiveTrajectory(
                id=TrajectoryId(group.group * members_per_group),
                group=group.group,
                prompt_tokens=group.prompt_tokens,
                phase_since_s=now,
            )
            for group in groups
        ]
        ids = {trajectory.id for trajectory in trajectories}
        if len(ids) < len(trajectories) or not all(trajectory.is_evaluation for trajectory in trajectories):
            raise ProtocolViolation(f"evaluation {number} needs groups of its own, with negative numbers")
        self.running = RunningEvaluation(number=number, members=ids, num_to_sample=len(ids))
        return trajectories

    def pin(self, instance: Instance) -> None:
        """Pin an instance to the version it serves, which becomes the evaluated version."""
        evaluation = self._require_running()
        if evaluation.evaluated_version not in {-1, instance.version}:
            raise ProtocolViolation(
                f"{instance.id} at version {instance.version} cannot be pinned for an evaluation of version "
                f"{evaluation.evaluated_version}"
            )
        evaluation.evaluated_version = instance.version
        evaluation.pinned_instances[instance.id] = None

    def unpin_idle_instances(self) -> list[Instance]:
        """Unpin the instances that have nothing more to sample for the evaluation, and return them."""
        evaluation = self.running
        if evaluation is None or not evaluation.pinned_instances:
            return []
        instances = [
            instance
            for instance_id in evaluation.pinned_instances
            if (instance := self._fleet.get(instance_id)) is not None
        ]
        if evaluation.num_to_sample > sum(instance.num_eval_running for instance in instances):
            return []  # the others are queued or in their environments
        idle_instances = [instance for instance in instances if not instance.num_eval_running]
        for instance in idle_instances:
            del evaluation.pinned_instances[instance.id]
        return idle_instances

    def unpin_lost(self, instance: InstanceId) -> None:
        """Unpin a lost instance."""
        if self.running is not None:
            self.running.pinned_instances.pop(instance, None)

    def count_sampled(self, trajectory: LiveTrajectory) -> None:
        """Record that a trajectory is completely sampled, if it belongs to the evaluation."""
        if trajectory.is_evaluation:
            self._require_running().num_to_sample -= 1

    def end_trajectory(self, trajectory: LiveTrajectory, *, has_score: bool) -> bool:
        """Record that a trajectory of the evaluation has ended. Returns True if it was the last. has_score: whether it
        has a score."""
        evaluation = self._require_running()
        if not has_score:
            self.count_sampled(trajectory)
            evaluation.failed_trajectories.append(trajectory.id)
        evaluation.members.discard(trajectory.id)
        return not evaluation.members

    def close(self) -> RunningEvaluation:
        """End the running evaluation and return it."""
        evaluation, self.running = self._require_running(), None
        return evaluation

    def _require_running(self) -> RunningEvaluation:
        if self.running is None:
            raise ProtocolViolation("no evaluation is running")
        return self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSlots:
    """The slots of an evaluation. slots_per_instance: evaluation trajectories that
    each may run at once."""

    num_instances: int
    slots_per_instance: int


def compute_slots(share: float, num_instances: int, max_running: int) -> EvaluationSlots:
    """The slots of an evaluation with a share of all instances: on as few instances as provide that many.

    >>> compute_slots(0.25, 3, 64)
    EvaluationSlots(num_instances=1, slots_per_instance=48)
    >>> compute_slots(0.25, 16, 64)
    EvaluationSlots(num_instances=4, slots_per_instance=64)
    """
    instances = max(1, math.ceil(share * num_instances))
    slots_per_instance = int(share * num_instances / instances * max_running)
    return EvaluationSlots(num_instances=instances, slots_per_instance=max(1, slots_per_instance))

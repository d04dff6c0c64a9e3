"""The evaluation that runs during training: its trajectories, and the instances pinned to its version. Pure.

A version is evaluated by trajectories of its own, each sampled under that version alone, from the first token to the
last. They are routed, interrupted, retried and scored like all others, but the ledger does not know them, so no
training step waits for them or consumes them. A few instances are *pinned*: they serve the evaluated version and do not
pull until they have nothing more to sample for it. The others pull as usual.

- Training does not starve: an evaluation has at most a share of the fleet's slots (running requests). As few instances
  as have so many slots are pinned, since each of them lags behind for as long as its longest response takes. Within its
  slots an evaluation comes first: the sooner it is over, the sooner its instances pull. A pinned instance that training
  cannot use, since the staleness bound allows no more work at its version, gives all of its slots to the evaluation.
  After the last training step it has the whole fleet.
- No deadlock: queued trajectories of an evaluation wait for pinned instances only, and these need nothing from
  training. A pinned instance that lags gets no new training work once its version is too old for the bound; then its
  slots are free.
- A pinned instance that is lost or leaves is replaced by any other that still serves the version; its trajectories
  continue there. If there is none, and a newer version is published, the evaluation is abandoned, and may begin again
  with the newer version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.events import NewGroup
from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(slots=True)
class RunningEvaluation:
    """An evaluation that was requested and has not ended. Changed by `MutableEvaluations` only."""

    number: int
    members: set[TrajectoryId]
    """Its trajectories that have not ended."""
    to_sample: int
    """Number of these that are not completely sampled yet."""
    evaluated_version: PolicyVersion = PolicyVersion(-1)
    """The evaluated version; -1 until an instance is pinned."""
    pinned: dict[InstanceId, None] = field(default_factory=dict)
    """The pinned instances, in the order of their pinning."""
    failed: list[TrajectoryId] = field(default_factory=list)
    """Trajectories that ended without a score."""


class MutableEvaluations:
    """The running evaluation, with the methods by which the coordinator's state changes it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.current: RunningEvaluation | None = None

    def begin(self, number: int, groups: Iterable[NewGroup], members: int, now: float) -> list[LiveTrajectory]:
        """Start an evaluation. Returns its trajectories, one per group. members: ids of each group's members."""
        if self.current is not None:
            raise ProtocolViolation(f"evaluation {number} is requested, but {self.current.number} is running")
        lives = [
            LiveTrajectory(
                id=TrajectoryId(new.group * members), group=new.group, prompt_tokens=new.prompt_tokens, since=now
            )
            for new in groups
        ]
        ids = {live.id for live in lives}
        if len(ids) < len(lives) or not all(live.is_eval for live in lives):
            raise ProtocolViolation(f"evaluation {number} needs groups of its own, with negative numbers")
        self.current = RunningEvaluation(number=number, members=ids, to_sample=len(ids))
        return lives

    def pin(self, instance: Instance) -> None:
        """Pin an instance to the version it serves, which becomes the evaluated version."""
        evaluation = self._require()
        if evaluation.evaluated_version not in {-1, instance.version}:
            raise ProtocolViolation(
                f"{instance.instance} at version {instance.version} for one of {evaluation.evaluated_version}"
            )
        evaluation.evaluated_version = instance.version
        evaluation.pinned[instance.instance] = None

    def unpin_idle(self) -> list[Instance]:
        """Unpin the instances that have nothing more to sample for the evaluation, and return them."""
        evaluation = self.current
        if evaluation is None or not evaluation.pinned:
            return []
        instances = [instance for name in evaluation.pinned if (instance := self._fleet.get(name)) is not None]
        if evaluation.to_sample > sum(instance.num_eval_running for instance in instances):
            return []  # the others are queued, or will come back from their environment
        idle = [instance for instance in instances if not instance.num_eval_running]
        for instance in idle:
            del evaluation.pinned[instance.instance]
        return idle

    def remove(self, instance: InstanceId) -> None:
        """Unpin a lost instance. Another one may join under its name later."""
        if self.current is not None:
            self.current.pinned.pop(instance, None)

    def sampled(self, live: LiveTrajectory) -> None:
        """Record that a trajectory is completely sampled, if it belongs to the evaluation."""
        if live.is_eval:
            self._require().to_sample -= 1

    def end(self, live: LiveTrajectory, *, scored: bool) -> bool:
        """Record that a trajectory of the evaluation has ended. Returns True if it was the last. scored: whether it has
        a score."""
        evaluation = self._require()
        if not scored:
            self.sampled(live)
            evaluation.failed.append(live.id)
        evaluation.members.discard(live.id)
        return not evaluation.members

    def close(self) -> RunningEvaluation:
        """End the running evaluation and return it."""
        evaluation, self.current = self._require(), None
        return evaluation

    def _require(self) -> RunningEvaluation:
        if self.current is None:
            raise ProtocolViolation("no evaluation is running")
        return self.current


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSlots:
    """The slots of an evaluation. instances: number of pinned instances. per_instance: evaluation trajectories that
    each may run at once."""

    instances: int
    per_instance: int


def slots_of_share(share: float, num_instances: int, max_running: int) -> EvaluationSlots:
    """The slots of an evaluation with a share of all instances: on as few instances as provide that many.

    >>> slots_of_share(0.25, 3, 64)
    EvaluationSlots(instances=1, per_instance=48)
    >>> slots_of_share(0.25, 16, 64)
    EvaluationSlots(instances=4, per_instance=64)
    """
    instances = max(1, math.ceil(share * num_instances))
    per_instance = int(share * num_instances / instances * max_running)
    return EvaluationSlots(instances=instances, per_instance=max(1, per_instance))

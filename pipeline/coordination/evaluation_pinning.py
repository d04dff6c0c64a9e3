"""Chooses the rollout instances that are pinned to an evaluated version, and routes the evaluation's trajectories to
them. Pure."""

from __future__ import annotations

from staleflow.pipeline.coordination.evaluations import EvaluationSlots, compute_slots
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import EVALUATION
from staleflow.stores.errors import ProtocolViolation


class PinPlanner:
    """Proposes instances to pin for an evaluation. They keep serving the evaluated version.

    It only reads the coordinator's state (coordination/evaluations.py); the coordinator carries out its proposals.

    slot_share: the part of the fleet's slots (`max_running` of each instance) that an evaluation may use while
    the run trains. A pinned instance gives the evaluation all of its slots while training has nothing to sample at its
    version.
    """

    def __init__(self, state: CoordinatorState, route_planner: RoutePlanner, slot_share: float) -> None:
        self._state = state
        self._route_planner = route_planner
        self._slot_share = slot_share

    def choose_instances_to_pin(self) -> list[Instance]:
        """Choose the instances to pin now; some may have to pull the published version first.

        Those that need no pull come first, then those with the fewest KV tokens.
        """
        evaluation, fleet = self._state.evaluation, self._state.fleet
        if evaluation is None or not self._state.queue.count(EVALUATION):
            return []
        published = self._state.ledger.version
        version = evaluation.evaluated_version if evaluation.evaluated_version >= 0 else published
        slots = self._slots
        num_needed = slots.num_instances
        if not self._is_training_done:
            num_needed = min(num_needed, -(-evaluation.num_to_sample // slots.slots_per_instance))
        # An instance that is leaving (max_running 0) samples nothing more; its trajectories go back into the queue.
        num_missing = num_needed - sum(
            instance is not None and instance.max_running > 0
            for instance in map(fleet.get, evaluation.pinned_instances)
        )
        if num_missing <= 0:
            return []
        candidates = [
            instance
            for instance in fleet
            if instance.id not in evaluation.pinned_instances
            and instance.max_running > 0
            and (instance.version == version or (version == published and not instance.is_pulling))
        ]
        candidates.sort(key=lambda instance: (instance.version != version, instance.kv_tokens, instance.index))
        return candidates[:num_missing]

    def must_pull(self, instance: Instance) -> bool:
        """Whether an instance to pin has to pull the published version, because it does not serve the evaluated one."""
        evaluation = self._state.evaluation
        return (
            evaluation is not None
            and instance.version != evaluation.evaluated_version
            and instance.version < self._state.ledger.version
        )

    def choose_instance(self, trajectory: LiveTrajectory) -> Instance | str:
        """Choose the pinned instance for a trajectory of the evaluation, or return the reason why it has to wait.

        Its last instance is preferred, where its context may be cached, then the one with the fewest trajectories of
        the evaluation.
        """
        evaluation, slots_per_instance = self._state.evaluation, self._slots.slots_per_instance
        if evaluation is None:
            raise ProtocolViolation(f"{trajectory.id} is queued for an evaluation, but none is running")
        if evaluation.evaluated_version >= 0 and not self._route_planner.can_receive_work(evaluation.evaluated_version):
            slots_per_instance = max(
                (instance.max_running for instance in self._state.fleet), default=slots_per_instance
            )
        candidates = [
            instance
            for instance_id in evaluation.pinned_instances
            if (instance := self._state.fleet.get(instance_id)) is not None
            and instance.version == evaluation.evaluated_version
            and instance.num_eval_running < slots_per_instance
            and instance.num_running < instance.max_running
            and (instance.kv_tokens + trajectory.kv_tokens <= instance.kv_capacity or not instance.trajectories)
        ]
        if not candidates:
            return "no slot for the evaluation"
        return min(
            candidates,
            key=lambda instance: (instance.id != trajectory.cached_instance, instance.num_eval_running, instance.index),
        )

    @property
    def cannot_finish(self) -> bool:
        """Whether the evaluation has trajectories to sample, but no instance serves its version or ever will."""
        evaluation, state = self._state.evaluation, self._state
        if (
            evaluation is None
            or evaluation.evaluated_version < 0
            or not evaluation.num_to_sample
            or evaluation.evaluated_version == state.ledger.version
        ):
            return False
        return not any(
            instance.version == evaluation.evaluated_version and instance.max_running > 0 for instance in state.fleet
        )

    @property
    def _is_training_done(self) -> bool:
        """Whether all training steps have ended, so that the evaluation may use the whole fleet."""
        return self._state.ledger.version >= self._state.ledger.num_steps

    @property
    def _slots(self) -> EvaluationSlots:
        fleet = self._state.fleet
        limits = [instance.max_running for instance in fleet]
        share = 1.0 if self._is_training_done else self._slot_share
        return compute_slots(share, len(limits), max(limits, default=1))

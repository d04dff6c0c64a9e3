"""Chooses the rollout instances that are pinned to an evaluated version, and routes the evaluation's trajectories to
them. Pure."""

from __future__ import annotations

from staleflow.pipeline.coordination.evaluations import EvaluationSlots, slots_of_share
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import EVALUATION
from staleflow.stores.errors import ProtocolViolation


class EvaluationPinning:
    """Proposes instances to pin for an evaluation. They keep serving the evaluated version.

    It only reads the coordinator's state, which coordination/evaluations.py describes; the coordinator carries out its
    proposals. share: the part of the fleet's slots (`max_running` of each instance) that an evaluation may use while
    the run trains. A pinned instance gives it all of its slots while training has nothing to sample at its version.
    """

    def __init__(self, state: CoordinatorState, planner: RoutePlanner, share: float) -> None:
        self._state = state
        self._planner = planner
        self._share = share

    def choose_pins(self) -> list[Instance]:
        """Choose the instances to pin now; some may have to pull the published version first.

        Those that need no pull come first, then those with the fewest KV tokens.
        """
        evaluation, fleet = self._state.evaluation, self._state.fleet
        if evaluation is None or not self._state.queue.count(EVALUATION):
            return []
        published = self._state.ledger.version
        version = evaluation.evaluated_version if evaluation.evaluated_version >= 0 else published
        slots = self._slots
        num_needed = slots.instances
        if not self._training_done:
            num_needed = min(num_needed, -(-evaluation.to_sample // slots.per_instance))
        # An instance that is leaving (max_running 0) samples nothing more; its trajectories go back into the queue.
        num_missing = num_needed - sum(
            instance is not None and instance.max_running > 0 for instance in map(fleet.get, evaluation.pinned)
        )
        if num_missing <= 0:
            return []
        candidates = [
            instance
            for instance in fleet
            if instance.instance not in evaluation.pinned
            and instance.max_running > 0
            and (instance.version == version or (version == published and not instance.pulling))
        ]
        candidates.sort(key=lambda instance: (instance.version != version, instance.kv_tokens, instance.row))
        return candidates[:num_missing]

    def must_pull(self, instance: Instance) -> bool:
        """Whether an instance to pin has to pull the published version, because it does not serve the evaluated one."""
        evaluation = self._state.evaluation
        return (
            evaluation is not None
            and instance.version != evaluation.evaluated_version
            and instance.version < self._state.ledger.version
        )

    def choose_instance(self, live: LiveTrajectory) -> Instance | str:
        """Choose the pinned instance for a trajectory of the evaluation, or return the reason why it has to wait.

        Its last instance is preferred, where its context may be cached, then the one with the fewest trajectories of
        the evaluation.
        """
        evaluation, per_instance = self._state.evaluation, self._slots.per_instance
        if evaluation is None:
            raise ProtocolViolation(f"{live.id} is queued for an evaluation, but none is running")
        if evaluation.evaluated_version >= 0 and not self._planner.has_routable(evaluation.evaluated_version):
            per_instance = max((instance.max_running for instance in self._state.fleet), default=per_instance)
        candidates = [
            instance
            for name in evaluation.pinned
            if (instance := self._state.fleet.get(name)) is not None
            and instance.version == evaluation.evaluated_version
            and instance.num_eval_running < per_instance
            and instance.num_running < instance.max_running
            and (instance.kv_tokens + live.kv_tokens <= instance.kv_capacity or not instance.trajectories)
        ]
        if not candidates:
            return "no place for the evaluation"
        return min(
            candidates,
            key=lambda instance: (instance.instance != live.cached_on, instance.num_eval_running, instance.row),
        )

    @property
    def cannot_finish(self) -> bool:
        """Whether the evaluation has trajectories to sample, but no instance serves its version or ever will."""
        evaluation, state = self._state.evaluation, self._state
        if (
            evaluation is None
            or evaluation.evaluated_version < 0
            or not evaluation.to_sample
            or evaluation.evaluated_version == state.ledger.version
        ):
            return False
        return not any(
            instance.version == evaluation.evaluated_version and instance.max_running > 0 for instance in state.fleet
        )

    @property
    def _training_done(self) -> bool:
        """Whether all training steps have ended, so that the evaluation may use the whole fleet."""
        return self._state.ledger.version >= self._state.ledger.num_steps

    @property
    def _slots(self) -> EvaluationSlots:
        fleet = self._state.fleet
        limits = [instance.max_running for instance in fleet]
        share = 1.0 if self._training_done else self._share
        return slots_of_share(share, len(limits), max(limits, default=1))

"""Chooses the rollout instances that are pinned to the evaluated version, and routes its trajectories to them. Pure."""

from __future__ import annotations

from staleflow.pipeline.coordination.evaluations import Places, places_of
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import EVALUATION
from staleflow.stores.errors import ProtocolViolation


class EvaluationPinning:
    """Proposes the hosts of an evaluation: rollout instances that stay at the evaluated version to sample for it.

    It holds no state and changes none: the coordinator asks before it routes, and carries out the proposals. share: the
    part of the fleet's concurrent requests (`max_running`) that an evaluation may have while the run trains. A host
    uses all of its own for the evaluation while training has nothing to sample at its version.
    """

    def __init__(self, state: CoordinatorState, planner: RoutePlanner, share: float) -> None:
        self._state = state
        self._planner = planner
        self._share = share

    def new_hosts(self) -> list[Instance]:
        """Instances that should become hosts of the evaluation now, if necessary after a pull of the published version.

        Those that need no pull come first, then those with the fewest tokens in progress.
        """
        evaluation, fleet = self._state.evaluation, self._state.fleet
        if evaluation is None or not self._state.queue.count(EVALUATION):
            return []
        published = self._state.ledger.version
        version = evaluation.evaluated if evaluation.evaluated >= 0 else published
        places = self._places
        wanted = places.hosts if self._trained else min(places.hosts, -(-evaluation.to_sample // places.of_each))
        # A host that is leaving (max_running 0) samples nothing more; its trajectories go back into the queue.
        missing = wanted - sum(
            instance is not None and instance.max_running > 0 for instance in map(fleet.get, evaluation.hosts)
        )
        if missing <= 0:
            return []
        able = [
            instance
            for instance in fleet
            if instance.instance not in evaluation.hosts
            and instance.max_running > 0
            and (instance.version == version or (version == published and not instance.pulling))
        ]
        return sorted(able, key=lambda instance: (instance.version != version, instance.kv_tokens, instance.row))[
            :missing
        ]

    def must_pull(self, instance: Instance) -> bool:
        """Whether a new host has to pull the published version, since it does not serve the evaluated one yet."""
        evaluation = self._state.evaluation
        return (
            evaluation is not None
            and instance.version != evaluation.evaluated
            and instance.version < self._state.ledger.version
        )

    def place(self, live: LiveTrajectory) -> Instance | str:
        """The host that is to sample a trajectory, or the reason why it has to wait.

        Its last instance is preferred, where its context may be cached, then the host with the fewest evaluation
        trajectories.
        """
        evaluation, of_each = self._state.evaluation, self._places.of_each
        if evaluation is None:
            raise ProtocolViolation(f"{live.id} is queued for an evaluation that is not under way")
        if evaluation.evaluated >= 0 and not self._planner.demand(evaluation.evaluated):
            of_each = max((host.max_running for host in self._state.fleet), default=of_each)
        able = [
            host
            for name in evaluation.hosts
            if (host := self._state.fleet.get(name)) is not None
            and host.version == evaluation.evaluated
            and host.num_evaluated < of_each
            and host.num_running < host.max_running
            and (host.kv_tokens + live.kv_tokens <= host.kv_capacity or not host.trajectories)
        ]
        if not able:
            return "no place for the evaluation"
        return min(able, key=lambda host: (host.instance != live.home, host.num_evaluated, host.row))

    @property
    def cannot_finish(self) -> bool:
        """Whether the evaluation has trajectories to sample, but no instance serves its version and none will."""
        evaluation, state = self._state.evaluation, self._state
        if (
            evaluation is None
            or evaluation.evaluated < 0
            or not evaluation.to_sample
            or evaluation.evaluated == state.ledger.version
        ):
            return False
        return not any(
            instance.version == evaluation.evaluated and instance.max_running > 0 for instance in state.fleet
        )

    @property
    def _trained(self) -> bool:
        """Whether all training steps are done, so that the evaluation may have the whole fleet."""
        return self._state.ledger.version >= self._state.ledger.num_steps

    @property
    def _places(self) -> Places:
        fleet = self._state.fleet
        caps = [instance.max_running for instance in fleet]
        share = 1.0 if self._trained else self._share
        return places_of(share, len(caps), max(caps, default=1))

"""Which instances should sample for the evaluation under way, and which of them samples what. Pure: proposes only."""

from __future__ import annotations

from staleflow.pipeline.coordination.evaluations import Places, places_of
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import EVALUATION
from staleflow.stores.errors import ProtocolViolation


class EvaluationPinning:
    """Consulted by the coordinator whenever it routes. share: of the fleet's places, for as long as a run trains.
    While a host could be given nothing to train on, all of its places are the evaluation's."""

    def __init__(self, state: CoordinatorState, placement: RoutePlanner, share: float) -> None:
        self._state = state
        self._placement = placement
        self._share = share

    def due(self) -> list[Instance]:
        """Instances that should stay, or pull and stay, at the evaluated version from now on, besides those that do.
        Those that need not pull come first, then those with the least to interrupt."""
        evaluation, fleet = self._state.evaluation, self._state.fleet
        if evaluation is None or not self._state.queue.count(EVALUATION):
            return []
        published = self._state.ledger.version
        version = evaluation.evaluated if evaluation.evaluated >= 0 else published
        places = self._places
        wanted = places.hosts if self._trained else min(places.hosts, -(-evaluation.to_sample // places.of_each))
        # One that leaves samples nothing more; the trajectories on it are queued as soon as they have arrived.
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
        """Whether one of those that are due does not serve the evaluated version yet."""
        evaluation = self._state.evaluation
        return (
            evaluation is not None
            and instance.version != evaluation.evaluated
            and instance.version < self._state.ledger.version
        )

    def place(self, live: LiveTrajectory) -> Instance | str:
        """The host that samples a trajectory, where its context may be cached or the one with the least to sample; or
        why it has to wait."""
        evaluation, of_each = self._state.evaluation, self._places.of_each
        if evaluation is None:
            raise ProtocolViolation(f"{live.id} is queued for an evaluation that is not under way")
        if evaluation.evaluated >= 0 and not self._placement.demand(evaluation.evaluated):
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
        """Whether no instance serves the version of what is yet to be sampled, and none will."""
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
        """Whether the last step is trained: no instance has anything else to do."""
        return self._state.ledger.version >= self._state.ledger.num_steps

    @property
    def _places(self) -> Places:
        fleet = self._state.fleet
        caps = [instance.max_running for instance in fleet]
        share = 1.0 if self._trained else self._share
        return places_of(share, len(caps), max(caps, default=1))

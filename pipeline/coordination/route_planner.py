"""Finds an instance for queued work. The admission rule and the ledger decide under which versions it may be sampled,
the fleet which instances have room, and the routing rule which of these is chosen. Pure: proposes, and changes
nothing."""

from __future__ import annotations

from staleflow.pipeline.coordination.fleet import BoolArray, Instance
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.strategies.admission import Admission
from staleflow.pipeline.strategies.routing import CacheAffinity, Candidate, Routing
from staleflow.stores.trajectory import PolicyVersion


class RoutePlanner:
    """Finds an instance for each trajectory that the coordinator could route."""

    def __init__(
        self,
        state: CoordinatorState,
        admission: Admission,
        routing: Routing,
        affinity: CacheAffinity | None,
        forecast: LengthForecast,
    ) -> None:
        """affinity: None if no trajectory has a second turn, or cached contexts are ignored."""
        self._state = state
        self._admission = admission
        self._routing = routing
        self._affinity = affinity
        self._forecast = forecast

    def choose_instance(self, trajectory: LiveTrajectory) -> Instance | str:
        """Choose the instance for a trajectory, or return why it has to wait."""
        fleet, routing = self._state.fleet, self._routing
        min_version = self._min_version(trajectory)
        if min_version is None:
            may_start = self._admission.refusal(self._state.ledger, self._state.ledger.version) is None
            return "version too old" if may_start else "no place under the bound"
        fitting_mask = fleet.fitting_mask(trajectory.kv_tokens, min_version, self._typical_kv_tokens)
        target = fleet.get(trajectory.move_target)
        if target is not None and fitting_mask[target.index]:
            return target
        if not fitting_mask.any():
            return fleet.refusal_reason(min_version)
        candidate = Candidate(kv_tokens=trajectory.kv_tokens, continued=trajectory.tokens > 0)
        index = routing.choose(candidate, fleet, fitting_mask)
        if index is not None and not (0 <= index < len(fleet) and fitting_mask[index]):
            return "the routing rule chose an instance that does not fit"
        cached_instance = self._fitting_cached_instance(trajectory, fitting_mask)
        if cached_instance is not None and (
            index is None or self._prefers_cached(trajectory, cached_instance, fleet[index])
        ):
            return cached_instance
        if index is None:
            return "declined by the routing rule"
        return fleet[index]

    def can_receive_work(self, version: PolicyVersion) -> bool:
        """Whether an instance serving `version` could get a trajectory: a queued one, or one of a group that can be
        drawn."""
        is_queued = self._state.queue.num_continuable(version) > 0
        return is_queued or self._admission.refusal(self._state.ledger, version) is None

    def _fitting_cached_instance(self, trajectory: LiveTrajectory, fitting_mask: BoolArray) -> Instance | None:
        """The instance that may have a trajectory's context in its cache, if it has room for the trajectory."""
        cached_instance = self._state.fleet.get_if_context_valid(trajectory.cached_instance, trajectory.cached_version)
        return cached_instance if cached_instance is not None and fitting_mask[cached_instance.index] else None

    def _prefers_cached(
        self, trajectory: LiveTrajectory, cached_instance: Instance, preferred_instance: Instance
    ) -> bool:
        if self._affinity is None or cached_instance is preferred_instance:
            return cached_instance is preferred_instance
        remaining_tokens = self._forecast.sampled_token_share.expected_sampled_tokens(
            self._forecast.expected_remaining_tokens(trajectory.group, trajectory.tokens)
        )
        return self._affinity.prefers_cached(
            cached_instance.load, preferred_instance.load, trajectory.kv_tokens, remaining_tokens
        )

    def _min_version(self, trajectory: LiveTrajectory) -> int | None:
        """The oldest served version under which this trajectory may be sampled; None if there is none."""
        if trajectory.v_traj >= 0:
            return trajectory.v_traj
        ledger = self._state.ledger
        is_queued = not ledger.live_groups[trajectory.group].is_reserved
        # If an older version is accepted, so is a newer one. Few versions are served at a time.
        for version in self._state.fleet.distinct_versions():
            if is_queued:
                is_allowed = self._admission.refusal(ledger, version) is None
            else:
                is_allowed = ledger.can_reserve(trajectory.group, version)
            if is_allowed:
                return version
        return None

    @property
    def _typical_kv_tokens(self) -> float:
        """Mean KV tokens of a trajectory over the time it runs; 0 while there is no forecast."""
        has_forecast = self._forecast.has_enough_lengths
        return (
            self._state.running_means.prompt_tokens.value + self._forecast.mean_token_position if has_forecast else 0.0
        )

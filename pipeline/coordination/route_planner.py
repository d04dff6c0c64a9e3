"""Finds an instance for queued work. The admission rule and the ledger decide under which versions it may be sampled,
the fleet which instances have room, and the routing rule which of these is chosen. Pure: proposes, and changes
nothing."""

from __future__ import annotations

from staleflow.pipeline.coordination.fleet import BoolArray, Instance
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.strategies.admission import Admission
from staleflow.pipeline.strategies.affinity import CacheAffinity
from staleflow.pipeline.strategies.migration import Load
from staleflow.pipeline.strategies.routing import Candidate, Routing
from staleflow.stores.staleness.ledger_entries import EntryState
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

    def choose_instance(self, live: LiveTrajectory) -> Instance | str:
        """Choose the instance for a trajectory, or return why it has to wait."""
        fleet, routing = self._state.fleet, self._routing
        least_version = self._least_version(live)
        if least_version is None:
            possible = self._admission.refusal(self._state.ledger, self._state.ledger.version) is None
            return "version too old" if possible else "no place under the bound"
        fitting = fleet.fitting_mask(live.kv_tokens, least_version, self._typical_kv_tokens)
        target = fleet.get(live.target)
        if target is not None and fitting[target.row]:
            return target
        if not fitting.any():
            return fleet.refusal(live.kv_tokens, least_version)
        row = routing.choose(self.candidate(live), fleet, fitting)
        if row is not None and not (0 <= row < len(fleet) and fitting[row]):
            return "routing named an instance that does not fit"
        cached_on = self._cached_instance(live, fitting)
        if cached_on is not None and (row is None or self._prefers_cached(live, cached_on, fleet[row])):
            return cached_on
        if row is None:
            return "declined by the routing rule"
        return fleet[row]

    def candidate(self, live: LiveTrajectory) -> Candidate:
        """The view of a trajectory that routing rules receive."""
        return Candidate(kv_tokens=live.kv_tokens, continued=live.tokens > 0)

    def has_routable(self, version: PolicyVersion) -> bool:
        """Whether an instance serving `version` could get a trajectory: a queued one, or one of a group that can be
        drawn."""
        ledger, admission = self._state.ledger, self._admission
        if self._state.queue.num_reserved(version):
            return True
        can_draw = admission.num_reservable(ledger) > 0 and ledger.num_reservable(version) > 0
        return can_draw and admission.refusal(ledger, version) is None

    def _cached_instance(self, live: LiveTrajectory, fitting: BoolArray) -> Instance | None:
        """The instance that may have a trajectory's context in its cache, if it has room for the trajectory."""
        cached_on = self._state.fleet.with_cache(live.cached_on, live.cached_version)
        return cached_on if cached_on is not None and fitting[cached_on.row] else None

    def _prefers_cached(self, live: LiveTrajectory, cached_on: Instance, other: Instance) -> bool:
        if self._affinity is None or cached_on is other:
            return cached_on is other
        remaining = self._forecast.episodes.expected_sampled(self._forecast.expected_remaining(live.group, live.tokens))
        return self._affinity.prefers_cached(_load(cached_on), _load(other), live.kv_tokens, remaining)

    def _least_version(self, live: LiveTrajectory) -> int | None:
        """The oldest served version under which this trajectory may be sampled; None if there is none."""
        if live.v_traj >= 0:
            return live.v_traj
        ledger = self._state.ledger
        is_queued = ledger.entries[live.group].state is EntryState.QUEUED
        # If an older version is accepted, so is a newer one. Few versions are served at a time.
        for version in self._state.fleet.versions():
            if is_queued:
                allowed = self._admission.refusal(ledger, version) is None
            else:
                allowed = ledger.can_reserve(live.group, version)
            if allowed:
                return version
        return None

    @property
    def _typical_kv_tokens(self) -> float:
        """Mean KV tokens of a trajectory over the time it runs; 0 while there is no forecast."""
        known = self._forecast.has_enough_lengths
        return self._state.running_means.prompt_tokens.value + self._forecast.mean_position if known else 0.0


def _load(instance: Instance) -> Load:
    return Load(running=instance.num_running, kv_tokens=instance.kv_tokens)

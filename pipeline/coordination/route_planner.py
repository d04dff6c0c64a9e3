"""Where queued work could go. The admission rule and the ledger say under which versions it may be sampled, the fleet
which instances have room, the routing rule which of these takes it. Pure: proposes, and changes nothing."""

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
    """Consulted by the coordinator for each trajectory it could route."""

    def __init__(
        self,
        state: CoordinatorState,
        admission: Admission,
        routing: Routing,
        affinity: CacheAffinity | None,
        forecast: LengthForecast,
    ) -> None:
        """affinity: None where no trajectory has a second turn, or cached contexts are of no account."""
        self._state = state
        self._admission = admission
        self._routing = routing
        self._affinity = affinity
        self._forecast = forecast

    def choose_instance(self, live: LiveTrajectory) -> Instance | str:
        """The instance that takes a trajectory, or why it has to wait."""
        fleet, routing = self._state.fleet, self._routing
        least_version = self._least_version(live)
        if least_version is None:
            possible = self._admission.refusal(self._state.ledger, self._state.ledger.version) is None
            return "version too old" if possible else "no place under the bound"
        fitting = fleet.fitting(live.kv_tokens, least_version, self._typical_kv_tokens)
        target = fleet.get(live.target)
        if target is not None and fitting[target.row]:
            return target
        if not fitting.any():
            return fleet.refusal(live.kv_tokens, least_version)
        row = routing.choose(self.work(live), fleet, fitting)
        if row is not None and not (0 <= row < len(fleet) and fitting[row]):
            return "routing named an instance that does not fit"
        cached_on = self._cached_instance(live, fitting)
        if cached_on is not None and (row is None or self._stays(live, cached_on, fleet[row])):
            return cached_on
        if row is None:
            return "declined by the routing rule"
        return fleet[row]

    def work(self, live: LiveTrajectory) -> Candidate:
        """A trajectory, as routing may know it."""
        return Candidate(kv_tokens=live.kv_tokens, continued=live.tokens > 0)

    def has_routable(self, version: PolicyVersion) -> bool:
        """Whether a trajectory could be routed to an instance serving `version`, queued or still to be drawn."""
        ledger, admission = self._state.ledger, self._admission
        if self._state.queue.num_reserved(version):
            return True
        can_draw = admission.num_reservable(ledger) > 0 and ledger.num_reservable(version) > 0
        return can_draw and admission.refusal(ledger, version) is None

    def _cached_instance(self, live: LiveTrajectory, fitting: BoolArray) -> Instance | None:
        """The instance that may hold a trajectory's context in its cache, if it fits there."""
        cached_on = self._state.fleet.with_cache(live.cached_on, live.cached_version)
        return cached_on if cached_on is not None and fitting[cached_on.row] else None

    def _stays(self, live: LiveTrajectory, cached_on: Instance, other: Instance) -> bool:
        if self._affinity is None or cached_on is other:
            return cached_on is other
        remaining = self._forecast.episodes.expected_sampled(self._forecast.expected_remaining(live.group, live.tokens))
        return self._affinity.stays(_load(cached_on), _load(other), live.kv_tokens, remaining)

    def _least_version(self, live: LiveTrajectory) -> int | None:
        """The oldest version in service that an instance may have for this trajectory; None if no version would do."""
        if live.v_traj >= 0:
            return live.v_traj
        ledger = self._state.ledger
        fresh = ledger.entries[live.group].state is EntryState.QUEUED
        # Newer versions are never refused more than older ones, and few are served at a time.
        for version in self._state.fleet.versions():
            if fresh:
                allowed = self._admission.refusal(ledger, version) is None
            else:
                allowed = ledger.can_reserve(live.group, version)
            if allowed:
                return version
        return None

    @property
    def _typical_kv_tokens(self) -> float:
        """Mean KV tokens of a trajectory over the time it runs; 0 while nothing is known."""
        known = self._forecast.has_enough_lengths
        return self._state.measured.prompt_tokens.value + self._forecast.mean_position if known else 0.0


def _load(instance: Instance) -> Load:
    return Load(running=instance.num_running, kv_tokens=instance.kv_tokens)

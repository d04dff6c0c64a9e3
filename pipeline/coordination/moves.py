"""Proposes, once per tick, which running trajectories to move to another instance or to truncate. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.strategies.filtering import StragglerRule
from staleflow.pipeline.strategies.migration import Load, Migration, Movable
from staleflow.tasks.emulation.cost_model import StepCosts

MAX_SOURCE_SHARE = 0.125
"""Largest share of the instances that may be sources of migrations in one tick, since each move changes the loads that
the next ones are chosen by."""


@dataclass(frozen=True, slots=True)
class Move:
    """Take a trajectory off `source`. target: the instance on which it continues; None to score it with the tokens it
    has."""

    live: LiveTrajectory
    source: Instance
    target: Instance | None
    why: str


class MovePlanner:
    """Applies the migration and straggler rules to the coordinator's state, read-only. The coordinator executes the
    moves."""

    def __init__(
        self,
        state: CoordinatorState,
        migration: Migration,
        stragglers: StragglerRule,
        forecast: LengthForecast,
        costs: StepCosts,
    ) -> None:
        self._state = state
        self._migration = migration
        self._stragglers = stragglers
        self._forecast = forecast
        self._costs = costs

    def plan_migrations(self) -> list[Move]:
        """Plan moves of single trajectories from the slowest instances to the fastest ones, where the rule expects a
        gain."""
        fleet, rule, ledger = self._state.fleet, self._migration, self._state.ledger
        if len(fleet) < 2 or not rule.active:
            return []
        order = self._by_speed()
        moves: list[Move] = []
        for i in range(min(len(fleet) // 2, max(1, int(len(fleet) * MAX_SOURCE_SHARE)))):
            source, target = order[-1 - i], order[i]
            source_load = Load(running=source.num_running, kv_tokens=source.kv_tokens)
            target_load = Load(running=target.num_running, kv_tokens=target.kv_tokens)
            if not rule.worthwhile(source_load, target_load):
                break  # the pairs that follow differ less
            free_slots = target.max_running - target.num_running
            if source.pulling or target.pulling or source.in_transit or target.in_transit or free_slots <= 0:
                continue  # what is on its way is not in these loads yet
            movable = self._movable(source, target)
            views = [
                Movable(
                    kv_tokens=live.kv_tokens,
                    remaining_tokens=self._forecast.episodes.expected_sampled(
                        self._forecast.expected_remaining(live.group, live.tokens)
                    ),
                    deadline=ledger.deadline(ledger.entries[live.group].version),
                )
                for live in movable
            ]
            free_kv = target.kv_capacity - target.kv_tokens
            for j in rule.moves(source_load, target_load, views, free_slots):
                if (live := movable[j]).kv_tokens <= free_kv:  # with those that move there before it
                    free_kv -= live.kv_tokens
                    moves.append(Move(live, source, target, f"moves to {target.instance}"))
        return moves

    def plan_truncations(self) -> Iterator[Move]:
        """Plan to truncate the last trajectories of unfinished groups that the next step needs, once the trainer has
        waited too long for them."""
        rule, state = self._stragglers, self._state
        if not rule.waited_too_long(waited_s=state.waited_s, interval_s=state.running_means.interval_s.value):
            return
        ledger = state.ledger
        due = [live for live in state.live.values() if self._is_due(live)]
        per_step = ledger.groups_per_step * ledger.group_size
        if not rule.may_truncate(
            sum(not live.truncating for live in due),
            per_step=per_step,
            truncated_in_step=state.truncations.in_step,
            trained=state.truncations.trained,
            truncated=state.truncations.truncated,
        ):
            return
        for live in due:
            source = self._state.fleet.get(live.instance)
            if live.phase is Phase.RUNNING and source is not None and self._may_leave(live) and live.tokens > 0:
                yield Move(live, source, None, "straggles: cut off")

    def _is_due(self, live: LiveTrajectory) -> bool:
        """Whether the next step waits for this trajectory to be sampled."""
        if live.is_eval:
            return False
        ledger = self._state.ledger
        unfinished = live.phase in {Phase.QUEUED, Phase.RUNNING, Phase.IN_ENVIRONMENT}
        version = ledger.entries[live.group].version
        return unfinished and version >= 0 and ledger.deadline(version) <= ledger.next_step

    def _movable(self, source: Instance, target: Instance) -> list[LiveTrajectory]:
        """Trajectories on `source` that may continue on `target`."""
        return [
            live
            for member in source.trajectories
            if self._may_leave(live := self._state.live[member])
            and live.v_traj <= target.version
            and target.kv_tokens + live.kv_tokens <= target.kv_capacity
        ]

    def _may_leave(self, live: LiveTrajectory) -> bool:
        """At most once per version and never in transit: otherwise it could be moved for ever and never finish."""
        return not live.leaving and not live.is_eval and live.moved_at != self._state.ledger.version

    def _by_speed(self) -> list[Instance]:
        """Instances by the seconds of their decode step, fastest first."""
        fleet = self._state.fleet
        rows = self._costs.steps_s(fleet.running, fleet.kv_tokens).argsort(kind="stable")
        return [fleet[int(row)] for row in rows]

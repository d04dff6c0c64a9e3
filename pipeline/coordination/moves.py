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
from staleflow.pipeline.strategies.migration import Migration, MovableTrajectory
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.cost_model import CostModel

MAX_SOURCE_SHARE = 0.125
"""Largest share of the instances that may be sources of migrations in one tick, since each move changes the loads that
the next ones are chosen by."""


@dataclass(frozen=True, slots=True)
class Move:
    """A proposal to take a trajectory off `source`. target: the instance on which it continues; None to score it with
    the tokens it has."""

    trajectory: LiveTrajectory
    source: Instance
    target: Instance | None
    note: str
    """Line for the decision log."""


class MovePlanner:
    """Applies the migration and straggler rules to the coordinator's state, read-only. The coordinator executes the
    moves."""

    def __init__(
        self,
        state: CoordinatorState,
        migration: Migration,
        stragglers: StragglerRule,
        forecast: LengthForecast,
        step_costs: CostModel,
    ) -> None:
        self._state = state
        self._migration = migration
        self._stragglers = stragglers
        self._forecast = forecast
        self._step_costs = step_costs

    def plan_migrations(self) -> list[Move]:
        """Plan moves of single trajectories from the slowest instances to the fastest ones, where the rule expects a
        gain."""
        fleet, rule, ledger = self._state.fleet, self._migration, self._state.ledger
        if len(fleet) < 2 or not rule.moves_anything:
            return []
        instances = self._sort_by_speed()
        moves: list[Move] = []
        for i in range(max(1, int(len(fleet) * MAX_SOURCE_SHARE))):
            source, target = instances[-1 - i], instances[i]
            if not rule.may_gain(source.load, target.load):
                break  # the speeds of later pairs differ less
            free_slots = target.max_running - target.num_running
            if source.is_pulling or target.is_pulling or source.num_moves or target.num_moves or free_slots <= 0:
                continue  # trajectories that are moving are not in these loads yet
            trajectories = self._movable_trajectories(source, target)
            movable = [
                MovableTrajectory(
                    kv_tokens=trajectory.kv_tokens,
                    remaining_tokens=self._forecast.sampled_token_share.expected_sampled_tokens(
                        self._forecast.expected_remaining_tokens(trajectory.group, trajectory.tokens)
                    ),
                    deadline=ledger.deadline(ledger.live_groups[trajectory.group].version),
                )
                for trajectory in trajectories
            ]
            free_kv_tokens = target.kv_capacity - target.kv_tokens
            for j in rule.choose_moves(source.load, target.load, movable, free_slots):
                if (trajectory := trajectories[j]).kv_tokens <= free_kv_tokens:  # after the moves before it
                    free_kv_tokens -= trajectory.kv_tokens
                    moves.append(Move(trajectory, source, target, f"moves to {target.id}"))
        return moves

    def plan_truncations(self) -> Iterator[Move]:
        """Plan to truncate the last trajectories of unfinished groups that the next step needs, once the trainer has
        waited too long for them."""
        rule, state = self._stragglers, self._state
        if not rule.waited_too_long(
            trainer_waited_s=state.trainer_waited_s, step_interval_s=state.running_means.publish_interval_s.value
        ):
            return
        ledger = state.ledger
        due_trajectories = self._due_trajectories()
        num_per_step = ledger.groups_per_step * ledger.group_size
        num_truncated = sum(  # in num_truncated_in_step already
            trajectory.is_being_truncated
            or (trajectory.phase is Phase.IN_ENVIRONMENT and trajectory.is_last_turn_truncated)
            for trajectory in due_trajectories
        )
        if not rule.may_truncate(
            len(due_trajectories) - num_truncated,
            num_per_step=num_per_step,
            num_truncated_in_step=state.truncations.num_truncated_in_step,
            num_trained=state.truncations.num_trained,
            num_truncated=state.truncations.num_truncated,
        ):
            return
        for trajectory in due_trajectories:
            source = self._state.fleet.get(trajectory.instance)
            if (
                trajectory.phase is Phase.RUNNING
                and source is not None
                and not trajectory.is_leaving
                and trajectory.tokens > trajectory.turn_start_tokens
            ):
                yield Move(trajectory, source, None, "straggler: truncated")

    def _due_trajectories(self) -> list[LiveTrajectory]:
        """The trajectories that the next step waits for. Of a group with redundant members these are as many as it
        needs, those with the most tokens."""
        ledger = self._state.ledger
        unfinished_by_group: dict[GroupId, list[LiveTrajectory]] = {}
        for trajectory in self._state.live_trajectories.values():
            if self._is_due(trajectory):
                unfinished_by_group.setdefault(trajectory.group, []).append(trajectory)
        due_trajectories: list[LiveTrajectory] = []
        for group, unfinished in unfinished_by_group.items():
            entry = ledger.live_groups[group]
            num_finished = len(entry.completed) + len(entry.unfinished) - len(unfinished)
            unfinished.sort(key=lambda trajectory: (not trajectory.is_being_truncated, -trajectory.tokens))
            # More members than the group needs may be finished, if their rewards are not all there.
            due_trajectories += unfinished[: max(0, ledger.group_size - num_finished)]
        return due_trajectories

    def _is_due(self, trajectory: LiveTrajectory) -> bool:
        """Whether the next step may wait for this trajectory to be sampled."""
        if trajectory.is_evaluation:
            return False
        ledger = self._state.ledger
        is_unfinished = trajectory.phase in {Phase.QUEUED, Phase.RUNNING, Phase.IN_ENVIRONMENT}
        version = ledger.live_groups[trajectory.group].version
        return is_unfinished and version >= 0 and ledger.deadline(version) <= ledger.next_step

    def _movable_trajectories(self, source: Instance, target: Instance) -> list[LiveTrajectory]:
        """Trajectories on `source` that may continue on `target`."""
        return [
            trajectory
            for member in source.trajectories
            if self._may_move(trajectory := self._state.live_trajectories[member])
            and trajectory.v_traj <= target.version
            and target.kv_tokens + trajectory.kv_tokens <= target.kv_capacity
        ]

    def _may_move(self, trajectory: LiveTrajectory) -> bool:
        """Whether a trajectory may be moved: at most once per version, so that it cannot move forever without
        finishing."""
        return (
            not trajectory.is_leaving
            and not trajectory.is_evaluation
            and trajectory.moved_at_version != self._state.ledger.version
        )

    def _sort_by_speed(self) -> list[Instance]:
        """Instances by the seconds of their decode step, fastest first."""
        fleet = self._state.fleet
        indices = self._step_costs.step_s_by_instance(fleet.running, fleet.kv_tokens).argsort(kind="stable")
        return [fleet[int(index)] for index in indices]

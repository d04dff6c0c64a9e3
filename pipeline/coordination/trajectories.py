"""Trajectories in flight, whose state only state.py changes, and those that have just ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.coordination.phases import Phase
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId, is_evaluation


@dataclass(slots=True)
class LiveTrajectory:
    """A trajectory that has started and not ended."""

    id: TrajectoryId
    group: GroupId
    prompt_tokens: int
    phase: Phase = Phase.QUEUED
    queue_level: int = 0
    """Level of the work queue it waits in, while it is queued."""
    v_traj: PolicyVersion = PolicyVersion(-1)
    """Oldest version it may hold tokens of; -1 before it is first routed."""
    instance: InstanceId | None = None
    """The instance on which it runs; None in all other phases."""
    route_number: int = 0
    """Number of times it was routed."""
    tokens: int = 0
    """Length of its response so far, with observations, as last reported."""
    delivered_tokens: int = 0
    """Tokens that the trajectory server is known to have: they survive the loss of the instance."""
    turn_start_tokens: int = 0
    """Number of tokens it had when its latest turn began, or when the run was resumed."""
    num_failures: int = 0
    """Number of engine failures, lost instances and environment failures so far."""
    num_turns: int = 0
    """Number of turns that were sent to its environment since its episode began."""
    observation_tokens: int = 0
    """Number of its tokens that are observations of its environment."""
    cached_instance: InstanceId | None = None
    """The instance that sampled its latest turn and may have its context cached; None while it runs."""
    cached_version: PolicyVersion = PolicyVersion(-1)
    """The version that `cached_instance` served then. After a pull the cache is lost, unless an instance serves many
    versions."""
    reward: float | None = None
    """None if it is not scored, or could not be."""
    phase_since_s: float = 0.0
    """Time at which the current phase began, in seconds."""
    move_target: InstanceId | None = None
    """The instance to which it is moving, from the Interrupt until it is routed or sampled; else None."""
    moved_at_version: int = -1
    """The published version when it was last moved or truncated, which happens at most once per version; -1: never."""
    is_being_truncated: bool = False
    """Whether it was interrupted to be scored with the tokens it has."""
    is_last_turn_truncated: bool = False
    """Whether its latest turn was truncated, so that forecasts must not learn from its length."""
    refusal: str = ""
    """The latest reason why it was not routed; empty once it is routed."""

    @property
    def kv_tokens(self) -> int:
        """KV tokens that it needs on an instance: prompt and response so far."""
        return self.prompt_tokens + self.tokens

    @property
    def is_evaluation(self) -> bool:
        """Whether it belongs to an evaluation; such trajectories are never trained on."""
        return is_evaluation(self.id)

    @property
    def is_leaving(self) -> bool:
        """Whether it was interrupted to leave its instance."""
        return self.is_being_truncated or self.move_target is not None


def restore_members(group: GroupInFlight, sampled_phase: Phase, now: float) -> list[LiveTrajectory]:
    """Restore the members of a stored run's group. sampled_phase: phase of members whose turn has ended."""
    return [
        LiveTrajectory(
            id=member.trajectory,
            group=group.group,
            prompt_tokens=group.prompt_tokens,
            phase=Phase.DONE if member.scored else sampled_phase if member.sampled else Phase.QUEUED,
            v_traj=member.version,
            route_number=1 if member.version >= 0 else 0,
            tokens=member.tokens,
            delivered_tokens=member.tokens,
            turn_start_tokens=member.tokens,
            reward=member.reward,
            observation_tokens=member.given_tokens,
            phase_since_s=now,
        )
        for member in group.members
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedTrajectory:
    """A trajectory that has just ended without being trained on.

    Args:
        running_instance: The instance that must stop it.
        cached_instance: The instance that may have its context cached.
        has_open_environment: Whether its environment must be closed.
    """

    ending: Ending
    v_traj: PolicyVersion
    running_instance: InstanceId | None
    cached_instance: InstanceId | None
    has_open_environment: bool

"""The coordinator's knowledge of a trajectory in flight. Changed by `state` only. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.coordination.phases import Phase
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId, is_evaluation


@dataclass(slots=True)
class LiveTrajectory:
    """A trajectory that has started and not ended."""

    id: TrajectoryId
    group: GroupId
    prompt_tokens: int
    phase: Phase = Phase.QUEUED
    level: int = 0
    """Level of the work queue it waits in, while it is queued."""
    v_traj: PolicyVersion = PolicyVersion(-1)
    """Oldest version it may hold tokens of; -1 before it is first routed."""
    instance: InstanceId | None = None
    """Where it runs; None in every other phase."""
    route_number: int = 0
    """Times it was routed."""
    tokens: int = 0
    """Sampled tokens, as last reported."""
    delivered_tokens: int = 0
    """Of these, the ones the trajectory server is known to hold: they survive the loss of the instance."""
    attempts: int = 0
    """Engine failures, lost instances and failures of its environment so far."""
    turns: int = 0
    """Turns that its environment was asked to answer, since its episode began."""
    given_tokens: int = 0
    """Of its tokens, those that its environment gave."""
    cached_on: InstanceId | None = None
    """Where its latest turn was sampled, until the next one is: what it has so far may be cached there."""
    cached_version: PolicyVersion = PolicyVersion(-1)
    """The version that `cached_on` served then; under another, nothing is cached, unless it serves them side by
    side."""
    reward: float | None = None
    """None until it is scored, and for good if it could not be."""
    since: float = 0.0
    """When the present phase began, seconds."""
    target: InstanceId | None = None
    """The instance it is being moved to, from the Interrupt until it is routed or sampled."""
    moved_at: int = -1
    """The published version when it was last interrupted: that is done at most once per version."""
    truncating: bool = False
    """An Interrupt is on its way, after which it is scored with the tokens it has."""
    truncated: bool = False
    """Its latest turn was truncated: forecasts must not learn its length."""
    refused: str = ""
    """Why it was last left in the queue; empty once it is routed."""

    @property
    def kv_tokens(self) -> int:
        """KV tokens that it needs on an instance: prompt and response so far."""
        return self.prompt_tokens + self.tokens

    @property
    def is_eval(self) -> bool:
        """Whether it belongs to an evaluation, and so never to a batch."""
        return is_evaluation(self.id)

    @property
    def leaving(self) -> bool:
        """Whether it is being taken off its instance: an Interrupt was sent."""
        return self.truncating or self.target is not None


def restored_members(stored: GroupInFlight, sampled: Phase, now: float) -> list[LiveTrajectory]:
    """The members of a stored run's group in their last state. sampled: phase of members whose turn has ended."""
    return [
        LiveTrajectory(
            id=member.trajectory,
            group=stored.group,
            prompt_tokens=stored.prompt_tokens,
            phase=Phase.DONE if member.scored else sampled if member.sampled else Phase.QUEUED,
            v_traj=member.version,
            route_number=1 if member.version >= 0 else 0,
            tokens=member.tokens,
            delivered_tokens=member.tokens,
            reward=member.reward,
            given_tokens=member.given_tokens,
            since=now,
        )
        for member in stored.members
    ]

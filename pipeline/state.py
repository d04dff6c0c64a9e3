"""What the coordinator believes: its speculative state of trajectories and instances. Pure, mutated only by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    SCORING = "scoring"
    DONE = "done"


@dataclass(slots=True)
class LiveTrajectory:
    """What the coordinator knows of a trajectory in flight."""

    id: TrajectoryId
    group: GroupId
    prompt_tokens: int
    phase: Phase = Phase.QUEUED
    v_traj: PolicyVersion = PolicyVersion(-1)
    instance: InstanceId | None = None
    epoch: int = 0
    tokens: int = 0
    """Sampled tokens, as last heard."""
    safe_tokens: int = 0
    """Of these, the ones the trajectory server holds: what survives the instance."""
    attempts: int = 0
    reward: float | None = None
    """None until it is scored, and for good if it could not be."""
    since: float = 0.0
    """When the present phase began."""

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.tokens


@dataclass(slots=True)
class Instance:
    """Speculative state of one rollout instance."""

    instance: InstanceId
    version: PolicyVersion
    """What it serves, or will serve once the pulls already ordered are done."""
    kv_capacity: int
    max_running: int
    pulling: bool = False
    kv_tokens: int = 0
    trajectories: dict[TrajectoryId, None] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self.trajectories)

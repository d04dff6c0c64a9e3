"""What the coordinator believes of a trajectory in flight. Pure, changed only by it."""

from __future__ import annotations

from dataclasses import dataclass
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
    level: int = 0
    """Where it stands in the waiting line, while it is queued."""
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
    forecast: float = 0.0
    """Tokens expected of it when it was first routed."""
    target: InstanceId | None = None
    """Where it is to go on, while it is being taken off its instance."""
    moved_at: int = -1
    """The published version when it was last interrupted: it is moved once a version at most."""
    cut: bool = False
    """It is being taken off its instance to be scored as it is."""
    refused: str = ""
    """Why it was last left in the queue."""

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.tokens

    @property
    def leaving(self) -> bool:
        """An Interrupt is on its way to it."""
        return self.cut or self.target is not None

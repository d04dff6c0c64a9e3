"""Live groups in the staleness ledger, and results of its operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId


class GroupState(Enum):
    """The state of a live group."""

    QUEUED = auto()
    """Started, no member routed yet: has no reservation."""
    RESERVED = auto()
    """At least one member was routed: has a reservation."""
    OCCUPIED = auto()
    """Complete and accepted by the filters: waiting to be trained on."""


@dataclass(slots=True)
class LiveGroup:
    """A live group in the ledger. `version`: minimum over its routed members; -1 before the first."""

    group: GroupId
    unfinished: set[TrajectoryId]
    """Members neither completed nor aborted."""
    completed: list[TrajectoryId] = field(default_factory=list)
    state: GroupState = GroupState.QUEUED
    version: PolicyVersion = PolicyVersion(-1)
    member_versions: dict[TrajectoryId, PolicyVersion] = field(default_factory=dict)
    """v_traj of each routed member; once the group is occupied, of those that are trained on, in their order."""

    @property
    def members(self) -> tuple[TrajectoryId, ...]:
        return (*self.completed, *sorted(self.unfinished))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a trajectory, as decided by the ledger. There is exactly one for every started trajectory."""

    trajectory: TrajectoryId
    group: GroupId
    fate: Fate
    reason: AbortReason
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The groups that one training step consumed, and the trajectories that it leaves without a step."""

    step: int
    groups: tuple[GroupId, ...]
    members: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    """v_traj, one per member."""
    surplus: tuple[Ending, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """Numbers of groups in one staleness buffer, by version. For display only."""

    step: int
    reserved: dict[int, int]
    occupied: dict[int, int]
    capacity: int

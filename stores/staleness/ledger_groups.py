"""Live groups in the staleness ledger, and results of its operations."""

from __future__ import annotations

from dataclasses import dataclass, field

from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId

FinishedMembers = tuple[tuple[TrajectoryId, ...], tuple[PolicyVersion, ...]]
"""The members of a finished group that are trained on, in the order of their ids, and the v_traj of each. Tuples, since
a step that takes 8,192 groups reads all of them in one call."""


@dataclass(slots=True)
class LiveGroup:
    """A group in the ledger that has started and is not finished. It has a reservation from the time at which its first
    member is routed. `version`: minimum over its routed members; -1 before the first."""

    group: GroupId
    unfinished: set[TrajectoryId]
    """Members neither completed nor aborted."""
    completed: list[TrajectoryId] = field(default_factory=list)
    version: PolicyVersion = PolicyVersion(-1)
    member_versions: dict[TrajectoryId, PolicyVersion] = field(default_factory=dict)
    """v_traj of each routed member."""

    @property
    def is_reserved(self) -> bool:
        """Whether it has reserved an entry."""
        return self.version >= 0

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

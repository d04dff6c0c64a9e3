"""What the staleness ledger keeps of a live group, and what its operations report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId


class EntryState(Enum):
    """The state of a live group."""

    QUEUED = auto()
    """Started, no member routed yet: has no reservation."""
    RESERVED = auto()
    """At least one member was routed: has a reservation."""
    OCCUPIED = auto()
    """Complete and accepted by the filters: waiting to be trained on."""


@dataclass(slots=True)
class Entry:
    """One live group's record in the ledger. `version` is the minimum over its routed members; -1 before the first."""

    group: GroupId
    waiting: set[TrajectoryId]
    """Members neither completed nor aborted."""
    completed: list[TrajectoryId] = field(default_factory=list)
    state: EntryState = EntryState.QUEUED
    version: PolicyVersion = PolicyVersion(-1)
    routed: set[TrajectoryId] = field(default_factory=set)

    @property
    def members(self) -> tuple[TrajectoryId, ...]:
        return (*self.completed, *sorted(self.waiting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A trajectory's end, as decided by the ledger. Exactly one is reported for every trajectory ever started."""

    trajectory: TrajectoryId
    group: GroupId
    fate: Fate
    reason: AbortReason
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The groups that one training step consumed, and the trajectories that ended because of it."""

    step: int
    groups: tuple[GroupId, ...]
    members: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]  # one per group
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """Numbers of groups in one staleness buffer, by version. Derived, for display only."""

    step: int
    reserved: dict[int, int]
    occupied: dict[int, int]
    capacity: int

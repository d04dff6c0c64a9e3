"""What the state tells of trajectories that have just left it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedTrajectory:
    """A trajectory that has just ended without being trained on. running_on: the instance that must stop it. cached_on:
    the instance that may keep its context. environment_open: its environment must be closed."""

    ending: Ending
    v_traj: PolicyVersion
    route_number: int
    running_on: InstanceId | None
    cached_on: InstanceId | None
    environment_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A batch that a training step has just taken. versions: v_traj, one per member. surplus: what ended by that."""

    step: int
    groups: tuple[GroupId, ...]
    members: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    surplus: tuple[DiscardedTrajectory, ...]

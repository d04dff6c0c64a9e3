"""What the state returns about trajectories that have just left it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedTrajectory:
    """A trajectory that has just ended without being trained on.

    Args:
        running_on: The instance that must stop it.
        cached_on: The instance that may have its context cached.
        environment_open: Whether its environment must be closed.
    """

    ending: Ending
    v_traj: PolicyVersion
    route_number: int
    running_on: InstanceId | None
    cached_on: InstanceId | None
    environment_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A batch that a training step has just consumed. versions: v_traj of each member. surplus: trajectories that ended
    because of it."""

    step: int
    groups: tuple[GroupId, ...]
    members: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    surplus: tuple[DiscardedTrajectory, ...]

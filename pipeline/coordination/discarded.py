"""Trajectories that have just left the coordinator's state: discarded ones, and the batch of a training step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedTrajectory:
    """A trajectory that has just ended without being trained on.

    Args:
        running_instance: The instance that must stop it.
        cached_instance: The instance that may have its context cached.
        environment_open: Whether its environment must be closed.
    """

    ending: Ending
    v_traj: PolicyVersion
    route_number: int
    running_instance: InstanceId | None
    cached_instance: InstanceId | None
    environment_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The batch that a training step has just consumed. versions: v_traj of each member. surplus: trajectories that
    were discarded because the batch is complete without them."""

    step: int
    groups: tuple[GroupId, ...]
    members: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    surplus: tuple[DiscardedTrajectory, ...]

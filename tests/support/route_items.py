"""Routings of trajectories, as a rollout instance and the trajectory server receive them."""

from __future__ import annotations

from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.tasks.actors.server_messages import RouteItem


def route_item(trajectory: int, route_number: int = 1, version: int = 0) -> RouteItem:
    """A routing of a trajectory to an instance that serves at least a version."""
    return RouteItem(trajectory=TrajectoryId(trajectory), route_number=route_number, version=PolicyVersion(version))

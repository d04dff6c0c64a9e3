"""Route items as received by rollout instances and the trajectory server."""

from __future__ import annotations

from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.tasks.actors.server_messages import RouteItem


def route_item(trajectory: int, route_number: int = 1, version: int = 0) -> RouteItem:
    """Return the route of a trajectory to an instance that serves at least a version."""
    return RouteItem(trajectory=TrajectoryId(trajectory), route_number=route_number, version=PolicyVersion(version))

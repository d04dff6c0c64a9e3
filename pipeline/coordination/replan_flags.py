"""Flags of decisions that must be reconsidered because the state has changed. Pure."""

from __future__ import annotations

from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.stores.trajectory import InstanceId


class ReplanFlags:
    """Flags that the state sets when it changes. Reading a flag clears it."""

    def __init__(self, fleet: Fleet) -> None:
        self._instances = fleet
        self._batch_changed = self._room_changed = self._routing_changed = self._all_loads_changed = False
        self._loads_changed: dict[InstanceId, Instance] = {}

    def pop_batch_changed(self) -> bool:
        """Whether a batch may have become ready since the previous call."""
        changed, self._batch_changed = self._batch_changed, False
        return changed

    def pop_loads_changed(self) -> list[Instance]:
        """Instances that may have become worth a pull since the previous call."""
        changed = list(self._instances if self._all_loads_changed else self._loads_changed.values())
        self._loads_changed, self._all_loads_changed = {}, False
        return changed

    def pop_room_changed(self) -> bool:
        """Whether there may be room for more groups than at the previous call."""
        changed, self._room_changed = self._room_changed, False
        return changed

    def pop_routing_changed(self) -> bool:
        """Whether queued trajectories may find an instance that found none at the previous call."""
        changed, self._routing_changed = self._routing_changed, False
        return changed

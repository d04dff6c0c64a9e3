"""Flags of decisions that must be reconsidered because the state has changed. Pure."""

from __future__ import annotations

from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.stores.trajectory import InstanceId


class ReplanFlags:
    """The flags. The state sets them when it changes; reading one clears it."""

    def __init__(self, fleet: Fleet) -> None:
        self._of_fleet = fleet
        self._batch_changed = self._room_changed = self._routing_changed = self._all_loads_changed = False
        self._loads_changed: dict[InstanceId, Instance] = {}

    def pop_batch_changed(self) -> bool:
        """Whether a batch may have become ready since this was last asked."""
        changed, self._batch_changed = self._batch_changed, False
        return changed

    def pop_load_changes(self) -> list[Instance]:
        """Instances for which a pull may have become worth it since this was last asked."""
        changed = list(self._of_fleet if self._all_loads_changed else self._loads_changed.values())
        self._loads_changed, self._all_loads_changed = {}, False
        return changed

    def pop_room_changed(self) -> bool:
        """Whether there may be room for more groups than when this was last asked."""
        changed, self._room_changed = self._room_changed, False
        return changed

    def pop_routing_changed(self) -> bool:
        """Whether queued work may find an instance that found none when this was last asked."""
        changed, self._routing_changed = self._routing_changed, False
        return changed

"""What the coordinator believes of its rollout instances. Pure, changed only by the coordinator.

The numbers that a choice compares stand in arrays, one row an instance, so that choosing among a thousand instances
takes microseconds. `Instance` is the handle of a row and holds what only one instance at a time is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stores.trajectory import InstanceId, PolicyVersion, TrajectoryId

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Instance:
    """Speculative state of one rollout instance."""

    instance: InstanceId
    version: PolicyVersion
    """What it serves, or will serve once the pulls already ordered are done."""
    kv_capacity: int
    max_running: int
    row: int
    pulling: bool = False
    in_transit: int = 0
    """Trajectories that are on their way to it or from it, ordered but not yet heard of."""
    kv_tokens: int = 0
    trajectories: dict[TrajectoryId, None] = field(default_factory=dict)
    pace_s: float = math.inf
    """Seconds per token that its most urgent trajectory needs to be in time; infinite if none is in a hurry."""

    @property
    def num_running(self) -> int:
        return len(self.trajectories)


class Fleet:
    """All instances; the arrays have one element an instance, in `instances` order until one is lost."""

    def __init__(self) -> None:
        self._by_id: dict[InstanceId, Instance] = {}
        self._rows: list[Instance] = []
        self._numbers = np.zeros((6, 8))
        self._versions: list[PolicyVersion] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._rows)

    def __getitem__(self, row: int) -> Instance:
        return self._rows[row]

    def get(self, instance: InstanceId | None) -> Instance | None:
        return self._by_id.get(instance) if instance is not None else None

    @property
    def running(self) -> npt.NDArray[np.float64]:
        return self._numbers[0, : len(self._rows)]

    @property
    def kv_tokens(self) -> npt.NDArray[np.float64]:
        return self._numbers[1, : len(self._rows)]

    @property
    def pace_s(self) -> npt.NDArray[np.float64]:
        return self._numbers[2, : len(self._rows)]

    @property
    def version(self) -> npt.NDArray[np.float64]:
        return self._numbers[3, : len(self._rows)]

    def versions(self) -> list[PolicyVersion]:
        """The versions in service, oldest first."""
        if self._versions is None:
            self._versions = [PolicyVersion(v) for v in sorted({i.version for i in self._rows})]
        return self._versions

    def join(self, instance: InstanceId, version: PolicyVersion, kv_capacity: int, max_running: int) -> Instance:
        """Add an instance that runs nothing."""
        if len(self._rows) == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        one = Instance(
            instance=instance, version=version, kv_capacity=kv_capacity, max_running=max_running, row=len(self._rows)
        )
        self._rows.append(one)
        self._by_id[instance] = one
        self._versions = None
        self._numbers[4:, one.row] = kv_capacity, max_running
        self.touch(one)
        return one

    def lose(self, instance: InstanceId) -> Instance | None:
        """Remove an instance; the last row moves into its place. None if it is unknown."""
        lost = self._by_id.pop(instance, None)
        if lost is not None:
            self._versions = None
            last = self._rows.pop()
            if last is not lost:
                self._numbers[:, lost.row] = self._numbers[:, last.row]
                last.row = lost.row
                self._rows[lost.row] = last
        return lost

    def touch(self, instance: Instance) -> None:
        """Carry an instance's present numbers into the arrays: after every change to it."""
        if self._numbers[3, instance.row] != instance.version:
            self._versions = None
        self._numbers[:4, instance.row] = (
            len(instance.trajectories), instance.kv_tokens, instance.pace_s, instance.version,
        )  # fmt: skip

    def fitting(self, kv_tokens: int, least_version: int, typical_kv_tokens: float = 0.0) -> BoolArray:
        """Which instances serve at least this version and have room for a trajectory of this size, also once those they
        run have grown to what is typical (else some would be preempted). An empty instance has room for anything."""
        count = len(self._rows)
        running, held, _, version, capacity, cap = self._numbers[:, :count]
        needed = np.maximum(held + kv_tokens, (running + 1) * typical_kv_tokens)
        fits: BoolArray = (version >= least_version) & (running < cap) & ((needed <= capacity) | (running == 0))
        return fits

    def refusal(self, kv_tokens: int, least_version: int) -> str:
        """Why no instance fits, in the words of the first reason that holds for all that are left."""
        count = len(self._rows)
        if not count:
            return "no instance"
        running, _, _, version, _, cap = self._numbers[:, :count]
        recent = version >= least_version
        if not recent.any():
            return "version too old"
        if not (recent & (running < cap)).any():
            return "concurrency cap"
        return "KV memory"

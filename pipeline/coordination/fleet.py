"""The coordinator's knowledge of its rollout instances. Pure.

The numbers that a choice compares are held in arrays, one row per instance, so that choosing among a thousand instances
takes microseconds. `Instance` is the handle of a row and holds what is asked of one instance at a time. Both are
written here only, together, by the verbs of `MutableFleet`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId, is_evaluation

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Instance:
    """Speculative state of one rollout instance: commands count as executed when they are issued."""

    instance: InstanceId
    version: PolicyVersion
    """What it serves, or will serve once the pulls already ordered are done."""
    kv_capacity: int
    max_running: int
    row: int
    pulling: bool = False
    asleep: bool = False
    """Whether it was told to free its GPUs, or has joined so; it is routed nothing until it pulls."""
    in_transit: int = 0
    """Number of unfinished moves of trajectories to it or from it."""
    kv_tokens: int = 0
    """KV tokens of the trajectories it runs."""
    trajectories: dict[TrajectoryId, None] = field(default_factory=dict)
    num_eval_running: int = 0
    """Number of these that belong to an evaluation."""
    draft_length: int = 0
    """Most tokens that it drafts for a decode step of a request, by the latest command."""

    @property
    def num_running(self) -> int:
        return len(self.trajectories)


class Fleet:
    """A read-only view of all instances. Arrays have one element per instance, in the order of joining until one is
    removed. side_by_side: whether instances serve several versions at once, so that cached contexts survive a pull."""

    def __init__(self, *, side_by_side: bool = False) -> None:
        self.side_by_side = side_by_side
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

    def with_cache(self, instance: InstanceId | None, version: PolicyVersion) -> Instance | None:
        """Return an instance if the context that it cached while serving `version` is still valid."""
        match = self.get(instance)
        return match if match is not None and (self.side_by_side or match.version == version) else None

    @property
    def running(self) -> npt.NDArray[np.float64]:
        return self._numbers[0, : len(self._rows)]

    @property
    def kv_tokens(self) -> npt.NDArray[np.float64]:
        return self._numbers[1, : len(self._rows)]

    @property
    def version(self) -> npt.NDArray[np.float64]:
        return self._numbers[2, : len(self._rows)]

    @property
    def draft_lengths(self) -> npt.NDArray[np.float64]:
        return self._numbers[5, : len(self._rows)]

    def versions(self) -> list[PolicyVersion]:
        """The versions in service, oldest first."""
        if self._versions is None:
            self._versions = [PolicyVersion(v) for v in sorted({i.version for i in self._rows})]
        return self._versions

    def fitting_mask(self, kv_tokens: int, least_version: int, typical_kv_tokens: float = 0.0) -> BoolArray:
        """Mask of the instances that serve at least this version and have room for a trajectory of this size, even
        after their running ones have grown to a typical length; otherwise some would be preempted. An empty instance
        has room for any trajectory."""
        count = len(self._rows)
        running, used, version, capacity, cap, _ = self._numbers[:, :count]
        needed_kv_tokens = np.maximum(used + kv_tokens, (running + 1) * typical_kv_tokens)
        fits: BoolArray = (
            (version >= least_version) & (running < cap) & ((needed_kv_tokens <= capacity) | (running == 0))
        )
        return fits

    def refusal(self, kv_tokens: int, least_version: int) -> str:
        """The first reason that explains why none of the instances fits."""
        count = len(self._rows)
        if not count:
            return "no instance"
        running, _, version, _, cap, _ = self._numbers[:, :count]
        recent = version >= least_version
        if not recent.any():
            return "version too old"
        if not (recent & (running < cap)).any():
            return "concurrency cap"
        return "KV memory"

    def validate(self) -> None:
        """Check that index and arrays agree with the instances."""
        if self._by_id != {instance.instance: instance for instance in self._rows}:
            raise ProtocolViolation(f"instances by id and by row differ: {sorted(self._by_id)}")
        for row, instance in enumerate(self._rows):
            if instance.row != row:
                raise ProtocolViolation(f"{instance.instance} is in row {row}, not {instance.row}")
            cached_tokens = (
                instance.num_running, instance.kv_tokens, instance.version, instance.kv_capacity,
                instance.max_running, instance.draft_length,
            )  # fmt: skip
            if cached_tokens != tuple(self._numbers[:, row]):
                raise ProtocolViolation(
                    f"{instance.instance} has {cached_tokens}, the arrays say {tuple(self._numbers[:, row])}"
                )
        if self._versions is not None and self._versions != sorted({instance.version for instance in self._rows}):
            raise ProtocolViolation(f"versions in service are taken to be {self._versions}")


class MutableFleet(Fleet):
    """The instances with the methods by which the state changes them. Each method keeps the arrays up to date."""

    def join(
        self,
        instance: InstanceId,
        version: PolicyVersion,
        kv_capacity: int,
        max_running: int,
        in_transit: int = 0,
        *,
        asleep: bool = False,
    ) -> Instance:
        """Add an instance that runs nothing. in_transit: moves that are already on their way to its id."""
        if instance in self._by_id:
            raise ProtocolViolation(f"{instance} joins twice")
        if len(self._rows) == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        joined = Instance(
            instance=instance,
            version=version,
            kv_capacity=kv_capacity,
            max_running=max_running,
            row=len(self._rows),
            in_transit=in_transit,
            asleep=asleep,
        )
        self._rows.append(joined)
        self._by_id[instance] = joined
        self._versions = None
        self._numbers[3:, joined.row] = kv_capacity, max_running, 0
        self._update(joined)
        return joined

    def drain(self, instance: Instance) -> None:
        """Exclude an instance from routing: it may start no more trajectories."""
        instance.max_running = 0
        self._numbers[4, instance.row] = 0

    def remove_instance(self, instance: Instance) -> None:
        """Remove an instance that runs nothing any more. The last row of the arrays takes its index."""
        if instance.trajectories:
            raise ProtocolViolation(f"{instance.instance} is removed with {instance.num_running} trajectories on it")
        del self._by_id[instance.instance]
        self._versions = None
        last = self._rows.pop()
        if last is not instance:
            self._numbers[:, instance.row] = self._numbers[:, last.row]
            last.row = instance.row
            self._rows[instance.row] = last

    def add(self, instance: Instance, trajectory: TrajectoryId, kv_tokens: int) -> None:
        """Add a trajectory to an instance."""
        instance.trajectories[trajectory] = None
        instance.num_eval_running += is_evaluation(trajectory)
        instance.kv_tokens += kv_tokens
        self._update(instance)

    def remove(self, instance: Instance, trajectory: TrajectoryId, kv_tokens: int) -> None:
        """Remove a trajectory from an instance. kv_tokens: the size with which it was counted."""
        del instance.trajectories[trajectory]
        instance.num_eval_running -= is_evaluation(trajectory)
        instance.kv_tokens -= kv_tokens
        self._update(instance)

    def grow(self, instance: Instance, kv_tokens: int) -> None:
        """Add KV tokens to the trajectories of an instance."""
        instance.kv_tokens += kv_tokens
        self._update(instance)

    def set_draft_length(self, instance: Instance, length: int) -> None:
        """Set the maximum draft length of an instance."""
        instance.draft_length = self._numbers[5, instance.row] = length

    def start_sleep(self, instance: Instance) -> None:
        """Mark an instance as asleep: it frees its GPUs."""
        instance.asleep = True

    def start_pull(self, instance: Instance, version: PolicyVersion) -> None:
        """Mark an instance as serving `version`, which it is about to load. Wakes it."""
        if instance.pulling or version < instance.version + (not instance.asleep):
            raise ProtocolViolation(f"{instance.instance} at version {instance.version} is to pull {version}")
        instance.version, instance.pulling, instance.asleep = version, True, False
        self._versions = None
        self._update(instance)

    def finish_pull(self, instance: Instance) -> None:
        """Record that an instance has loaded the version it is marked with."""
        instance.pulling = False

    def start_move(self, source: Instance, target: Instance) -> None:
        """Count a trajectory as moving from one instance to another."""
        source.in_transit += 1
        target.in_transit += 1

    def finish_move(self, instance: Instance) -> None:
        """Remove a move from one of its two instances, because the trajectory has left the source or the move has
        ended."""
        instance.in_transit -= 1

    def _update(self, instance: Instance) -> None:
        """Copy an instance's numbers into the arrays."""
        numbers, row = self._numbers, instance.row
        numbers[0, row] = len(instance.trajectories)  # one by one: a slice would cost three times as much
        numbers[1, row] = instance.kv_tokens
        numbers[2, row] = instance.version

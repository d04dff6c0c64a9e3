"""The coordinator's view of its rollout instances. Pure.

Numbers that are compared between instances are kept in arrays with one element per instance, so that choosing among a
thousand instances takes microseconds. `Instance` has all data of one instance, and its `index` in the arrays. Only the
methods of `Fleet` change both, together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.strategies.migration import InstanceLoad
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId, is_evaluation

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Instance:
    """Speculative state of one rollout instance: commands count as executed when they are issued."""

    id: InstanceId
    version: PolicyVersion
    """The version that it serves, or will serve once its current pull is done."""
    kv_capacity: int
    max_running: int
    index: int
    is_pulling: bool = False
    is_asleep: bool = False
    """Whether it was ordered to free its GPUs, or joined without using them. It gets no trajectories until it pulls."""
    num_moves: int = 0
    """Number of unfinished moves of trajectories to it or from it."""
    kv_tokens: int = 0
    """KV tokens of the trajectories it runs."""
    trajectories: dict[TrajectoryId, None] = field(default_factory=dict)
    num_eval_running: int = 0
    """Number of these that belong to an evaluation."""

    @property
    def num_running(self) -> int:
        return len(self.trajectories)

    @property
    def load(self) -> InstanceLoad:
        return InstanceLoad(running=self.num_running, kv_tokens=self.kv_tokens)


class Fleet:
    """All instances. Arrays have one element per instance, in the order of joining until one is removed.

    serves_many_versions: whether instances serve several versions at once, so that cached contexts survive a pull.
    """

    def __init__(self, *, serves_many_versions: bool = False) -> None:
        self.serves_many_versions = serves_many_versions
        self._by_id: dict[InstanceId, Instance] = {}
        self._instances: list[Instance] = []
        self._numbers = np.zeros((6, 8))
        """Of each instance a column with what `_column` says; some columns are unused."""
        self._distinct_versions: list[PolicyVersion] | None = None

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances)

    def __getitem__(self, index: int) -> Instance:
        return self._instances[index]

    def get(self, instance_id: InstanceId | None) -> Instance | None:
        return self._by_id.get(instance_id) if instance_id is not None else None

    def get_if_context_valid(self, instance_id: InstanceId | None, version: PolicyVersion) -> Instance | None:
        """Return an instance if the context that it cached while serving `version` is still valid."""
        instance = self.get(instance_id)
        is_valid = instance is not None and (self.serves_many_versions or instance.version == version)
        return instance if is_valid else None

    @property
    def running(self) -> npt.NDArray[np.float64]:
        """Number of trajectories that each instance runs."""
        return self._numbers[0, : len(self._instances)]

    @property
    def kv_tokens(self) -> npt.NDArray[np.float64]:
        """KV tokens of the trajectories that each instance runs."""
        return self._numbers[1, : len(self._instances)]

    @property
    def served_versions(self) -> npt.NDArray[np.float64]:
        return self._numbers[2, : len(self._instances)]

    def distinct_versions(self) -> list[PolicyVersion]:
        """The versions that instances serve, oldest first."""
        if self._distinct_versions is None:
            self._distinct_versions = [PolicyVersion(v) for v in sorted({i.version for i in self._instances})]
        return self._distinct_versions

    def fitting_mask(self, kv_tokens: int, min_version: int, typical_kv_tokens: float = 0.0) -> BoolArray:
        """Mask of the instances that serve at least this version and have room for a trajectory of this size, even
        after their running ones have grown to a typical length; otherwise some would be preempted. An empty instance
        has room for any trajectory."""
        _, _, version, free_kv_tokens, num_after, kv_capacity = self._numbers[:, : len(self._instances)]
        fits: BoolArray = (version >= min_version) & (free_kv_tokens >= kv_tokens)
        if typical_kv_tokens:
            fits &= num_after * typical_kv_tokens <= kv_capacity
        return fits

    def refusal_reason(self, min_version: int) -> str:
        """The reason why no instance has room for a trajectory."""
        if not self._instances:
            return "no instance"
        is_new_enough = self.served_versions >= min_version
        if not is_new_enough.any():
            return "version too old"
        if not (is_new_enough & (self._numbers[3, : len(self._instances)] > -math.inf)).any():
            return "concurrency cap"
        return "KV memory"

    def validate(self) -> None:
        """Check that index and arrays agree with the instances."""
        if self._by_id != {instance.id: instance for instance in self._instances}:
            raise ProtocolViolation(f"instances by id and by index differ: {sorted(self._by_id)}")
        for index, instance in enumerate(self._instances):
            if instance.index != index:
                raise ProtocolViolation(f"{instance.id} has index {index}, not {instance.index}")
            if (expected_numbers := _column(instance)) != tuple(self._numbers[:, index]):
                raise ProtocolViolation(
                    f"{instance.id} has {expected_numbers}, but the arrays have {tuple(self._numbers[:, index])}"
                )
        if self._distinct_versions is not None and self._distinct_versions != sorted(
            {instance.version for instance in self._instances}
        ):
            raise ProtocolViolation(f"the list of served versions is wrong: {self._distinct_versions}")

    # -- changes, by the state only: each keeps the arrays up to date ----------------------------------------------

    def add_instance(
        self,
        instance_id: InstanceId,
        version: PolicyVersion,
        kv_capacity: int,
        max_running: int,
        *,
        is_asleep: bool = False,
    ) -> Instance:
        """Add an instance that runs nothing."""
        if instance_id in self._by_id:
            raise ProtocolViolation(f"{instance_id} joins twice")
        if len(self._instances) == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        instance = Instance(
            id=instance_id,
            version=version,
            kv_capacity=kv_capacity,
            max_running=max_running,
            index=len(self._instances),
            is_asleep=is_asleep,
        )
        self._instances.append(instance)
        self._by_id[instance_id] = instance
        self._distinct_versions = None
        self._update(instance)
        return instance

    def drain(self, instance: Instance) -> None:
        """Exclude an instance from routing."""
        instance.max_running = 0
        self._update(instance)

    def remove_instance(self, instance: Instance) -> None:
        """Remove an instance that runs nothing any more. The last instance takes its index."""
        if instance.trajectories:
            raise ProtocolViolation(f"{instance.id} is removed with {instance.num_running} trajectories on it")
        del self._by_id[instance.id]
        self._distinct_versions = None
        last = self._instances.pop()
        if last is not instance:
            self._numbers[:, instance.index] = self._numbers[:, last.index]
            last.index = instance.index
            self._instances[instance.index] = last

    def add_trajectory(self, instance: Instance, trajectory: TrajectoryId, kv_tokens: int) -> None:
        """Add a trajectory to an instance."""
        instance.trajectories[trajectory] = None
        instance.num_eval_running += is_evaluation(trajectory)
        instance.kv_tokens += kv_tokens
        self._update(instance)

    def remove_trajectory(self, instance: Instance, trajectory: TrajectoryId, kv_tokens: int) -> None:
        """Remove a trajectory from an instance. kv_tokens: the size with which it was counted."""
        del instance.trajectories[trajectory]
        instance.num_eval_running -= is_evaluation(trajectory)
        instance.kv_tokens -= kv_tokens
        self._update(instance)

    def add_kv_tokens(self, instance: Instance, kv_tokens: int) -> None:
        """Add KV tokens to the trajectories of an instance."""
        instance.kv_tokens += kv_tokens
        self._update(instance)

    def start_sleep(self, instance: Instance) -> None:
        """Mark an instance as asleep."""
        instance.is_asleep = True

    def start_pull(self, instance: Instance, version: PolicyVersion) -> None:
        """Mark an instance as serving `version`, which it is about to load, and as awake."""
        if instance.is_pulling or version < instance.version + (not instance.is_asleep):
            raise ProtocolViolation(f"{instance.id} at version {instance.version} is to pull {version}")
        instance.version, instance.is_pulling, instance.is_asleep = version, True, False
        self._distinct_versions = None
        self._update(instance)

    def finish_pull(self, instance: Instance, version: PolicyVersion) -> None:
        """Record that an instance has loaded the version it is marked with, or a newer one."""
        instance.version, instance.is_pulling = version, False
        self._distinct_versions = None
        self._update(instance)

    def start_move(self, source: Instance, target: Instance) -> None:
        """Count a trajectory as moving from one instance to another."""
        source.num_moves += 1
        target.num_moves += 1

    def finish_move(self, instance: Instance) -> None:
        """Remove a move from one of its two instances, because the trajectory has left the source or the move has
        ended."""
        instance.num_moves -= 1

    def _update(self, instance: Instance) -> None:
        """Copy an instance's numbers into the arrays."""
        self._numbers[:, instance.index] = _column(instance)


def _column(instance: Instance) -> tuple[float, ...]:
    """Running trajectories, KV tokens, version, KV tokens of the longest trajectory that it has room for, running
    trajectories after one more if they all have to fit, and KV capacity. An empty instance has room for any."""
    running = len(instance.trajectories)
    free_kv_tokens = instance.kv_capacity - instance.kv_tokens if running else math.inf
    if running >= instance.max_running:
        free_kv_tokens = -math.inf
    num_after = running + 1 if running else 0
    return running, instance.kv_tokens, instance.version, free_kv_tokens, num_after, instance.kv_capacity

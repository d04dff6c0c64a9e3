"""Synchronization rules, which choose how many instances pull a policy version when it is published.

Until an instance pulls, it can only be given work that its version still allows. A pull may interrupt what it runs, and
have all these contexts prefilled again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from staleflow.tasks.settings.knobs import parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


class Synchronization(RegistryEntry, ABC):
    """A synchronization rule."""

    __slots__ = ()

    @abstractmethod
    def num_pulling(self, num_instances: int) -> int:
        """Number of instances that pull a version when it is published: those with the fewest KV tokens. The others
        pull when they run nothing any more, or pull a later version."""


SYNCHRONIZATION: Registry[Synchronization] = Registry(
    "synchronization rule", "rollout.synchronization", Synchronization
)
"""A rule may have the parameters `eta`, the bound, and `interrupts`: whether a pull interrupts what an instance
runs."""


@SYNCHRONIZATION.register("greedy")
@dataclass(frozen=True, slots=True)
class Greedy(Synchronization):
    """All instances pull every version."""

    def num_pulling(self, num_instances: int) -> int:
        return num_instances


@SYNCHRONIZATION.register("staggered")
@dataclass(frozen=True, slots=True)
class Staggered(Synchronization):
    """Where a pull interrupts running trajectories, each instance pulls at least twice in the eta + 1 versions that a
    group may live, and no more often than that requires. Some instances serve each version at once, and the others
    finish more trajectories before they pull. Elsewhere all pull every version."""

    eta: int = parameter()
    interrupts: bool = parameter()

    def num_pulling(self, num_instances: int) -> int:
        period = max(1, (self.eta + 1) // 2) if self.interrupts else 1  # versions between two pulls of an instance
        return -(-num_instances // period)

"""Migration rules, which move running trajectories from a loaded instance to a less loaded one. A move costs a
prefill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.cost_model import StepCosts
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A running trajectory that can be moved."""

    kv_tokens: int
    remaining_tokens: float
    """Expected number of tokens that it still has to sample."""
    deadline: int
    """Last training step that may consume it under the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one instance. running: number of trajectories."""

    running: int
    kv_tokens: int


class Migration(RegistryEntry, ABC):
    """A migration rule."""

    __slots__ = ()
    active = True
    """Whether the rule ever moves anything."""

    @abstractmethod
    def worthwhile(self, source: Load, target: Load) -> bool:
        """Whether any move between these instances could gain. Called before trajectories are examined one by one."""

    @abstractmethod
    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        """Indices of `movable` to move from the more loaded `source` to `target`, which has room for `limit`
        trajectories."""


MIGRATION: Registry[Migration] = Registry("migration rule", "rollout.migration", Migration)
"""A rule may have the parameter `cost`, the cost model."""


@MIGRATION.register("none")
@dataclass(frozen=True, slots=True)
class Stay(Migration):
    """Move no trajectory."""

    active = False

    def worthwhile(self, source: Load, target: Load) -> bool:
        return False

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        return []


@MIGRATION.register("largest_gain")
@dataclass(frozen=True, slots=True)
class LargestGain(Migration):
    """The moves with the largest positive gain: seconds saved on the tokens left to sample, minus the seconds that the
    prefill costs all trajectories on the target."""

    cost: StepCosts = parameter()
    gain: float = knob(0.2, "share by which a decode step must be faster on the target", low=0, high=1)

    def worthwhile(self, source: Load, target: Load) -> bool:
        return self._faster(source, Load(running=target.running + 1, kv_tokens=target.kv_tokens))

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        # The earliest deadline first, and of equal ones the cheapest to move.
        order = sorted(range(len(movable)), key=lambda i: (movable[i].deadline, movable[i].kv_tokens))
        moved: list[int] = []
        for i in order:
            if len(moved) == limit:
                break
            if not self._gains(source, target, movable[i]):
                continue
            kv = movable[i].kv_tokens
            source = Load(running=source.running - 1, kv_tokens=source.kv_tokens - kv)
            target = Load(running=target.running + 1, kv_tokens=target.kv_tokens + kv)
            moved.append(i)
        return moved

    def _gains(self, source: Load, target: Load, work: Movable) -> bool:
        cost = self.cost
        after = Load(running=target.running + 1, kv_tokens=target.kv_tokens + work.kv_tokens)
        if not self._faster(source, after):
            return False
        saved_s = cost.step_s(source.running, source.kv_tokens) - cost.step_s(after.running, after.kv_tokens)
        return work.remaining_tokens * saved_s > cost.prefill * work.kv_tokens * after.running

    def _faster(self, source: Load, after: Load) -> bool:
        """Whether a decode step on the target after the move is faster than one on the source by at least `gain`."""
        source_s = self.cost.step_s(source.running, source.kv_tokens)
        return self.cost.step_s(after.running, after.kv_tokens) < (1 - self.gain) * source_s

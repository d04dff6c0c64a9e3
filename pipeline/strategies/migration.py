"""Moving single trajectories from an instance that drowns to one that starves. A move costs one more prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.engines.cost_model import CostModel
from tasks.knobs import knob
from tasks.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A running trajectory that could run elsewhere. remaining: tokens it is still expected to sample."""

    kv_tokens: int
    remaining: float
    pace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    running: int
    kv_tokens: int


class Migration(Protocol):
    @property
    def active(self) -> bool:
        """Whether it ever moves anything."""
        ...

    def worthwhile(self, source: Load, target: Load) -> bool:
        """Whether any move between these two could gain: asked before anything is looked at one by one."""
        ...

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        """Which of `movable` (indices) to take from the fuller `source` to `target`, which has room for `limit`."""
        ...


MIGRATION: Registry[Migration] = Registry("migration rule", "rollout.migration", contract=Migration)
"""A rule may ask for `cost`, the cost model."""


@MIGRATION.register("none")
class Stay:
    """Never."""

    active = False

    def worthwhile(self, source: Load, target: Load) -> bool:
        return False

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        return []


@MIGRATION.register("largest_gain")
@dataclass(frozen=True, slots=True)
class LargestGain:
    """The ones whose move gains most, for as long as it gains: seconds saved over what the trajectory has left to
    sample, less the seconds its prefill takes from everyone on the target."""

    cost: CostModel
    migration_gain: float = knob(0.2, "largest_gain: share by which a decode step must be faster there", low=0, high=1)

    active = True

    def worthwhile(self, source: Load, target: Load) -> bool:
        return self._faster(source, Load(running=target.running + 1, kv_tokens=target.kv_tokens))

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        here, there = source, target
        # Urgent work gains most from a light instance; among equals the small contexts are cheap to move.
        order = sorted(range(len(movable)), key=lambda i: (movable[i].pace_s, movable[i].kv_tokens))
        moved: list[int] = []
        for i in order:
            if len(moved) == limit:
                break
            if not self._gains(here, there, movable[i]):
                continue
            kv = movable[i].kv_tokens
            here = Load(running=here.running - 1, kv_tokens=here.kv_tokens - kv)
            there = Load(running=there.running + 1, kv_tokens=there.kv_tokens + kv)
            moved.append(i)
        return moved

    def _gains(self, here: Load, there: Load, one: Movable) -> bool:
        cost = self.cost
        after = Load(running=there.running + 1, kv_tokens=there.kv_tokens + one.kv_tokens)
        if not self._faster(here, after):
            return False
        saved_s = cost.step_s(here.running, here.kv_tokens) - cost.step_s(after.running, after.kv_tokens)
        return one.remaining * saved_s > cost.prefill * one.kv_tokens * after.running

    def _faster(self, here: Load, after: Load) -> bool:
        """Whether a step on the target, once moved, is faster than here by the least gain."""
        here_s = self.cost.step_s(here.running, here.kv_tokens)
        return self.cost.step_s(after.running, after.kv_tokens) < (1 - self.migration_gain) * here_s

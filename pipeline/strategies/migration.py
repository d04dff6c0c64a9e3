"""Migration rules: moving running trajectories from an overloaded instance to a lightly loaded one. A move costs one
more prefill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.cost_model import StepCosts
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A running trajectory that could move."""

    kv_tokens: int
    remaining: float
    """Tokens it is expected still to sample."""
    due: int
    """The last training step that its bound allows it to be consumed by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of one instance. running: trajectories."""

    running: int
    kv_tokens: int


class Migration(RegistryEntry, ABC):
    """A migration rule."""

    __slots__ = ()
    active = True
    """Whether the rule ever moves anything."""

    @abstractmethod
    def worthwhile(self, source: Load, target: Load) -> bool:
        """Whether any move between these two could gain; asked before trajectories are examined one by one."""

    @abstractmethod
    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        """Indices of `movable` to move from the fuller `source` to `target`, which has room for `limit`."""


MIGRATION: Registry[Migration] = Registry("migration rule", "rollout.migration", Migration)
"""A rule may have the parameter `cost`, the cost model."""


@MIGRATION.register("none")
@dataclass(frozen=True, slots=True)
class Stay(Migration):
    """No trajectory moves."""

    active = False

    def worthwhile(self, source: Load, target: Load) -> bool:
        return False

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        return []


@MIGRATION.register("largest_gain")
@dataclass(frozen=True, slots=True)
class LargestGain(Migration):
    """The moves that gain most, as long as they gain: seconds saved on the tokens a trajectory still has to sample,
    minus the seconds its prefill costs all trajectories on the target."""

    cost: StepCosts = parameter()
    gain: float = knob(0.2, "share by which a decode step must be faster on the target", low=0, high=1)

    def worthwhile(self, source: Load, target: Load) -> bool:
        return self._faster(source, Load(running=target.running + 1, kv_tokens=target.kv_tokens))

    def moves(self, source: Load, target: Load, movable: Sequence[Movable], limit: int) -> list[int]:
        here, there = source, target
        # What its step waits for soonest comes first, and of that what is cheapest to move.
        order = sorted(range(len(movable)), key=lambda i: (movable[i].due, movable[i].kv_tokens))
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

    def _gains(self, here: Load, there: Load, work: Movable) -> bool:
        cost = self.cost
        after = Load(running=there.running + 1, kv_tokens=there.kv_tokens + work.kv_tokens)
        if not self._faster(here, after):
            return False
        saved_s = cost.step_s(here.running, here.kv_tokens) - cost.step_s(after.running, after.kv_tokens)
        return work.remaining * saved_s > cost.prefill * work.kv_tokens * after.running

    def _faster(self, here: Load, after: Load) -> bool:
        """Whether a decode step on the target after the move is faster than here by at least gain."""
        here_s = self.cost.step_s(here.running, here.kv_tokens)
        return self.cost.step_s(after.running, after.kv_tokens) < (1 - self.gain) * here_s

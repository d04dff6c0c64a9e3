"""Migration rules, which move running trajectories from a loaded instance to a less loaded one. A move costs a
prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class MovableTrajectory:
    """A running trajectory that can be moved."""

    kv_tokens: int
    remaining_tokens: float
    """Expected number of tokens that it still has to sample."""
    deadline: int
    """Last training step that may consume it under the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """Load of one instance. running: number of trajectories."""

    running: int
    kv_tokens: int


class Migration(RegistryEntry):
    """A migration rule. This base class moves nothing."""

    __slots__ = ()
    moves_anything = False
    """Whether the rule ever moves anything."""

    def may_gain(self, source: InstanceLoad, target: InstanceLoad) -> bool:
        """Whether a move from one instance to another could gain. Called before trajectories are examined singly."""
        return False

    def choose_moves(
        self, source: InstanceLoad, target: InstanceLoad, movable: Sequence[MovableTrajectory], limit: int
    ) -> list[int]:
        """Indices of `movable` to move from the more loaded `source` to `target`, which has room for `limit`
        trajectories."""
        return []


MIGRATION: Registry[Migration] = Registry("migration rule", "rollout.migration", Migration)
"""A rule may have the parameter `cost`, the cost model."""


@MIGRATION.register("none")
@dataclass(frozen=True, slots=True)
class NoMigration(Migration):
    """Move no trajectory."""


@MIGRATION.register("largest_gain")
@dataclass(frozen=True, slots=True)
class LargestGain(Migration):
    """Moves each trajectory that saves time on the target, earliest deadline first: the seconds saved on its tokens
    left to sample exceed the seconds that its prefill costs all trajectories on the target. A decode step must also be
    faster on the target."""

    cost: CostModel = parameter()
    gain: float = knob(0.2, "share by which a decode step must be faster on the target", low=0, high=1)

    moves_anything = True

    def may_gain(self, source: InstanceLoad, target: InstanceLoad) -> bool:
        return self._is_faster(source, InstanceLoad(running=target.running + 1, kv_tokens=target.kv_tokens))

    def choose_moves(
        self, source: InstanceLoad, target: InstanceLoad, movable: Sequence[MovableTrajectory], limit: int
    ) -> list[int]:
        # The earliest deadline first, and of equal ones the cheapest to move.
        order = sorted(range(len(movable)), key=lambda i: (movable[i].deadline, movable[i].kv_tokens))
        indices: list[int] = []
        for i in order:
            if len(indices) == limit:
                break
            if not self._gains(source, target, movable[i]):
                continue
            kv_tokens = movable[i].kv_tokens
            source = InstanceLoad(running=source.running - 1, kv_tokens=source.kv_tokens - kv_tokens)
            target = InstanceLoad(running=target.running + 1, kv_tokens=target.kv_tokens + kv_tokens)
            indices.append(i)
        return indices

    def _gains(self, source: InstanceLoad, target: InstanceLoad, trajectory: MovableTrajectory) -> bool:
        cost = self.cost
        target_after = InstanceLoad(running=target.running + 1, kv_tokens=target.kv_tokens + trajectory.kv_tokens)
        if not self._is_faster(source, target_after):
            return False
        saved_s = cost.step_s(source.running, source.kv_tokens) - cost.step_s(
            target_after.running, target_after.kv_tokens
        )
        return trajectory.remaining_tokens * saved_s > cost.prefill * trajectory.kv_tokens * target_after.running

    def _is_faster(self, source: InstanceLoad, target_after: InstanceLoad) -> bool:
        """Whether a decode step on the target after the move is faster than one on the source by at least `gain`."""
        source_s = self.cost.step_s(source.running, source.kv_tokens)
        return self.cost.step_s(target_after.running, target_after.kv_tokens) < (1 - self.gain) * source_s

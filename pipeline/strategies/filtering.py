"""Filters of complete groups not worth training on, and rules for unfinished ones not worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stores.rewards import has_signal
from stores.trajectory import AbortReason
from tasks.knobs import knob
from tasks.registry import Registry


class Filtering(Protocol):
    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        """Why a complete group with these rewards is dropped and replaced; None if it is kept. Members whose reward
        could not be computed are left out."""
        ...


FILTERING: Registry[Filtering] = Registry("filter", "batch.filtering", contract=Filtering)


@FILTERING.register("keep_all")
class KeepAll:
    """Every group is kept."""

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None


@FILTERING.register("no_signal")
class NoSignal:
    """DAPO (arXiv 2503.14476): equal rewards give zero advantage everywhere, so the group is dropped and replaced."""

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None if has_signal(rewards) else AbortReason.NO_SIGNAL


class Straggling(Enum):
    """What is done with the last trajectories that a step waits for."""

    WAIT = "wait"
    RETRY = "retry"
    TRUNCATE = "truncate"


STRAGGLERS: Registry[Stragglers] = Registry("straggler rule", "batch.stragglers")


@STRAGGLERS.register("wait")
class Stragglers:
    """When a waiting step counts as stuck, and what is done with the stragglers it waits for. This rule only waits."""

    action = Straggling.WAIT

    def stuck(self, *, waited_s: float, interval_s: float, missing: int, groups_per_step: int) -> bool:
        """Whether a step that has waited `waited_s` for `missing` groups is stuck. interval_s: between steps; 0 while
        unknown."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedStragglers(Stragglers):
    """A step is stuck when it has waited long and for few groups."""

    straggler_patience: float = knob(
        1.0, "wait of the trainer, in intervals between steps, after which a step is stuck", above=0
    )
    straggler_share: float = knob(0.1, "largest share of groups_per_step that counts as stragglers", low=0, high=1)

    def stuck(self, *, waited_s: float, interval_s: float, missing: int, groups_per_step: int) -> bool:
        if not interval_s or not missing:
            return False
        return waited_s > self.straggler_patience * interval_s and missing <= max(
            1, self.straggler_share * groups_per_step
        )


@STRAGGLERS.register("retry")
class Retry(_TimedStragglers):
    """Stragglers continue on the instance whose decode step is fastest."""

    action = Straggling.RETRY


@STRAGGLERS.register("truncate")
class Truncate(_TimedStragglers):
    """Stragglers end with the tokens they have, and are scored."""

    action = Straggling.TRUNCATE

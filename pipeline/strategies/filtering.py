"""Which complete groups are not worth training on, and which unfinished ones are not worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

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
    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None


@FILTERING.register("no_signal")
class NoSignal:
    """DAPO (arXiv 2503.14476): equal rewards give zero advantage everywhere, so the group is dropped and replaced."""

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        has_signal = len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9
        return None if has_signal else AbortReason.NO_SIGNAL


class Straggling(Enum):
    """What becomes of the last trajectories that a step waits for."""

    WAIT = "wait"
    RETRY = "retry"
    TRUNCATE = "truncate"


STRAGGLERS: Registry[Stragglers] = Registry("straggler rule", "batch.stragglers")


@STRAGGLERS.register("wait")
class Stragglers:
    """When a step that waits is stuck, and what is done about the few it waits for. This one waits for ever."""

    action = Straggling.WAIT

    def stuck(self, *, waited_s: float, interval_s: float, missing: int, groups_per_step: int) -> bool:
        """Whether a step that has waited so long for so few groups is stuck. interval_s: 0 while it is not known."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Impatient(Stragglers):
    """A step is stuck that has waited for long and for few."""

    straggler_patience: float = knob(1.0, "intervals between steps the trainer waits before it is stuck", above=0)
    straggler_share: float = knob(0.1, "share of groups_per_step that may count as stragglers", low=0, high=1)

    def stuck(self, *, waited_s: float, interval_s: float, missing: int, groups_per_step: int) -> bool:
        if not interval_s or not missing:
            return False
        return waited_s > self.straggler_patience * interval_s and missing <= max(
            1, self.straggler_share * groups_per_step
        )


@STRAGGLERS.register("retry")
class Retry(_Impatient):
    """Continued on the instance whose decode step is fastest."""

    action = Straggling.RETRY


@STRAGGLERS.register("truncate")
class Truncate(_Impatient):
    """Ended with the tokens they have, and scored."""

    action = Straggling.TRUNCATE

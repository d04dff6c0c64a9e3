"""Which complete groups are not worth training on, and which unfinished ones are not worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stores.rewards import has_signal
from stores.trajectory import AbortReason


class Filtering(Protocol):
    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        """Why a complete group with these rewards is dropped and replaced; None if it is kept. Members whose reward
        could not be computed are left out."""
        ...


class KeepAll:
    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None


class NoSignal:
    """DAPO (arXiv 2503.14476): equal rewards give zero advantage everywhere, so the group is dropped and replaced."""

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None if has_signal(rewards) else AbortReason.NO_SIGNAL


class Straggling(Enum):
    """What becomes of the last trajectories that a step waits for."""

    WAIT = "wait"
    RETRY = "retry"
    """Continued on the least loaded instance."""
    TRUNCATE = "truncate"
    """Ended with the tokens they have, and scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """When a step that waits is stuck, and what is done about the few it waits for."""

    action: Straggling = Straggling.WAIT
    patience: float = 1.0
    """Intervals between steps that the trainer waits first."""
    share: float = 0.1
    """Of the groups of a step, at most this many are stragglers; if more are missing, it is not them."""

    def stuck(self, *, waited_s: float, interval_s: float, missing: int, groups_per_step: int) -> bool:
        """Whether a step that has waited so long for so few groups is stuck. interval_s: 0 while it is not known."""
        if self.action is Straggling.WAIT or not interval_s or not missing:
            return False
        return waited_s > self.patience * interval_s and missing <= max(1, self.share * groups_per_step)


FILTERING_NAMES = ("keep_all", "no_signal")


def make_filtering(name: str) -> Filtering:
    """The filter called `name`."""
    match name:
        case "keep_all":
            return KeepAll()
        case "no_signal":
            return NoSignal()
        case _:
            raise ValueError(f"no filter {name!r}; there are {', '.join(FILTERING_NAMES)}")

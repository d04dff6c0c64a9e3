"""Which complete groups are not worth training on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
        has_signal = len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9
        return None if has_signal else AbortReason.NO_SIGNAL


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

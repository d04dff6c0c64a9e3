"""Filters of complete groups not worth training on, and rules for unfinished ones not worth waiting for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.stores.reward_signal import has_signal
from staleflow.stores.trajectory import AbortReason
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry, RegistryEntry


class Filtering(RegistryEntry, ABC):
    """A filter of complete groups."""

    __slots__ = ()
    compares_members = False
    """Whether it drops every group of one trajectory."""

    @abstractmethod
    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        """Why a complete group with these rewards is dropped and replaced; None if it is kept. Members whose reward
        could not be computed are left out."""


FILTERING: Registry[Filtering] = Registry("filter", "batch.filtering", Filtering)


@FILTERING.register("keep_all")
@dataclass(frozen=True, slots=True)
class KeepAll(Filtering):
    """Every group is kept."""

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None


@FILTERING.register("no_signal")
@dataclass(frozen=True, slots=True)
class NoSignal(Filtering):
    """DAPO (arXiv 2503.14476): equal rewards give zero advantage everywhere, so the group is dropped and replaced."""

    compares_members = True

    def verdict(self, rewards: Sequence[float]) -> AbortReason | None:
        return None if has_signal(rewards) else AbortReason.NO_SIGNAL


class StragglerRule(RegistryEntry):
    """When a waiting step counts as stuck, and what is done with the stragglers it waits for. By default it only
    waits."""

    __slots__ = ()
    cuts = False
    """Whether it ever ends a trajectory before its time."""

    def waited_too_long(self, *, waited_s: float, interval_s: float) -> bool:
        """Whether a step that has waited for `waited_s` has waited too long. interval_s: between steps; 0 while
        unknown."""
        return False

    def may_truncate(self, unfinished: int, *, per_step: int, cut_in_step: int, trained: int, cut: int) -> bool:
        """Whether as many unfinished trajectories, all that the step waits for, may be ended. per_step: trajectories of
        a step. cut_in_step: ended for this step already. trained: trajectories trained on so far, of which `cut` were
        ended, or have been told to."""
        return False


STRAGGLERS: Registry[StragglerRule] = Registry("straggler rule", "batch.stragglers", StragglerRule)


@STRAGGLERS.register("wait")
@dataclass(frozen=True, slots=True)
class Wait(StragglerRule):
    """Stragglers are waited for."""


@STRAGGLERS.register("truncate")
@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(StragglerRule):
    """Stragglers end with the tokens they have, and are scored: all that a step still waits for, once these are no more
    than `share` allows. Fewer would help nobody, since the step would wait for the others.

    What is cut never is more than that share of what is trained, counted over the run; one step may cut one response
    more than its own share, out of what the steps before have left.
    """

    patience: float = knob(1.0, "wait of the trainer, in intervals between steps, after which a step is stuck", above=0)
    share: float = knob(
        0.1, "largest share of the trained responses that are cut, of each step and of all", low=0, high=1
    )

    cuts = True

    def waited_too_long(self, *, waited_s: float, interval_s: float) -> bool:
        return bool(interval_s) and waited_s > self.patience * interval_s

    def may_truncate(self, unfinished: int, *, per_step: int, cut_in_step: int, trained: int, cut: int) -> bool:
        in_step = cut_in_step + unfinished <= max(1, int(self.share * per_step))
        return in_step and cut + unfinished <= self.share * (trained + per_step)

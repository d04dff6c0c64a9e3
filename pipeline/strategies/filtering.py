"""Filters of complete groups that are not worth training on, and rules for unfinished trajectories that delay a
step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.stores.reward_statistics import has_signal
from staleflow.stores.trajectory import AbortReason
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry, RegistryEntry


class Filtering(RegistryEntry, ABC):
    """A filter of complete groups."""

    __slots__ = ()
    compares_members = False
    """Whether it compares the members of a group; groups with one member would all be dropped."""

    @abstractmethod
    def drop_reason(self, rewards: Sequence[float]) -> AbortReason | None:
        """The reason to drop and replace a complete group with these rewards; None to keep it. Rewards that could not
        be computed are left out."""


FILTERING: Registry[Filtering] = Registry("filter", "batch.filtering", Filtering)


@FILTERING.register("keep_all")
@dataclass(frozen=True, slots=True)
class KeepAll(Filtering):
    """Keep every group."""

    def drop_reason(self, rewards: Sequence[float]) -> AbortReason | None:
        return None


@FILTERING.register("no_signal")
@dataclass(frozen=True, slots=True)
class DropNoSignal(Filtering):
    """Drop and replace groups with equal rewards, also where an estimator over the whole batch or an overlong penalty
    would train on them (DAPO, arXiv 2503.14476)."""

    compares_members = True

    def drop_reason(self, rewards: Sequence[float]) -> AbortReason | None:
        return None if has_signal(rewards) else AbortReason.NO_SIGNAL


class StragglerRule(RegistryEntry):
    """A rule for stragglers, the last unfinished trajectories for which a training step waits: whether and when they
    are truncated, which means scored with the tokens they have. This base class never truncates."""

    __slots__ = ()
    truncates = False
    """Whether it ever truncates a trajectory."""

    def waited_too_long(self, *, trainer_waited_s: float, step_interval_s: float) -> bool:
        """Whether the trainer has waited too long for its batch.

        Args:
            trainer_waited_s: Seconds that it has waited.
            step_interval_s: Mean seconds between steps; 0 if unknown.
        """
        return False

    def may_truncate(
        self,
        num_unfinished: int,
        *,
        num_per_step: int,
        num_truncated_in_step: int,
        num_trained: int,
        num_truncated: int,
    ) -> bool:
        """Whether all unfinished trajectories of a step may be truncated.

        Args:
            num_unfinished: Number of unfinished trajectories.
            num_per_step: Number of trajectories per step.
            num_truncated_in_step: Trajectories truncated for this step before.
            num_trained: Trajectories trained on since this start of the run.
            num_truncated: Trajectories truncated since this start, including those being interrupted.
        """
        return False


STRAGGLERS: Registry[StragglerRule] = Registry("straggler rule", "batch.stragglers", StragglerRule)


@STRAGGLERS.register("wait")
@dataclass(frozen=True, slots=True)
class WaitForStragglers(StragglerRule):
    """Steps wait for stragglers."""


@STRAGGLERS.register("truncate")
@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateStragglers(StragglerRule):
    """Truncate all stragglers of a step once they are no more than `share` allows. Truncating only some would not help,
    because the step would wait for the others.

    Since the latest start, truncated trajectories are at most that share of the trained ones. A step may truncate one
    trajectory more than its own share, if earlier steps have used less than theirs.
    """

    patience: float = knob(1.0, "wait of the trainer, in intervals between steps, after which a step is stuck", above=0)
    share: float = knob(
        0.1,
        "largest share of the trained responses that are truncated, of each step and of all since the latest start",
        low=0,
        high=1,
    )

    truncates = True

    def waited_too_long(self, *, trainer_waited_s: float, step_interval_s: float) -> bool:
        return bool(step_interval_s) and trainer_waited_s > self.patience * step_interval_s

    def may_truncate(
        self,
        num_unfinished: int,
        *,
        num_per_step: int,
        num_truncated_in_step: int,
        num_trained: int,
        num_truncated: int,
    ) -> bool:
        fits_step = num_truncated_in_step + num_unfinished <= max(1, int(self.share * num_per_step))
        return fits_step and num_truncated + num_unfinished <= self.share * (num_trained + num_per_step)

"""Admission rules: how much new work may start. Each reproduces one system; all count in groups.

| rule | in play (reserved and finished, not the batch being trained) | late work | keeps the bound |
|---|---|---|---|
| staleflow | as many as can reserve a place | is waited for | yes |
| synchronous | one batch, while nothing trains | is waited for | yes |
| one_step | one batch, while the one before trains | is waited for | yes |
| pipeline_depth | `depth` batches (tinker-cookbook #822) | is waited for | yes |
| windowed_fifo | (1 + ahead) batches, trained in order but for a window (arXiv 2605.26494) | is waited for | yes |
| credits | (1 + alpha) batches (ROLL Flash, arXiv 2510.11345) | is dropped | yes |
| backlog | (eta + 1 + version - next step) batches (AReaL, arXiv 2505.24298) | is trained late | no |
| over_provision | (1 + excess) batches, started between steps (APRIL, arXiv 2509.18521) | is trained late | no |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from staleflow.stores.errors import ConfigError
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


class LateWork(Enum):
    """What a step does with work that is due but unfinished."""

    WAIT = "wait"
    DROP = "drop"
    TRAIN = "train"
    """Train on whatever is finished, however old: the bound is not kept."""


class Admission(RegistryEntry, ABC):
    """An admission rule."""

    __slots__ = ()
    late = LateWork.WAIT
    reserves = False
    """Whether it starts all that can reserve a place."""
    alternates = False
    """Whether rollout and training take turns."""

    @property
    def window(self) -> float:
        """How far past the oldest group a step may look for its batch, in batches; 0: anywhere."""
        return 0.0

    @property
    def keeps_bound(self) -> bool:
        """Whether no trajectory is trained on that is older than the bound allows."""
        return self.late is not LateWork.TRAIN

    def versions_behind(self, bound: int) -> int:
        """How many versions its work may lie behind, at most `bound`."""
        return bound

    def check(self, eta: int) -> None:
        """Raise ConfigError if its knobs do not fit the bound."""

    @abstractmethod
    def room(self, ledger: StalenessLedger) -> int:
        """Number of groups of the published version that may be started now, including those already queued."""

    @abstractmethod
    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        """Why a new group must not start at `version`; None if it may. A newer version is never refused where an older
        one is accepted."""


ADMISSION: Registry[Admission] = Registry("admission rule", "staleness.admission", Admission)
"""A rule may have the parameter `eta`, the bound."""


@ADMISSION.register("staleflow")
@dataclass(frozen=True, slots=True)
class Reservations(Admission):
    """StaleFlow: as many groups as can reserve a place in a staleness buffer."""

    reserves = True

    def room(self, ledger: StalenessLedger) -> int:
        return ledger.room(ledger.version)

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        return ledger.refusal(version)


class _CappedAdmission(Admission):
    """A cap on the number of groups in play."""

    __slots__ = ()

    @abstractmethod
    def cap(self, ledger: StalenessLedger) -> int:
        """Most groups that may be in play."""

    def room(self, ledger: StalenessLedger) -> int:
        left = self.cap(ledger) - ledger.num_reserved - ledger.num_occupied
        return min(ledger.room(ledger.version), max(0, left))

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        cap, in_play = self.cap(ledger), ledger.num_reserved + ledger.num_occupied
        if in_play >= cap:
            return f"{type(self).__name__.lower()}: {in_play} of {cap} groups are in play"
        return ledger.refusal(version)


@ADMISSION.register("synchronous")
@dataclass(frozen=True, slots=True)
class Synchronous(_CappedAdmission):
    """One batch at a time, sampled entirely from the version it updates: rollout and training take turns."""

    alternates = True

    def versions_behind(self, bound: int) -> int:
        return 0

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started if ledger.version == ledger.next_step else 0

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        if version < ledger.next_step:
            return f"synchronous: version {version} is not the one that step {ledger.next_step} starts from"
        return _CappedAdmission.refusal(self, ledger, version)  # super() does not know a class with slots


@ADMISSION.register("one_step")
@dataclass(frozen=True, slots=True)
class OneStep(_CappedAdmission):
    """One batch ahead: while one batch is trained, only the next one is sampled."""

    def versions_behind(self, bound: int) -> int:
        return 1

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started


@ADMISSION.register("pipeline_depth")
@dataclass(frozen=True, slots=True)
class PipelineDepth(_CappedAdmission):
    """Sampling runs at most so many batches ahead of training: staleness is kept by pacing, nothing is dropped."""

    depth: float = knob(1.0, "batches that may be sampled or waiting while one is trained; at most eta + 1", low=1)

    def check(self, eta: int) -> None:
        if self.depth > eta + 1:
            raise ConfigError(
                f"staleness.admission.depth = {self.depth:g} samples further ahead than staleness.eta = {eta} allows "
                f"to train; it must be at most {eta + 1}"
            )

    def cap(self, ledger: StalenessLedger) -> int:
        return math.ceil(self.depth * ledger.groups_started)


@ADMISSION.register("windowed_fifo")
@dataclass(frozen=True, slots=True)
class WindowedFifo(_CappedAdmission):
    """Groups are trained in the order they were drawn, except that a step may pass over unfinished ones within a window
    anchored at the oldest: P groups a step, (S + 1) P in play, the batch being trained included, and a window of
    window_share of these.

    A group is overtaken by at most W - 1 others, so it lags at most S + ceil((W - 1) / P) steps.
    """

    ahead: int = knob(1, "S, batches in play beyond the first", low=0)
    window_share: float = knob(
        0.3, "share of the groups in play that a step may choose its batch from", above=0, high=1
    )

    def check(self, eta: int) -> None:
        # W - 1 is less than window_share x (S + 1) x P, whatever P is.
        lag = self.ahead + math.ceil(self.window_share * (self.ahead + 1))
        if lag > eta:
            raise ConfigError(
                f"staleness.admission.ahead = {self.ahead} with window_share = {self.window_share:g} lets groups lag "
                f"{lag} steps, staleness.eta allows {eta}; lower ahead or raise eta"
            )

    @property
    def window(self) -> float:
        return self.window_share * (self.ahead + 1)

    def cap(self, ledger: StalenessLedger) -> int:
        trained = ledger.next_step - ledger.version  # the batch being trained holds its places until it is published
        return (self.ahead + 1 - trained) * ledger.groups_started


@ADMISSION.register("credits")
@dataclass(frozen=True, slots=True)
class Credits(_CappedAdmission):
    """ROLL Flash: B + ceil(alpha B) credits at the start, B more per step; work too old for its step is dropped.

    ceil(alpha) bounds the version gap and must not exceed eta; a fractional alpha keeps fewer groups of the oldest
    version.
    """

    alpha: float = knob(1.0, "batches in play beyond the first; rounded up, the most versions a batch may lag", low=0)

    late = LateWork.DROP

    def check(self, eta: int) -> None:
        if math.ceil(self.alpha) > eta:
            raise ConfigError(
                f"staleness.admission.alpha = {self.alpha:g} lets trajectories lag {math.ceil(self.alpha)} versions, "
                f"staleness.eta allows {eta}; lower alpha or raise eta"
            )

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started + math.ceil(self.alpha * ledger.groups_started)


@ADMISSION.register("backlog")
@dataclass(frozen=True, slots=True)
class Backlog(_CappedAdmission):
    """AReaL: (eta + version + 1) B minus what was accepted and what is running. Bounds how far ahead work starts, not
    how old it is when it is trained on."""

    eta: int = parameter()

    late = LateWork.TRAIN

    def cap(self, ledger: StalenessLedger) -> int:
        return (self.eta + 1 + ledger.version - ledger.next_step) * ledger.groups_started


@ADMISSION.register("over_provision")
@dataclass(frozen=True, slots=True)
class OverProvision(_CappedAdmission):
    """APRIL: more groups than a step needs are sampled side by side, the first to finish are trained, and the others
    go on in the next round with the tokens they have. New ones start between two steps only."""

    excess: float = knob(1.0, "groups in play beyond those a step needs, as a share of them", low=0)

    late = LateWork.TRAIN

    def cap(self, ledger: StalenessLedger) -> int:
        if ledger.version != ledger.next_step:
            return 0
        return math.ceil((1 + self.excess) * ledger.groups_started)

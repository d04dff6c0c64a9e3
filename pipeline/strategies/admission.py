"""Admission rules: how much new work may start. Each reproduces one system; all count in groups.

| rule | in play (reserved and finished, not the batch being trained) | late work | keeps the bound |
|---|---|---|---|
| staleflow | as many as can reserve a place | is waited for | yes |
| synchronous | one batch, while nothing trains | is waited for | yes |
| one_step | one batch, while the one before trains | is waited for | yes |
| credits | (1 + alpha) batches (ROLL Flash, arXiv 2510.11345) | is dropped | yes |
| backlog | (eta + 1 + version - next step) batches (AReaL, arXiv 2505.24298) | is trained late | no |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stores.errors import ConfigError
from stores.staleness import StalenessLedger
from stores.trajectory import PolicyVersion
from tasks.knobs import knob
from tasks.registry import Registry


class Late(Enum):
    """What a step does with work that is due but unfinished."""

    WAIT = "wait"
    DROP = "drop"
    TRAIN = "train"
    """Train on whatever is finished, however old: the bound is not kept."""


class Admission(Protocol):
    @property
    def late(self) -> Late: ...

    def room(self, ledger: StalenessLedger) -> int:
        """Number of groups of the published version that may be started now, including those already queued."""
        ...

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        """Why a new group must not start at `version`; None if it may. A newer version is never refused where an older
        one is accepted."""
        ...


ADMISSION: Registry[Admission] = Registry("admission rule", "staleness.admission", contract=Admission)
"""A rule may ask for `eta`, the bound."""


@ADMISSION.register("staleflow")
class Reservations:
    """StaleFlow: as many groups as can reserve a place in a staleness buffer."""

    late = Late.WAIT

    def room(self, ledger: StalenessLedger) -> int:
        return ledger.room(ledger.version)

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        return ledger.refusal(version)


class _CappedAdmission(ABC):
    """A cap on the number of groups in play."""

    late = Late.WAIT

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
class Synchronous(_CappedAdmission):
    """One batch at a time, sampled entirely from the version it updates: rollout and training take turns."""

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started if ledger.version == ledger.next_step else 0

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        if version < ledger.next_step:
            return f"synchronous: version {version} is not the one that step {ledger.next_step} starts from"
        return super().refusal(ledger, version)


@ADMISSION.register("one_step")
class OneStep(_CappedAdmission):
    """One batch ahead: while one batch is trained, only the next one is sampled."""

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started


@ADMISSION.register("credits")
@dataclass(frozen=True, slots=True)
class Credits(_CappedAdmission):
    """ROLL Flash: B + ceil(alpha B) credits at the start, B more per step; work too old for its step is dropped.

    ceil(alpha) bounds the version gap and must not exceed eta; a fractional alpha keeps fewer groups of the oldest
    version.
    """

    eta: int
    alpha: float = knob(
        1.0, "credits: batches in play beyond the first; rounded up, the most versions a batch may lag", low=0
    )

    late = Late.DROP

    def __post_init__(self) -> None:
        if math.ceil(self.alpha) > self.eta:
            raise ConfigError(
                f"staleness.alpha = {self.alpha:g} lets trajectories lag {math.ceil(self.alpha)} versions, "
                f"staleness.eta allows {self.eta}; lower alpha or raise eta"
            )

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started + math.ceil(self.alpha * ledger.groups_started)


@ADMISSION.register("backlog")
@dataclass(frozen=True, slots=True)
class Backlog(_CappedAdmission):
    """AReaL: (eta + version + 1) B minus what was accepted and what is running. Bounds how far ahead work starts, not
    how old it is when it is trained on."""

    eta: int

    late = Late.TRAIN

    def cap(self, ledger: StalenessLedger) -> int:
        return (self.eta + 1 + ledger.version - ledger.next_step) * ledger.groups_started

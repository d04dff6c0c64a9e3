"""Admission rules: how much new work may start. A job names one of them; each keeps the staleness bound, and a step
waits for late work. All count in groups.

| rule | in play (reserved and finished, not the batch being trained) |
|---|---|
| staleflow | as many as can reserve a place |
| synchronous | one batch, while nothing trains |

Rules of other systems, which only simulations have, are in `pipeline/simulator/baselines.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import PolicyVersion
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

    @abstractmethod
    def num_reservable(self, ledger: StalenessLedger) -> int:
        """Number of groups of the published version that may be started now, including those already queued."""

    @abstractmethod
    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        """Why a new group must not start at `version`; None if it may. A newer version is never refused where an older
        one is accepted."""


SIMULATED = ("one_step", "pipeline_depth", "windowed_fifo", "credits", "backlog", "over_provision")
"""Rules of other systems, which a job cannot name."""
ADMISSION: Registry[Admission] = Registry(
    "admission rule",
    "staleness.admission",
    Admission,
    elsewhere=dict.fromkeys(
        SIMULATED,
        "imitates another system, for comparisons in simulations alone; use staleflow in the job, and compare with "
        "`staleflow simulate JOB --baselines` or benchmarks/simulated.py",
    ),
)


@ADMISSION.register("staleflow")
@dataclass(frozen=True, slots=True)
class Reservations(Admission):
    """StaleFlow: as many groups as can reserve a place in a staleness buffer."""

    reserves = True

    def num_reservable(self, ledger: StalenessLedger) -> int:
        return ledger.num_reservable(ledger.version)

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        return ledger.refusal(version)


class CappedAdmission(Admission):
    """A cap on the number of groups in play."""

    __slots__ = ()

    @abstractmethod
    def cap(self, ledger: StalenessLedger) -> int:
        """Most groups that may be in play."""

    def num_reservable(self, ledger: StalenessLedger) -> int:
        num_free = self.cap(ledger) - ledger.num_reserved - ledger.num_occupied
        return min(ledger.num_reservable(ledger.version), max(0, num_free))

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        cap, in_play = self.cap(ledger), ledger.num_reserved + ledger.num_occupied
        if in_play >= cap:
            return f"{type(self).__name__.lower()}: {in_play} of {cap} groups are in play"
        return ledger.refusal(version)


@ADMISSION.register("synchronous")
@dataclass(frozen=True, slots=True)
class Synchronous(CappedAdmission):
    """One batch at a time, sampled entirely from the version it updates: rollout and training take turns."""

    def versions_behind(self, bound: int) -> int:
        return 0

    def cap(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started if ledger.version == ledger.next_step else 0

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        if version < ledger.next_step:
            return f"synchronous: version {version} is not the one that step {ledger.next_step} starts from"
        return CappedAdmission.refusal(self, ledger, version)  # super() does not know a class with slots

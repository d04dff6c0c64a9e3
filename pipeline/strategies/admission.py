"""Admission rules, which limit how much new work starts. A job names one of them. Under both, no trained trajectory is
older than the staleness bound allows, and a step waits for unfinished groups that it must train on. All numbers are
numbers of groups.

| rule | groups in flight (reserved and finished, without the batch being trained) |
|---|---|
| staleflow | as many as can reserve an entry |
| synchronous | one batch, while no step is trained |

Rules of other systems, for simulations only, are in `pipeline/simulator/baselines.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.settings.registry import Registry, RegistryEntry


class Admission(RegistryEntry, ABC):
    """An admission rule."""

    __slots__ = ()
    keeps_bound = True
    """Whether no trained trajectory is older than the bound allows."""
    awaits_due_groups = True
    """Whether a step waits for groups that are due but unfinished."""
    starts_all_reservable = False
    """Whether the rule starts all groups that can reserve an entry."""

    def make_ledger(self, **sizes: Any) -> StalenessLedger:
        """Create the ledger of a run under this rule. sizes: arguments of StalenessLedger."""
        return StalenessLedger(**sizes)

    def max_versions_behind(self, bound: int) -> int:
        """Number of versions that work may lag behind, at most `bound`."""
        return bound

    @abstractmethod
    def num_startable(self, ledger: StalenessLedger) -> int:
        """Number of groups that may start under the published version now. Groups that are queued without an entry
        count among them."""

    @abstractmethod
    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        """The reason why a new group must not start under `version`; None if it may. If an older version is accepted,
        so is a newer one."""


SIMULATED_RULES = ("one_step", "pipeline_depth", "windowed_fifo", "credits", "backlog", "over_provision")
"""Rules of other systems, which a job cannot name."""
ADMISSION: Registry[Admission] = Registry(
    "admission rule",
    "staleness.admission",
    Admission,
    unavailable=dict.fromkeys(
        SIMULATED_RULES,
        "imitates another system, for comparisons in simulations alone; use staleflow in the job, and compare with "
        "`staleflow simulate JOB --baselines` or benchmarks/simulated.py",
    ),
)


@ADMISSION.register("staleflow")
@dataclass(frozen=True, slots=True)
class ReservationAdmission(Admission):
    """StaleFlow: as many groups as can reserve an entry in a staleness buffer."""

    starts_all_reservable = True

    def num_startable(self, ledger: StalenessLedger) -> int:
        return ledger.num_reservable(ledger.version)

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        return ledger.reservation_refusal(version)


class CappedAdmission(Admission):
    """A limit on the number of groups in flight."""

    __slots__ = ()

    @abstractmethod
    def max_in_flight(self, ledger: StalenessLedger) -> int:
        """Maximum number of groups in flight."""

    def num_startable(self, ledger: StalenessLedger) -> int:
        num_free = self.max_in_flight(ledger) - ledger.num_reserved - ledger.num_occupied
        return min(ledger.num_reservable(ledger.version), max(0, num_free))

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        max_in_flight, in_flight = self.max_in_flight(ledger), ledger.num_reserved + ledger.num_occupied
        if in_flight >= max_in_flight:
            return f"{type(self).__name__.lower()}: {in_flight} of {max_in_flight} groups are in flight"
        return ledger.reservation_refusal(version)


@ADMISSION.register("synchronous")
@dataclass(frozen=True, slots=True)
class Synchronous(CappedAdmission):
    """One batch at a time, sampled entirely from the version that it updates: rollout and training alternate."""

    def max_versions_behind(self, bound: int) -> int:
        return 0

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started_per_step if ledger.version == ledger.next_step else 0

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        if version < ledger.next_step:
            return f"synchronous: version {version} is not the one that step {ledger.next_step} starts from"
        return CappedAdmission.refusal(self, ledger, version)  # slots=True replaces the class, which breaks super()

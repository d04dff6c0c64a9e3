"""How much new work may start. The ledger's bound holds under every rule; a rule can only be stricter."""

from __future__ import annotations

from typing import Protocol

from stores.staleness import StalenessLedger
from stores.trajectory import PolicyVersion


class Admission(Protocol):
    def room(self, ledger: StalenessLedger) -> int:
        """How many groups of the published version may be started now, those already queued included."""
        ...

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        """Why a fresh group must not start at `version`; None if it may."""
        ...


class Reservations:
    """StaleFlow: as much as can be promised a place."""

    def room(self, ledger: StalenessLedger) -> int:
        return ledger.room(ledger.version)

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        return ledger.refusal(version)


class Synchronous:
    """One batch at a time, all of it from the version that will train on it: rollout and training take turns."""

    def room(self, ledger: StalenessLedger) -> int:
        if ledger.version < ledger.next_step:
            return 0
        in_batch = ledger.num_reserved + ledger.num_occupied
        return min(ledger.room(ledger.version), max(0, ledger.groups_started - in_batch))

    def refusal(self, ledger: StalenessLedger, version: PolicyVersion) -> str | None:
        if version < ledger.next_step:
            return f"synchronous: version {version} is not the one step {ledger.next_step} starts from"
        if self.room(ledger) == 0:
            return f"synchronous: the batch of step {ledger.next_step} is complete"
        return ledger.refusal(version)


ADMISSION_NAMES = ("staleflow", "synchronous")


def make_admission(name: str) -> Admission:
    """The admission rule called `name`."""
    match name:
        case "staleflow":
            return Reservations()
        case "synchronous":
            return Synchronous()
        case _:
            raise ValueError(f"no admission rule {name!r}; there are {', '.join(ADMISSION_NAMES)}")

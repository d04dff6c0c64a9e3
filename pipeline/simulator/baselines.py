"""Admission rules of other systems, for comparison in simulations. Jobs cannot name them, since some guarantee no
bound. Rules that only tables use are in benchmarks/admission_rules.py. Pure.

| rule | in play (reserved and finished, not the batch being trained) | late work | keeps the bound |
|---|---|---|---|
| one_step | one batch, while the one before trains | is waited for | yes |
| credits | (1 + alpha) batches (ROLL Flash, arXiv 2510.11345) | is dropped | yes |
| backlog | (eta + 1 + version - next step) batches (AReaL, arXiv 2505.24298) | is trained late | no |

    config = with_admission(config, Credits(alpha=2.0))
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.strategies.admission import Admission, CappedAdmission, Synchronous
from staleflow.stores.errors import ConfigError
from staleflow.stores.staleness.ledger import UNLIMITED, StalenessLedger


class DroppingLedger(StalenessLedger):
    """A ledger whose steps begin as soon as enough groups are finished. Any number of groups can be reserved, and those
    that are due but unfinished are aborted: no group is trained beyond the ledger's eta, but reserved work may be
    lost."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._reservations_per_step = UNLIMITED

    def is_batch_ready(self) -> bool:
        return self._has_batch()


class Baseline(CappedAdmission):
    """An admission rule of another system."""

    __slots__ = ()

    def make_ledger(self, **sizes: Any) -> StalenessLedger:
        return StalenessLedger(**sizes) if self.awaits_due_groups else DroppingLedger(**sizes)

    def check(self, eta: int) -> None:
        """Raise ConfigError if the rule's settings contradict the bound."""


def with_admission(config: RunConfig, rule: Admission) -> RunConfig:
    """A copy of a job with another admission rule, for simulations only. Raises ConfigError if it contradicts the
    bound."""
    if isinstance(rule, Baseline):
        rule.check(config.staleness.eta)
    return dataclasses.replace(config, staleness=dataclasses.replace(config.staleness, admission=rule))


@dataclass(frozen=True, slots=True)
class OneStep(Baseline):
    """One batch ahead: while a batch is trained, only the next one is sampled."""

    def max_versions_behind(self, bound: int) -> int:
        return min(1, bound)

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started_per_step


@dataclass(frozen=True, slots=True)
class Credits(Baseline):
    """ROLL Flash: B + ceil(alpha B) credits at the start, and B more per step. Work that lags more than eta versions is
    dropped.

    A group that is not overtaken lags at most ceil(alpha) versions, which must not exceed eta; a fractional alpha keeps
    fewer groups of the oldest version.
    """

    alpha: float = 1.0
    """Batches in play beyond the first, >= 0."""

    awaits_due_groups = False

    def check(self, eta: int) -> None:
        if math.ceil(self.alpha) > eta:
            raise ConfigError(
                f"alpha = {self.alpha:g} lets trajectories lag {math.ceil(self.alpha)} versions, "
                f"staleness.eta allows {eta}; lower alpha or raise eta"
            )

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        return ledger.groups_started_per_step + math.ceil(self.alpha * ledger.groups_started_per_step)


@dataclass(frozen=True, slots=True)
class Backlog(Baseline):
    """AReaL: (eta + version + 1) B minus the accepted and running work. Limits how far ahead work starts, not how old
    it is when it is trained on."""

    eta: int

    awaits_due_groups = keeps_bound = False

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        return (self.eta + 1 + ledger.version - ledger.next_step) * ledger.groups_started_per_step


def baseline_rules(eta: int) -> dict[str, Admission]:
    """The admission rules with which `simulate --baselines` compares a job at the same bound, by label: this project's
    rule for synchronous training, and the rules of other systems."""
    return {
        "synchronous": Synchronous(),
        "one step ahead": OneStep(),
        "credits (ROLL Flash)": Credits(alpha=float(eta)),
        "backlog (AReaL)": Backlog(eta=eta),
    }

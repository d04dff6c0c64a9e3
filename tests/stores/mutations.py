"""Deliberate faults in the protocol. The random operations of tests/stores/ledger_machine.py must detect each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import staleflow.stores.staleness.ledger


@dataclass(frozen=True)
class Mutation:
    """Replaces `old` by `new` in the protocol's source; `breaks` says which promise that gives up."""

    name: str
    breaks: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        name="late_deadline",
        breaks="the bound: work may train one step later than eta allows",
        old="return min(version + self.eta, self.num_steps - 1)",
        new="return min(version + self.eta + 1, self.num_steps - 1)",
    ),
    Mutation(
        name="no_wait_for_due_work",
        breaks="no reserved work is wasted: a step leaves behind work that is due",
        old="if due - picked > self.groups_started * (step - self.next_step) + allowance:",
        new="if due - picked > self.groups_started * (step - self.next_step + 1) + allowance:",
    ),
    Mutation(
        name="newest_first",
        breaks="the bound: fresh work trains first, old work is stranded",
        old="for version in sorted(self._occupied):\n            for group in self._occupied[version]:",
        new="for version in sorted(self._occupied, reverse=True):\n            for group in self._occupied[version]:",
    ),
    Mutation(
        name="forgotten_surplus",
        breaks="conservation: surplus members of a complete group end without being counted",
        old="surplus = (*entry.completed[self.group_size :], *sorted(entry.waiting))",
        new="surplus = ()",
    ),
    Mutation(
        name="version_never_lowered",
        breaks="the bound: a member of an older version does not lower its group's version",
        old="elif version < entry.version:",
        new="elif version > entry.version:",
    ),
    Mutation(
        name="promise_one_too_many",
        breaks="no reserved work is wasted: more is promised than fits",
        old="            if promises_left <= 0:",
        new="            if promises_left < 0:",
    ),
    Mutation(
        name="hopeless_work_kept",
        breaks="surplus in flight is aborted at once",
        old="return (*endings, *self._shed())",
        new="return endings",
    ),
)


def mutated_ledger(mutation: Mutation) -> Any:
    """The ledger class of a mutated copy of the protocol."""
    path = staleflow.stores.staleness.ledger.__file__
    assert path is not None
    source = Path(path).read_text()
    assert source.count(mutation.old) == 1, (
        f"{mutation.name}: the source has changed, {source.count(mutation.old)} matches"
    )
    module = ModuleType(f"mutated_{mutation.name}")
    module.__dict__["__name__"] = "staleflow.stores.staleness.ledger"  # dataclasses look their module up
    exec(compile(source.replace(mutation.old, mutation.new), path, "exec"), module.__dict__)
    return module.__dict__["StalenessLedger"]

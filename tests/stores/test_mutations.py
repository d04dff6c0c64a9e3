"""Deliberate faults in the protocol: every one is detected by random operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from staleflow.stores.errors import ProtocolViolation
from tests.stores.ledger_machine import LedgerMachine
from tests.stores.mutations import MUTATIONS, Mutation, mutated_ledger


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation: Mutation) -> None:
    machine = type("MutatedMachine", (LedgerMachine,), {"ledger_class": mutated_ledger(mutation)})
    # No shrinking: that it is found counts, not how short the story is.
    result = settings(
        max_examples=1000, phases=[Phase.generate], deadline=None, report_multiple_bugs=False, database=None
    )
    # pytest.fail.Exception: a verb that had to be refused was not.
    with pytest.raises((AssertionError, ProtocolViolation, ExceptionGroup, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=result)


def test_the_protocol_rebuilt_from_its_source_unchanged_passes() -> None:
    """The control: what catches the mutations is what they break, not how they are made."""
    same = replace(MUTATIONS[0], name="none", new=MUTATIONS[0].old)
    machine = type("ControlMachine", (LedgerMachine,), {"ledger_class": mutated_ledger(same)})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, deadline=None, database=None))

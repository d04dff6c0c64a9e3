"""A broken protocol does not pass: every deliberate mutation is caught by the random lives."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.ledger_machine import LedgerMachine
from tests.mutations import MUTATIONS, Mutation, mutated_ledger


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation: Mutation) -> None:
    machine = type("MutatedMachine", (LedgerMachine,), {"ledger_class": mutated_ledger(mutation)})
    # No shrinking: that it is found counts, not how short the story is.
    found = settings(
        max_examples=1000, phases=[Phase.generate], deadline=None, report_multiple_bugs=False, database=None
    )
    with pytest.raises(BaseException) as caught:  # noqa: PT011  an assertion, a violation, or a group of them
        run_state_machine_as_test(machine, settings=found)
    assert not isinstance(caught.value, KeyboardInterrupt)

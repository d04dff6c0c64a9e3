"""Deliberate faults in driver, link and actors: every one is detected by the check it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.stores.errors import StaleflowError
from tests.runtime.mutations import MUTATIONS, Mutation, mutated_runtime
from tests.support.bodies import Body

CAUGHT = (AssertionError, StaleflowError, KeyError, ValueError, pytest.fail.Exception)
"""How a check fails: its own assertions, Deadlock and LeftOver among them; what ended the run; what was not raised."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    body = Body(tmp_path, mutated_runtime(mutation))
    with pytest.raises(CAUGHT):
        mutation.check(body)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_runtime_rebuilt_from_its_source_unchanged_passes(mutation: Mutation, tmp_path: Path) -> None:
    """The control: what is caught is what a mutation breaks, not how it is made."""
    mutation.check(Body(tmp_path, mutated_runtime(replace(mutation, new=mutation.old))))

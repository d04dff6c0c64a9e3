"""Examples in docstrings are correct."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

NEEDS_A_RUN = Path("pipeline/api/stored_run.py")
"""Its examples open a stored run."""
EXAMPLES = sorted(
    path
    for folder in ("cli", "pipeline", "tasks", "stores")
    for path in Path(folder).rglob("*.py")
    if ">>> " in path.read_text() and path != NEEDS_A_RUN
)


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_the_examples_of_a_module_are_correct(path: Path) -> None:
    module = importlib.import_module(".".join(("staleflow", *path.with_suffix("").parts)))
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed

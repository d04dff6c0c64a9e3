"""Verification that repeats steps in the process of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from staleflow.pipeline.stored_runs import offline_verification, verification


@pytest.fixture(autouse=True)
def repeat_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture for tests of a module that imports it."""

    def run(function: Callable[..., Any], plan: Any, ranks: int, client: Any, report: Any) -> Any:
        return function(plan, report)

    monkeypatch.setattr(verification, "run_training", run)
    monkeypatch.setattr(offline_verification, "run_training", run)

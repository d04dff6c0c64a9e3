"""Verification that repeats steps in the process of the test."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.pipeline.stored_runs import offline_verification, verification
from staleflow.pipeline.stored_runs.repeated_steps import RepetitionPlan, RepetitionResult, repeat


@pytest.fixture(autouse=True)
def repeat_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture for tests of a module that imports it."""

    def run(plan: RepetitionPlan, client: Any, report: Any) -> RepetitionResult:
        return repeat(plan, report)

    monkeypatch.setattr(verification, "run_repetition", run)
    monkeypatch.setattr(offline_verification, "run_repetition", run)

"""A stored run as one object."""

from __future__ import annotations

from pathlib import Path

import staleflow
from tests.support.stored_runs import Response, StoredRun


def three_steps(folder: Path) -> StoredRun:
    """A run of three steps of one group each, whose end is stored."""
    run = StoredRun(folder)
    for step in range(3):
        run.train([(f"{step}+1=", [Response(str(step + 1), 1.0), Response("no", 0.0)])])
    run.end()
    return run


def test_steps_and_metrics(tmp_path: Path) -> None:
    run = staleflow.open_run(three_steps(tmp_path).run_dir)
    assert [step.step for step in run.steps()] == [0, 1, 2]
    assert run.metrics().reward.tolist() == [0.5, 0.5, 0.5]
    assert run.audit().clean
    assert len(run.to_pandas()) == 6

"""Runs with a model on processes whose trainer and instances take turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_run import check, run

ONE = (
    "rollout.instances=1", "rollout.engine.max_running=1", "staleness.eta=0", "steps=3", "task.eval_prompts=0",
)  # fmt: skip


def fingerprints(job: Path, *overrides: str) -> list[str]:
    end = run(job, *ONE, *overrides)
    return [record.weight_fingerprint for record in check(end.run_dir, 3).commits() if record.kind == "step"]


@pytest.mark.slow
def test_weights_equal_those_of_separate_gpus(job: Path) -> None:
    """At eta = 0 one instance with one request at a time gives the same result in both layouts."""
    apart = fingerprints(job, "name=apart")
    assert fingerprints(job, "name=turns", "cluster.layout=turns") == apart
    assert len(set(apart)) == 3

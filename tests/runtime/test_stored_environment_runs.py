"""Runs with environments in the versioned store."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EnvSpan
from tests.runtime.test_environment_runs import AGENTS
from tests.stores.plain_audit import plain_audit
from tests.support.bodies import Body


def test_a_run_with_environments_is_stored_and_passes_the_audit(tmp_path: Path) -> None:
    run = Body(tmp_path / "runs").run(*AGENTS, "simulation.failed_step_share=0.1")
    rows = list(run.store.trajectories())
    store = VersionedStore.create(tmp_path / "s", run.store.header)
    left = iter(rows)
    for record in run.store.commits():
        store.commit(record, list(itertools.islice(left, record.num_rows)))
    store = VersionedStore.open(tmp_path / "s")
    for stored, row in zip(store.trajectories(), rows, strict=True):
        first, second = stored.trajectory, row.trajectory
        for name in ("prompt_tokens", "response_tokens", "logprobs", "versions", "sampled"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert [(s.role, len(s.tokens)) for s in first.spans if isinstance(s, EnvSpan)] == [
            (s.role, len(s.tokens)) for s in second.spans if isinstance(s, EnvSpan)
        ]
        assert first.environment_s == pytest.approx(second.environment_s, abs=1e-5)
    assert audit(store).findings == plain_audit(store).findings == ()
    columns = store.displayed_columns()
    consumed = columns["fate"] == "consumed"
    assert columns["turns"][consumed].max() > 1
    steps = [r for r in store.commits() if r.kind == "step"]
    for record in steps:
        batch = consumed & (columns["step"] == record.step)
        for name in ("given_tokens", "response_tokens"):
            assert record.metrics[name] == columns[name][batch].sum()
        assert record.metrics["turns_mean"] == columns["turns"][batch].mean()
        np.testing.assert_allclose(record.metrics["tool_s"], columns["tool_s"][batch].mean(), rtol=1e-6)


def test_environments_with_empty_observations_finish_the_run(tmp_path: Path) -> None:
    """Without a template an empty observation has no tokens; the turn counted as unanswered and its environment was
    called again for ever."""
    run = Body(tmp_path / "runs").run(*AGENTS, "workload.tool_tokens=0")
    run.check()
    rows = [row.trajectory for row in run.store.trajectories()]
    assert max(len(t.turns) for t in rows) > 1
    assert not any(t.num_given for t in rows)

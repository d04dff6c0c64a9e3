"""Simulations from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import staleflow
from staleflow.pipeline.api import simulating
from tests.api.test_running import LastInstance, emulated


def test_a_sweep_with_baselines_returns_a_result_per_variant(tmp_path: Path) -> None:
    job = emulated(tmp_path, steps=6)
    results = staleflow.simulate(job, sweep={"staleness.eta": [0, 2]}, baselines=True)
    assert [result.label for result in results][:3] == ["eta=0", "eta=2", "synchronous"]
    assert len(results) == 6
    assert all(result.stats.tokens_per_s > 0 for result in results)
    assert [result.variant.job.staleness.eta for result in results[:2]] == [0, 2]
    assert "eta=2: " in str(results[1])


class AnyInstance(LastInstance):
    """Another routing rule defined in a notebook."""


def test_a_sweep_accepts_classes(tmp_path: Path) -> None:
    job = emulated(tmp_path, steps=2)
    results = staleflow.simulate(job, sweep={"rollout.routing": ["deadline", LastInstance, AnyInstance]})
    assert [result.label for result in results] == ["routing=deadline", "routing=LastInstance", "routing=AnyInstance"]
    assert results[1].variant.job.rollout.routing.name.endswith("LastInstance.py:LastInstance")


@pytest.mark.parametrize("sweep", [{"staleness.eta": 3}, {"staleness.eta": "0,1"}, "staleness.eta=0,1"])
def test_a_sweep_without_lists_gives_a_one_line_error(tmp_path: Path, sweep: Any) -> None:
    with pytest.raises(staleflow.ConfigError, match=r"^sweep = .*: expected lists of values by key, such as "):
        staleflow.simulate(emulated(tmp_path), sweep=sweep)


def test_a_stored_run_is_simulated_with_its_recorded_workload(tmp_path: Path, stored: Path) -> None:
    run = staleflow.open_run(stored)
    (result,) = staleflow.simulate(run, overrides={"staleness.eta": 2})
    workload: Any = result.variant.job.workload
    assert (workload.kind, workload.run) == ("recorded", str(stored))
    assert result.variant.job.staleness.eta == 2
    (named,) = staleflow.simulate(stored)
    assert named.variant.job.workload == workload


def test_a_run_whose_store_is_in_a_bucket_is_opened_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(source: Path) -> None:
        raise staleflow.ConfigError(f"opened {source}")

    monkeypatch.setattr(simulating, "open_run", opened)
    (tmp_path / "store").write_text("s3://bucket/runs/a\n")
    with pytest.raises(staleflow.ConfigError, match=f"^opened {tmp_path}$"):
        staleflow.simulate(tmp_path)


def test_a_script_without_a_main_guard_may_sweep(tmp_path: Path) -> None:
    job = emulated(tmp_path) | {"runs_dir": str(tmp_path / "runs")}
    (tmp_path / "sweep.py").write_text(
        f"import staleflow\nprint('executed')\nprint(len(staleflow.simulate({job}, sweep=dict(seed=[1, 2]))))\n"
    )
    run = subprocess.run([sys.executable, "sweep.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout.splitlines(), run.stderr) == (["executed", "2"], "")

"""The whole system without a model, on a real cluster: what only an emulated engine can be made to do on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import actor_settings, loading
from pipeline.simulator.body import SimulatedRun
from stores.base import RunHeader
from tests.runtime.test_run import check, run

JOB = """
name = "dry"
runs_dir = "{runs}"
steps = 5
seed = 2

[batch]
groups_per_step = 6
group_size = 4

[staleness]
eta = 2

[rollout]
instances = 2
max_new_tokens = 400

[rollout.engine]
name = "emulated"
max_running = 64
kv_tokens = 20000

[workload]
median = 60
prompt_tokens = 20

[simulation]
train_s = 0.3
pull_s = 0.02

[cluster]
dashboard = false

[deadlines]
call_s = 30
stuck_s = 60
"""


@pytest.fixture
def dry(tmp_path: Path) -> Path:
    path = tmp_path / "dry.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs"))
    return path


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_a_dry_run_consumes_what_the_simulator_foretells(dry: Path) -> None:
    """The same file, the same coordinator, the same responses: the same trajectories are routed, scored and trained."""
    end = run(dry, "rollout.routing=deadline")
    check(end.run_dir, 5)
    config = loading.load(dry, ("rollout.routing=deadline",))
    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    summary = summary_of(end.run_dir)
    assert {k: summary["commands"][k] for k in ("Route", "Score", "Train")} == {
        k: trace.commands[k] for k in ("Route", "Score", "Train")
    }
    assert summary["response_tokens"] == sum(s.tokens for s in trace.steps)
    assert summary["forecast"]["count"] == 5 * 24
    assert summary["seconds"]["decide_s"] > 0


def test_stragglers_are_interrupted_on_a_real_cluster_and_go_on_elsewhere(dry: Path) -> None:
    end = run(
        dry, "workload.kind=bimodal", "workload.long_share=0.05", "workload.long_ratio=40.0", "workload.median=20",
        "batch.stragglers=retry", "batch.straggler_patience=0.1", "batch.straggler_share=1", "steps=6",
        "rollout.max_new_tokens=900",
    )  # fmt: skip
    store = check(end.run_dir, 6)
    commands = summary_of(end.run_dir)["commands"]
    assert commands["Interrupt"] > 0
    rows = list(store.ended())
    moved = [r for r in rows if len({s.instance for s in r.trajectory.segments}) > 1]
    assert moved, "no trajectory has segments of two instances"
    workload = actor_settings.make_workload(loading.load(end.run_dir / "config.toml"))
    for row in rows:
        if row.trajectory.v_traj >= 0 and row.step >= 0 and row.loss_mask:
            group, member = divmod(row.trajectory.id, 4)
            assert row.trajectory.num_tokens == workload.turns(group, member)[0].tokens


@pytest.mark.parametrize(("admission", "eta"), [("credits", 2), ("backlog", 5)])
def test_peers_rules_run_too_and_the_store_records_the_bound_they_keep(dry: Path, admission: str, eta: int) -> None:
    end = run(dry, f"staleness.admission={admission}", "staleness.alpha=2", "workload.sigma=1.2")
    header: RunHeader = check(end.run_dir, 5).header
    assert header.eta == eta

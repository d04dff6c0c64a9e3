"""Runs without a model on a real cluster, in situations that only an emulated engine can produce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.api.dry_running import DryRunResult
from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from tests.runtime.test_run import check, run, staleflow

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
def dry_job(tmp_path: Path) -> Path:
    path = tmp_path / "dry.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs"))
    return path


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_a_dry_run_consumes_the_trajectories_of_the_simulation(dry_job: Path) -> None:
    """Job, coordinator and responses are the same, so the same trajectories are routed, scored and trained."""
    end = run(dry_job, "rollout.routing=deadline")
    check(end.run_dir, 5)
    config = loading.load(dry_job, ("rollout.routing=deadline",))
    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    summary = summary_of(end.run_dir)
    assert {k: summary["commands"][k] for k in ("Route", "Score", "Train")} == {
        k: trace.command_counts[k] for k in ("Route", "Score", "Train")
    }
    assert summary["response_tokens"] == sum(s.tokens for s in trace.steps)
    assert summary["seconds"]["decide_s"] > 0


def test_a_trial_of_a_user_job_runs_on_random_responses_and_leaves_no_files(job: Path, tmp_path: Path) -> None:
    """The trial uses the prompts and the reward of the job on any machine."""
    (tmp_path / "mine.py").write_text(
        "def picky(answer, record):\n"
        "    assert isinstance(answer, str) and record['question']\n"
        "    if len(answer) % 3 == 1:\n        raise ValueError('not this one')\n"
        "    return float(len(answer))\n"
    )
    before = sorted(tmp_path.iterdir())
    sizes = ("steps=400", "batch.groups_per_step=500", "rollout.instances=40", "model.device=cuda")
    kept = ("rollout.min_instances=40", "evaluation.best_checkpoint_set=held-out", "store=s3://no-bucket/runs")
    overrides = [x for o in (*sizes, *kept, f"reward.function={tmp_path}/mine.py:picky") for x in ("--set", o)]
    answer = staleflow("run", job, "--dry-run", "--json", *overrides)
    assert answer.returncode == 0, answer.stderr
    parsed = json.loads(answer.stdout)
    assert (parsed["steps"], parsed["findings"]) == (3, [])
    error = "ValueError: not this one (mine.py, line 4)"
    assert list(parsed["reward_errors"]) == [error]
    assert parsed["num_scored"] + parsed["reward_errors"][error] >= 3 * 8 * 4
    assert parsed["reward_range"][0] < parsed["reward_range"][1]
    assert parsed["first_prompt"].endswith("=")
    assert 0 < parsed["prompt_length_range"][0] <= parsed["prompt_length_range"][1] < 64
    assert sorted(tmp_path.iterdir()) == before


def test_the_first_prompt_is_shown_with_its_white_space_up_to_a_length() -> None:
    def shorten(prompt: str) -> str:
        result = DryRunResult(
            steps=3, prompt_length_range=(1, 2), first_prompt=prompt, num_scored=1, reward_range=(0.0, 1.0),
            reward_errors={}, findings=(),
        )  # fmt: skip
        return result.lines[1].strip()

    assert shorten("a  b\n\nc") == r"the first: 'a  b\n\nc'"
    assert shorten("x" * 2000).endswith("xxx... (2000 characters)")

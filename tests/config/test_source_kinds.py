"""A job means the same to every command: the kind of its source and whether it has an environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from staleflow.cli.main import cli
from staleflow.pipeline.api.dry_running import make_dry_job
from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.cross_checks import check_key_combinations
from staleflow.pipeline.config.factories import make_strategies

AGENT = "examples/agent.toml"


def test_has_environment_is_equal_for_every_command(tmp_path: Path) -> None:
    """`run` and the dry run resolve paths of the job first, `simulate` and `profile` do not."""
    loaded = loading.load(AGENT)
    located = user_files.with_absolute_paths(loaded)
    tried = make_dry_job(loading.load(AGENT, (f"model.path={tmp_path}",)), tmp_path)
    assert located.has_environment
    assert loaded.has_environment
    assert tried.has_environment
    assert make_strategies(loaded).has_environments
    answer = CliRunner().invoke(cli, ["config", "explain", AGENT, "--no-check", "--json"])
    assert {row["key"]: row["value"] for row in json.loads(answer.output)}["has_environment"] is True


DRY_JOBS = (
    ("store=s3://bucket/prefix",),
    ("rollout.instances=4", "rollout.min_instances=4", "rollout.max_instances=4"),
    ("evaluation.best_checkpoint_set=held-out", "task.eval_prompts=4"),
    ("batch.groups_per_step=100", "training.minibatches=100", "batch.extra_groups=50"),
    ("rollout.engine=vllm", "rollout.engine.speculation.num_speculative_tokens=2", "rollout.engine.page_tokens=256"),
    ("training.lora.rank=4", "rollout.on_pull=adapter"),
    ("cluster.kind=address", "cluster.address=tcp://host:1"),
    ("cluster.layout=turns", "training.ranks=2", "training.offload=true"),
)


@pytest.mark.parametrize("overrides", DRY_JOBS, ids=lambda overrides: overrides[0])
def test_the_dry_run_of_a_valid_job_is_a_valid_job_that_keeps_nothing(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    tried = make_dry_job(loading.load(AGENT, (f"model.path={tmp_path}", *overrides)), tmp_path)
    check_key_combinations(tried, "dry")
    assert (tried.store, tried.runs_dir) == ("", str(tmp_path))

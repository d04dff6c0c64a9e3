"""A job means the same to every command: the kind of its source and whether it has an environment."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from staleflow.cli.main import cli
from staleflow.pipeline.api.dry_running import make_dry_settings
from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.factories import make_strategies

AGENT = "examples/agent.toml"


def test_has_environment_is_equal_for_every_command(tmp_path: Path) -> None:
    """`run` and the dry run resolve paths of the job first, `simulate` and `profile` do not."""
    loaded = loading.load(AGENT)
    located = user_files.with_absolute_paths(loaded)
    tried = make_dry_settings(loading.load(AGENT, (f"model.path={tmp_path}",)), tmp_path)
    assert located.has_environment
    assert loaded.has_environment
    assert tried.has_environment
    assert make_strategies(loaded).environments
    answer = CliRunner().invoke(cli, ["config", "explain", AGENT, "--no-check", "--json"])
    assert {row["key"]: row["value"] for row in json.loads(answer.output)}["has_environment"] is True

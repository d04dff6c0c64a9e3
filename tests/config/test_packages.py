"""Environment and reward kinds of installed packages are found by every command, and a package that fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.actor_settings import make_workload
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.sources.task_sources import make_reward, make_source
from tests.commands import command, error_line

MODULE = """
from staleflow.tasks.settings.source_kinds import SourceKind, SourceType

DUNGEON = SourceKind(
    syntax="dungeon:LEVEL", type=SourceType.ENVIRONMENT, opener="dungeons:open_level", repeatable=True, blocking=False
)
WRONG = "no kind"


def open_level(name, options, where):
    return lambda: Level(int(name))


class Level:
    def __init__(self, rooms):
        self.rooms = rooms

    def reset(self, seed):
        return "1 + 1", {}

    def step(self, action):
        self.rooms -= 1
        return "go on", 1.0, self.rooms <= 0, False, {}


def treasure(answer, record):
    return 7.0 + len(record)
"""
ENTRY_POINTS = """
[staleflow.sources]
dungeon = dungeons:DUNGEON
wrong = dungeons:WRONG
broken = dungeons_missing:KIND

[staleflow.rewards]
treasure = dungeons:treasure
"""


@pytest.fixture
def dungeons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the package `dungeons` is installed for this process and its children."""
    folder = tmp_path / "installed"
    (metadata := folder / "dungeons-1.2.dist-info").mkdir(parents=True)
    (folder / "dungeons.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dungeons\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", str(Path.cwd())))))
    monkeypatch.delitem(sys.modules, "dungeons", raising=False)
    return folder


@pytest.fixture
def play(dungeons: Path, job: Path) -> Path:
    """A job with an environment kind of the package."""
    text = job.read_text()
    source = next(line for line in text.splitlines() if line.startswith("source = "))
    job.write_text("\n".join(line for line in text.replace(source, 'source = "dungeon:2"').splitlines()
                             if not line.startswith(("options = ", "answer_pattern", "function"))) + "\n")  # fmt: skip
    return job


def staleflow_process(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `staleflow ARGS` in a separate process."""
    words = [sys.executable, "-m", "staleflow.cli.main", *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def test_an_environment_kind_of_a_package_is_found_by_each_command(play: Path, tmp_path: Path) -> None:
    config = loading.load(play)
    assert config.has_environment
    assert SimulatedRun(config, make_workload(config)).run().steps
    explained = staleflow_process("config", "explain", play, "--json")  # which also begins an episode
    assert explained.returncode == 0, explained.stderr
    rows = {row["key"]: row for row in json.loads(explained.stdout)}
    assert rows["has_environment"]["value"] is True
    assert "dungeon:NAME" in rows["task.source"]["doc"]
    schema = json.loads(staleflow_process("config", "schema").stdout)["properties"]
    assert "dungeon:NAME" in schema["task"]["anyOf"][0]["properties"]["source"]["description"]
    assert "treasure" in schema["reward"]["properties"]["function"]["anyOf"][0]["enum"]
    simulated = command("simulate", play, "--json")
    assert simulated.returncode == 0, simulated.stderr


def test_a_job_with_an_environment_kind_of_a_package_runs(play: Path) -> None:
    tried = staleflow_process("run", play, "--dry-run", "--json")
    assert tried.returncode == 0, tried.stderr
    parsed = json.loads(tried.stdout)
    assert (parsed["steps"], parsed["findings"], parsed["reward_errors"]) == (3, [], {})
    assert parsed["reward_range"][1] == 2.0  # one for each of two rooms


def test_a_reward_of_a_package_is_found_by_name(dungeons: Path, job: Path) -> None:
    source = make_source("reasoning_gym:chain_sum", {}, 0)
    assert make_reward("treasure", source)("2", {"answer": "2"}) == 8.0
    explained = staleflow_process(
        "config", "explain", job, "--set", "reward.function=treasure"
    )  # which also scores an answer
    assert explained.returncode == 0, explained.stderr


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("broken", "staleflow.sources: 'broken' of the package dungeons 1.2 cannot be loaded: ModuleNotFoundError: No"),
        (
            "wrong",
            "staleflow.sources: 'wrong' of the package dungeons 1.2 must be a SourceKind whose syntax begins with",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_gives_a_one_line_error(play: Path, kind: str, words: str) -> None:
    for verb in (("config", "explain"), ("simulate",), ("run",), ("run", "--dry-run")):
        assert words in error_line(*verb, play, "--set", f"task.source={kind}:1")

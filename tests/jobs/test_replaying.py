"""Replaying a run folder: missing journal parts, torn lines, and stories of trajectories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.pipeline.config import knob_tree, loading
from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.coordination import decision_log
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, RunHeader
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command, error_line
from tests.coordination.test_journal import BASE, SHAPES, TinyBody


def run_folder(folder: Path) -> TinyBody:
    """Write the folder of a run of six steps; its store has the steps without rows."""
    folder.mkdir()
    (folder / "job.toml").write_text("")
    config = loading.load(folder / "job.toml", (*BASE, *SHAPES["redundant"]))
    (folder / "config.toml").write_text(knob_tree.to_toml(config))
    body = TinyBody(make_coordinator(config), folder / "events.jsonl", 4)
    body.run()
    header = RunHeader(run="r", eta=2, groups_per_step=3, group_size=2, members_started_per_group=3)
    store = VersionedStore.create(folder / "store", header)
    for step in range(7):
        ledger = LedgerState(num_started=0, num_ended={}, live=(), next_step=min(step + 1, 6), version=step)
        store.commit(CommitRecord(kind="end" if step == 6 else "step", step=step, ledger=ledger), [])
    return body


def test_a_complete_journal_gives_the_same_commands(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    result = command("replay", tmp_path / "run")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith(": the same commands\n")
    assert len(result.stdout.splitlines()) == 1


def last_of(kind: str) -> Callable[[list[str]], int]:
    return lambda lines: max(i for i, line in enumerate(lines) if f'"event":{{"type":"{kind}"' in line)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda lines: 0, "the journal ends at version 0, 6 steps are stored"),
        (lambda lines: len(lines) // 2, "6 steps are stored"),
        (last_of("VersionPublished"), "the journal ends at version 5, 6 steps are stored"),
        (last_of("StopRequested"), "the journal ends at version 6, before the end of the run that is stored"),
    ],
)
def test_a_journal_that_ends_before_the_run_is_incomplete(
    tmp_path: Path, cut: Callable[[list[str]], int], message: str
) -> None:
    run_folder(tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: cut(lines)]))
    result = command("replay", tmp_path / "run")
    assert result.returncode == 1
    assert "the same commands, but INCOMPLETE: the journal ends at version " in result.stdout
    assert message in result.stdout
    assert message in json.loads(command("replay", tmp_path / "run", "--json").stdout)["missing_events"]


def test_a_torn_line_is_reported_and_a_corrupt_one_gives_a_one_line_error(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + lines[0][:30])  # killed during an unacknowledged write
    result = command("replay", tmp_path / "run")
    assert result.returncode == 0
    assert f"events.jsonl, line {len(lines) + 1}, is incomplete and was ignored\n" in result.stdout
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    assert command("replay", tmp_path / "run").returncode == 1
    path.write_text("".join([*lines[:5], lines[5][:-9] + "\n", *lines[6:]]))
    assert error_line("replay", tmp_path / "run") == f"staleflow: {path}, line 6: not JSON\n"


def test_every_trajectory_has_a_story_in_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MAX_NOTES", 20)
    body = run_folder(tmp_path / "run")
    for trajectory in {0, body.brain.ledger.num_started - 1, *{fate: t for t, fate in body.ended.items()}.values()}:
        result = command("replay", tmp_path / "run", "--trajectory", trajectory, "--json")
        assert result.returncode == 0
        story = json.loads(result.stdout)["story"]
        assert "arrived" in story[0]
        assert body.ended[trajectory].value in story[-1]
    for unknown in (body.brain.ledger.num_started, 10**9, -1):
        line = error_line("replay", tmp_path / "run", "--trajectory", unknown)
        assert line == f"staleflow: {tmp_path / 'run'}: its journal has no trajectory {unknown}\n"


def test_the_story_of_a_resumed_run_has_both_parts(tmp_path: Path) -> None:
    """The journal has the same part twice; the second one starts again, as after a run without stored steps."""
    folder = tmp_path / "run"
    run_folder(folder)
    (folder / "config.1.toml").write_bytes((folder / "config.toml").read_bytes())
    (folder / "events.1.jsonl").write_bytes((folder / "events.jsonl").read_bytes())
    result = command("replay", folder, "--trajectory", 0)
    assert result.returncode == 0
    assert [line.split()[2] for line in result.stdout.splitlines()[:-1]].count("arrived") == 2
    resumed = '{"now":1,"event":{"type":"RunResumed","step":2,"num_ended":[["consumed:none",12]]},"commands":[]}\n'
    (folder / "events.1.jsonl").write_text("")
    (folder / "events.jsonl").write_text(resumed)
    result = command("replay", folder)
    assert result.returncode == 1
    assert "before events.jsonl the journal ends at version 0, not 2" in result.stdout

"""Rescoring a stored run: onto a branch, in parallel, with errors per row, and without traces of a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from staleflow.pipeline.stored_runs import reward_rescoring
from staleflow.pipeline.stored_runs.branch_diff import compare_branches
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.commands import command, error_line
from tests.runtime.test_run import ENVIRONMENT, check, staleflow
from tests.support import forking


def test_rescoring_writes_a_branch_and_leaves_the_original_unchanged(stored: Path) -> None:
    before = VersionedStore.open(stored / "store").stored_columns()
    output = staleflow(
        "store", "rescore", stored, "--reward", f"{stored.parent.parent}/mine.py:length", "--branch", "by-length",
        "--json",
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    result = json.loads(output.stdout)
    assert re.search("other branches: .*by-length", command("store", "show", stored).stdout)
    check(stored, 3)
    for name, column in VersionedStore.open(stored / "store").stored_columns().items():
        np.testing.assert_array_equal(column, before[name])

    branch = VersionedStore.open(stored / "store", branch="by-length")
    rows = list(branch.trajectories())
    assert [r.trajectory.id for r in rows] == before["trajectory"].tolist()
    from transformers import AutoTokenizer

    from staleflow.pipeline.config import loading

    tokenizer = AutoTokenizer.from_pretrained(loading.load(stored / "config.toml").model.path)
    for row in rows:
        text = tokenizer.decode(row.trajectory.response_tokens.tolist(), skip_special_tokens=True).strip()
        expected = float(len(text) % 3) if row.trajectory.num_tokens else 0.0
        assert row.trajectory.reward == expected
        if row.fate is not Fate.CONSUMED:
            assert row.advantage == 0
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row.fate is Fate.CONSUMED:
            groups.setdefault(row.trajectory.group, []).append(row.advantage)
    assert all(abs(sum(values)) < 1e-3 for values in groups.values())  # centred, as the job's estimate has it
    assert any(any(values) for values in groups.values())
    assert branch.lineage["parent"] == VersionedStore.open(stored / "store").snapshot
    assert len(branch.lineage["code"]) == 64
    assert result["rows"] == len(rows)

    shown = command("store", "diff", stored, "main", "by-length")
    assert shown.returncode == 0, shown.stderr
    assert "trajectories trained on" in shown.stdout
    repeated = error_line("store", "rescore", stored, "--reward", "task", "--branch", "by-length")
    assert "nothing stored is overwritten" in repeated
    with pytest.raises(StoreError, match="read-only"):
        branch.commit(VersionedStore.open(stored / "store").commits()[0], [])


def test_rows_that_cannot_be_scored_are_recorded_and_the_others_are_scored(stored: Path) -> None:
    result = reward_rescoring.rescore(stored, f"{stored.parent.parent}/mine.py:picky", "picky", workers=2)
    assert result.errors and result.scored
    rows = list(VersionedStore.open(stored / "store", branch="picky").trajectories())
    failed = {r.trajectory.id: r for r in rows if r.trajectory.error}
    assert set(failed) == set(result.errors)
    assert {r.trajectory.error for r in failed.values()} == {"ValueError: not this one (reward_mine.py, line 7)"}, (
        "of the copy in the run"
    )
    assert not any(r.loss_mask or r.advantage for r in failed.values())
    assert {r.trajectory.reward for r in rows if r.trajectory.num_tokens and r.trajectory.id not in failed} == {1.0}


def test_reward_parts_may_be_given_as_in_a_job_file(stored: Path) -> None:
    mine = f"{stored.parent.parent}/mine.py"
    parts = f'{{right={{function="task", weight=2.0}}, long={{function="{mine}:length", weight=0.5}}}}'
    result = command("store", "rescore", stored, "--set", f"reward.parts={parts}", "--branch", "sum")
    assert result.returncode == 0, result.stderr
    table = {name: VersionedStore.open(stored / "store", branch=name) for name in ("main", "sum")}
    scored = [r.trajectory for r in table["sum"].trajectories() if r.trajectory.num_tokens]
    right = {r.trajectory.id: r.trajectory.reward for r in table["main"].trajectories() if r.fate is Fate.CONSUMED}
    reward_rescoring.rescore(stored, f"{mine}:length", "lengths", workers=1)
    lengths = {
        r.trajectory.id: r.trajectory.reward
        for r in VersionedStore.open(stored / "store", branch="lengths").trajectories()
    }
    results = [(t.reward, 2 * right[t.id] + 0.5 * lengths[t.id]) for t in scored if t.id in right]
    assert results
    assert all(first == pytest.approx(second) for first, second in results)
    assert table["sum"].lineage["reward"].startswith("reward.parts={right=")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name the reward: --reward FUNCTION, or change it with --set reward.KEY=VALUE"),
        (
            ("--set", "steps=3"),
            "override steps=3: only how responses are scored can change: reward., task.answer_pattern=",
        ),
        (("--set", "reward.functoin=task"), "did you mean reward.function?"),
    ],
)
def test_an_unusable_reward_gives_a_one_line_error(stored: Path, words: tuple[str, ...], message: str) -> None:
    assert message in error_line("store", "rescore", stored, *words, "--branch", "none")


def test_the_same_reward_gives_the_same_rewards_and_advantages(stored: Path) -> None:
    reward_rescoring.rescore(stored, "task", "again", workers=1)
    first, second = (VersionedStore.open(stored / "store", branch=name).stored_columns() for name in ("main", "again"))
    consumed = first["staleness"] >= 0
    np.testing.assert_array_equal(first["reward"][consumed], second["reward"][consumed])
    np.testing.assert_allclose(first["advantage"], second["advantage"], atol=1e-6)
    result = compare_branches(stored, "main", "again")
    assert (result.changed, result.order_changed) == (0, ())
    assert (result.signal_second_only, result.signal_first_only) == ((), ())


def test_a_killed_rescoring_leaves_no_branch(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(stored, run)
    before = repository_at(run / "store").list_branches()
    called = tmp_path / "called"
    reward = tmp_path / "slow.py"
    reward.write_text(
        f"import time, pathlib\ndef score(answer, record):\n    pathlib.Path({str(called)!r}).touch()\n"
        "    time.sleep(0.3)\n    return 1.0\n"
    )
    words = ["store", "rescore", str(run), "--reward", f"{reward}:score", "--branch", "killed", "--workers", "1"]
    with forking.Popen(
        [sys.executable, "-m", "staleflow.cli.main", *words],
        env=ENVIRONMENT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not called.exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert repository_at(run / "store").list_branches() == before
    # Killed between creating the branch and naming it: it is not visible, and the next rescoring removes it.
    repository_at(run / "store").create_branch("part-0123", VersionedStore.open(run / "store").snapshot)
    with pytest.raises(ConfigError, match="no branch 'part-0123'"):
        VersionedStore.open(run / "store", branch="part-0123")
    check(run, 3)
    reward_rescoring.rescore(run, "task", "killed", workers=1)
    assert repository_at(run / "store").list_branches() == {*before, "killed"}


def test_an_invalid_rescoring_leaves_no_branch(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored / "store"
    store = VersionedStore.open(path)
    short = derived_branches.BranchRewards(
        rewards=np.zeros(1, np.float32), advantages=np.zeros(1, np.float32), loss_mask=np.zeros(1, bool), errors={}
    )
    with pytest.raises(StoreError, match="rewards for 1"):
        derived_branches.derive_rewards(store, path, "half", short, {})
    with pytest.raises(ConfigError, match="no branch 'half'; there are"):
        VersionedStore.open(path, branch="half")
    for name in ("main", "", "undone-x"):
        with pytest.raises(ConfigError, match="cannot be called"):
            derived_branches.check_branch_name(path, name)

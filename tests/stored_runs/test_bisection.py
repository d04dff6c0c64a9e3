"""Bisection: the search for a cause, and the repeated training that it measures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import staleflow
from staleflow.pipeline.runtime.evaluation_results import read_evaluations
from staleflow.pipeline.stored_runs import bisection, repeated_steps, training, unlearning
from staleflow.pipeline.stored_runs.bisection import (
    NUM_CONTROLS,
    Bisection,
    RowSubset,
    Trial,
    halve,
    random_parts,
    search,
)
from staleflow.pipeline.stored_runs.repeated_steps import open_policy
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.reward_statistics import paired_difference
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.stores.weights.weight_hash import fingerprint
from tests.commands import command
from tests.conftest import JOB, REWARDS
from tests.runtime.test_run import run

GROUPS, SIZE = 6, 4
"""Groups of a step, and members of a group."""


def rows(steps: range) -> dict[str, np.ndarray]:
    """Columns of the rows of some steps, with larger advantages in later groups of a step."""
    count = len(steps) * GROUPS * SIZE
    group = np.arange(count) // SIZE
    return {
        "step": steps.start + group // GROUPS,
        "group": group,
        "staleness": np.arange(count) % 2,
        "advantage": 1.0 + group % GROUPS,
        "response_tokens": np.full(count, 7),
    }


@pytest.fixture
def trials() -> list[Trial]:
    return []


def leaving_out(
    table: dict[str, np.ndarray], is_cause: Callable[[dict[str, np.ndarray]], np.ndarray], trials: list[Trial]
) -> Callable[[RowSubset], Trial]:
    """Replace the training: a part prevents the drop if no row that causes it remains."""

    def leave_out(part: RowSubset) -> Trial:
        removed = Selection(part.where).mask(table)
        prevents = not (is_cause(table) & ~removed).any()
        trials.append(
            Trial(
                left_out=part.label, where=part.where, rows=int(removed.sum()), reward=float(prevents),
                difference=None, prevents=prevents,
            )
        )  # fmt: skip
        return trials[-1]

    return leave_out


@pytest.mark.parametrize("step", range(20, 33))
@pytest.mark.parametrize("member", [0, 3, 5])
def test_search_finds_the_one_group_that_is_the_cause(step: int, member: int, trials: list[Trial]) -> None:
    table, cause = rows(range(20, 33)), (step - 20) * GROUPS + member
    smallest, reason = search(table, 20, 33, leaving_out(table, lambda table: table["group"] == cause, trials))
    assert smallest is not None and not reason
    assert (smallest.where, smallest.rows, smallest.left_out) == (f"group == {cause}", SIZE, f"group {cause}")
    assert len(trials) <= 1 + 2 * 4 + 2 * 3 + NUM_CONTROLS


def test_search_finds_stale_rows_and_ends_where_no_half_prevents_the_loss(trials: list[Trial]) -> None:
    table = rows(range(8))
    search(table, 0, 8, leaving_out(table, lambda table: table["staleness"] == 1, trials))
    assert [trial.left_out for trial in trials if trial.prevents] == ["stale trajectories"]
    trials.clear()
    both = (table["step"] == 1) | (table["step"] == 2)
    search(table, 0, 8, leaving_out(table, lambda _: both, trials))
    preventing = [trial for trial in trials if trial.prevents]
    assert [(trial.where, trial.rows) for trial in preventing] == [("step >= 0 and step <= 3", 4 * GROUPS * SIZE)]


def test_a_part_is_no_cause_if_random_groups_prevent_the_drop_as_well(trials: list[Trial]) -> None:
    table = rows(range(8))
    unchanged = leaving_out(table, lambda table: table["group"] == 0, trials)
    cause, reason = search(table, 0, 8, lambda part: replace(unchanged(part), prevents=True))
    assert cause is None and reason == "group 5 prevents the drop, but so do random groups with as many rows"
    assert trials[-1].left_out == "a random group" and trials[-1].where != "group == 5"
    cause, reason = search(table, 0, 8, lambda part: replace(unchanged(part), prevents=False))
    assert cause is None and reason == "no part alone prevents the drop, only all steps together"


@pytest.mark.parametrize("groups", [1, 5, 24, 40, 48])
def test_random_parts_have_the_rows_of_as_many_other_groups(groups: int, trials: list[Trial]) -> None:
    table = rows(range(8))
    part = leaving_out(table, lambda table: table["group"] == 0, trials)(RowSubset("", f"group < {groups}"))
    masks = [Selection(control.where).mask(table) for control in random_parts(table, part)]
    assert len(masks) == NUM_CONTROLS and {int(mask.sum()) for mask in masks} == {part.rows}
    assert groups > 24 or not any((mask & (table["group"] < groups)).any() for mask in masks)


@given(st.integers(1, 40), st.data())
def test_halving_returns_one_item_if_it_alone_is_the_cause(count: int, data: st.DataObject) -> None:
    cause, calls = data.draw(st.integers(0, count - 1)), list[Sequence[int]]()

    def prevents(part: Sequence[int]) -> bool:
        calls.append(part)
        return cause in part

    assert halve(range(count), prevents) == [cause]
    assert len(calls) <= 2 * int(np.ceil(np.log2(count))) if count > 1 else not calls


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of three steps whose reward is the length of the response."""
    folder = tmp_path_factory.mktemp("bisected")
    (folder / "job.toml").write_text(JOB.format(runs=folder / "runs", steps=3, model=tiny_model))
    (folder / "mine.py").write_text(REWARDS)
    reward = f"reward.function={folder / 'mine.py'}:length"
    return run(folder / "job.toml", "task.eval_prompts=12", reward).run_dir


def test_unchanged_training_gives_the_weights_of_the_run_and_no_cause(stored: Path) -> None:
    for since in (0, 1, 2):
        result = bisection.bisect(bisection.make_plan(stored, since, 3), lambda _: None)
        assert result.same_weights, since
        assert (result.trials, result.cause) == ((), None)
        assert result.reason == f"the reward is not significantly lower at version 3 than at {since}"


@pytest.mark.parametrize("since", [0, 1])
def test_training_without_a_part_gives_the_weights_of_unlearning_it(stored: Path, tmp_path: Path, since: int) -> None:
    copy, where = Path(shutil.copytree(stored, tmp_path / "copy")), "step == 1 and trajectory % 2 == 0"
    plan = bisection.make_plan(copy, since, 3)
    store, config = VersionedStore.open(copy / "store"), plan.offline.config
    with open_policy(config, config, config.steps, store.header.held_out, shared=False) as policy:
        trainer = bisection._PartialTrainer(plan, store, policy, tmp_path)
        rewards = trainer.train(trainer.trained_rows(where))
        weights = policy.apply_to_weights(fingerprint)
    assert len(rewards) == 12
    offline, _ = unlearning.make_plan(copy, tmp_path / "unlearned", where, "without")
    result = training.train(offline, lambda _: None)
    assert fingerprint(load_file(Path(result.checkpoint) / "model.safetensors")) == weights
    assert weights != next(record.weight_fingerprint for record in store.commits() if record.step == 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--at", "4", "--since", "0"), "versions 0 and 4: need 0 <= since < at <= 3, the trained steps"),
        (("--at", "2", "--since", "2"), "versions 2 and 2: need 0 <= since < at <= 3, the trained steps"),
    ],
)
def test_invalid_versions_give_a_one_line_error(stored: Path, arguments: tuple[str, ...], line: str) -> None:
    end = command("bisect", stored, *arguments)
    assert (end.returncode, end.stderr.count("\n")) == (2, 1)
    assert line in end.stderr


def test_runs_that_cannot_be_measured_are_rejected(stored: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stored, tmp_path / "copy"))
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("eval_prompts = 12", "eval_prompts = 9"))
    with pytest.raises(ConfigError, match=r"task.eval_prompts = 9: at least 10 held-out prompts are needed"):
        bisection.make_plan(copy, 0, 3)


def test_the_default_earlier_version_is_the_best_evaluated_version(stored: Path, tmp_path: Path) -> None:
    (first,) = {evaluation.version for evaluation in read_evaluations(stored)} - {3}
    assert first == bisection.best_version_before(stored, 3) == 0
    assert bisection.best_version_before(tmp_path, 34) == 24
    assert bisection.best_version_before(tmp_path, 4) == 0


@pytest.mark.parametrize("found", [True, False])
def test_the_command_prints_each_part_and_how_to_unlearn_the_smallest(
    stored: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    difference = paired_difference({str(i): [0.0] for i in range(12)}, {str(i): [float(i > 2)] for i in range(12)})
    step = Trial(
        left_out="step 1", where="step >= 1 and step <= 1", rows=32, reward=0.75, difference=difference, prevents=True
    )
    group = Trial(left_out="group 9", where="group == 9", rows=4, reward=0.75, difference=difference, prevents=found)
    result = Bisection(
        since=1, at=3, reward_since=0.8, reward_at=0.25, reward_change=difference, same_weights=found,
        trials=(step, group), cause=group if found else None, reason="" if found else "no part alone prevents it",
    )  # fmt: skip
    monkeypatch.setattr(staleflow.Run, "bisect", lambda self, at, **_: result)
    end = command("bisect", stored, "--at", 3)
    assert end.returncode == 0, end.stderr
    first, *lines = end.stdout.splitlines()
    assert first == "held-out reward: version 1 0.800, version 3 0.250"
    assert ("not verified: the training repeated here gives other weights" in end.stdout) is not found
    assert "  without step 1      32 rows  0.750  +0.750 (p 0.004)  prevents it" in lines
    if found:
        assert lines[-3] == "smallest part tried that prevents it: group 9, 4 rows"
        assert lines[-1] == f"  staleflow unlearn {stored} --where 'group == 9'"
    else:
        assert lines[-1] == "no cause found: no part alone prevents it"
    assert json.loads(command("bisect", stored, "--at", 3, "--json").stdout)["since"] == 1


def test_a_row_that_cannot_be_read_ends_the_bisection(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, it would change the training that all parts are compared with."""
    plan, read = bisection.make_plan(stored, 0, 3), repeated_steps.read_batch_rows

    def damaged(store: VersionedStore, positions: npt.NDArray[np.int64]) -> list[EndedTrajectory | UnreadableRow]:
        first, *others = read(store, positions)
        trajectory = first.trajectory.id if isinstance(first, EndedTrajectory) else first.trajectory
        return [UnreadableRow(trajectory=trajectory, error="a chunk is damaged"), *others]

    monkeypatch.setattr(bisection, "read_batch_rows", damaged)
    with pytest.raises(StoreError, match=r"step 0: trajectory \d+ cannot be read: a chunk is damaged"):
        bisection.bisect(plan, lambda _: None)

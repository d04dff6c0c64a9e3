"""Bisection: the search for a cause, and the repeated training that it measures."""

from __future__ import annotations

import asyncio
import contextlib
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
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.runtime.evaluation_results import read_evaluations
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.pipeline.stored_runs import bisection, bisection_page, repeated_steps, training, unlearning
from staleflow.pipeline.stored_runs.bisection import UNCHANGED, Bisection
from staleflow.pipeline.stored_runs.cause_search import (
    MAX_TRAININGS,
    MAX_TRIALS,
    P_LIMIT,
    Rewards,
    SearchResult,
    Trial,
    halve,
    search,
)
from staleflow.pipeline.stored_runs.repeated_steps import open_policy
from staleflow.pipeline.stored_runs.training_changes import (
    GROUPS_PER_LEFT_OUT,
    NUM_PAIRS,
    Change,
    changed_settings,
    changes_without_conspicuous_rows,
    control_changes,
    restore_settings,
    undo_settings_change,
)
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.reward_statistics import estimate, paired_difference
from staleflow.stores.trajectories.columns import FATES
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, Fate
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.training.advantage import DrGrpo
from tests.commands import command, error_line
from tests.conftest import JOB, REWARDS
from tests.runtime.test_run import run
from tests.support.browser import in_browser, open_page

GROUPS, SIZE = 6, 4
"""Groups of a step, and members of a group."""


Table = dict[str, np.ndarray]


def rows(steps: range) -> Table:
    """Columns of the rows of some steps, with larger advantages in later groups of a step."""
    count = len(steps) * GROUPS * SIZE
    group = np.arange(count) // SIZE
    return {
        "trajectory": np.arange(count) + 100,
        "step": steps.start + group // GROUPS,
        "group": group,
        "staleness": np.arange(count) % 2,
        "advantage": 1.0 + group % GROUPS,
        "response_tokens": np.full(count, 7),
        "source": np.zeros(count, int),
        "finish": np.full(count, "stop"),
        "prompt": group,
        "differs": np.zeros(count, bool),
    }


PROMPTS = 20
HIGH, LOW = ({str(prompt): [reward] * 2 for prompt in range(PROMPTS)} for reward in (1.0, 0.0))


class Training:
    """A training of which the reward is lost if rows that cause it remain, and which counts its calls.

    is_lost: whether the reward is lost, for a change and the rows that it leaves out.
    """

    def __init__(self, table: Table, is_lost: Callable[[Change, np.ndarray], bool]) -> None:
        self.table, self.is_lost, self.calls = table, is_lost, 0

    def removed(self, change: Change) -> np.ndarray:
        return Selection(change.where).mask(self.table) if change.where else np.zeros(len(self.table["step"]), bool)

    def train(self, change: Change) -> Rewards:
        self.calls += 1
        return LOW if self.is_lost(change, self.removed(change)) else HIGH

    def num_changed_rows(self, change: Change) -> int:
        return len(self.table["step"]) if change.reward_part else int(self.removed(change).sum())


def leaving_out(table: Table, is_cause: Callable[[Table], np.ndarray]) -> Training:
    """A training of which the reward is lost if any row of a cause remains."""
    return Training(table, lambda _, removed: bool((is_cause(table) & ~removed).any()))


def find(
    table: Table, since: int, at: int, candidates: Sequence[Change], training: Training, before: Rewards = HIGH
) -> SearchResult:
    result = search(table, since, at, candidates, training, before, LOW)
    assert training.calls <= MAX_TRAININGS and len(result.trials) <= MAX_TRIALS
    return result


def labels(result: SearchResult) -> list[str]:
    return [trial.change.label for trial in result.trials if trial.prevents]


@pytest.mark.parametrize("cause", range(0, 13 * GROUPS, GROUPS - 1))  # one or two of each step, in every place
def test_search_finds_the_one_group_that_is_the_cause(cause: int) -> None:
    table = rows(range(20, 33))
    result = find(table, 20, 33, [], leaving_out(table, lambda table: table["group"] == cause))
    assert result.cause is not None and not result.reason and not result.is_limited
    assert (result.cause.change.where, result.cause.rows) == (f"group == {cause}", SIZE)
    assert result.cause.change.label == f"without group {cause}"
    assert len(result.controls) == len(result.repeats) == NUM_PAIRS
    assert result.confirmed is not None and (result.confirmed.mean, result.confirmed.p < P_LIMIT) == (1, True)


def test_search_ends_where_no_half_prevents_the_drop() -> None:
    table = rows(range(8))
    both = (table["step"] == 1) | (table["step"] == 2)
    result = find(table, 0, 8, [], leaving_out(table, lambda _: both))
    assert labels(result) == ["without steps 0-3"]
    assert result.cause is not None and result.cause.change.where == "step >= 0 and step <= 3"


@pytest.mark.parametrize(
    ("column", "value", "label", "where"),
    [
        ("staleness", 5, "without stale trajectories (staleness >= 5)", "staleness >= 5 and step < 8"),
        ("finish", "length", "without truncated responses", "finish == 'length' and step < 8"),
        ("source", 1, "without source letters", "source == 1 and step < 8"),
        ("prompt", 3, "without prompts drawn again and again", "group in (1, 3, 9, 20)"),
        ("differs", True, "without rows that the reward function now gives another reward", "trajectory in ("),
    ],
)
def test_search_names_rows_that_stand_out(column: str, value: int | str, label: str, where: str) -> None:
    table = rows(range(8))
    chosen = np.isin(table["group"], (1, 3, 9, 20))
    if column != "prompt":
        chosen &= np.arange(len(chosen)) % SIZE < 2
    table[column] = np.where(chosen, value, table[column])
    candidates = changes_without_conspicuous_rows(table, "step < 8", ["sums", "letters"])
    result = find(table, 0, 8, candidates, leaving_out(table, lambda _: chosen))
    assert result.cause is not None and result.cause.rows == int(chosen.sum())
    assert result.cause.change.label == label and result.cause.change.where.startswith(where)
    assert (Selection(result.cause.change.where).mask(table) == chosen).all()


def test_no_rows_stand_out_where_all_are_alike() -> None:
    table = rows(range(8)) | {"staleness": np.zeros(8 * GROUPS * SIZE, int)}
    assert changes_without_conspicuous_rows(table, "step < 8") == []
    assert (
        changes_without_conspicuous_rows(table | {"differs": np.ones(8 * GROUPS * SIZE, bool)}, "step < 8", ["sums"])
        == []
    )


def test_rows_that_stand_out_in_two_ways_are_left_out_once() -> None:
    few = np.arange(8 * GROUPS * SIZE) < 3
    table = rows(range(8)) | {"staleness": 2 * few, "finish": np.where(few, "length", "stop")}
    (change,) = changes_without_conspicuous_rows(table, "step < 8")
    assert change.label == "without stale trajectories (staleness >= 2)"


def test_rows_that_stand_out_are_divided_further_and_few_are_tried_before_many() -> None:
    table = rows(range(8))
    table["finish"][table["group"] % 2 == 0] = "length"
    table["staleness"] = np.where(table["group"] % 4 == 0, 2, 1)
    training = leaving_out(table, lambda table: table["group"] == 20)
    result = find(table, 0, 8, changes_without_conspicuous_rows(table, "step < 8"), training)
    assert labels(result)[0] == "without stale trajectories (staleness >= 2)"
    assert not any("truncated" in trial.change.label for trial in result.trials)
    assert result.cause is not None and result.cause.rows == SIZE


def test_settings_of_before_a_resume_are_tried_first_and_divided() -> None:
    table, before = rows(range(8)), RunConfig()
    training_config = replace(before.training, learning_rate=0.1, beta2=0.5, ranks=2, advantage=DrGrpo())
    after = replace(before, training=training_config, rollout=replace(before.rollout, temperature=0.5, instances=3))
    keys = ["training.learning_rate", "training.beta2", "training.advantage", "rollout.temperature"]
    assert sorted(changed_settings(before, after)) == sorted(keys) and not changed_settings(after, after)
    restored = restore_settings(after, before, keys)
    assert changed_settings(before, restored) == [] and restored.rollout.instances == 3
    change = undo_settings_change(before, after, 4)
    training = Training(table, lambda change, _: "training.beta2" not in dict(change.settings))
    result = find(table, 0, 8, [change], training)
    assert result.cause is not None and result.cause.change.settings == (("training.beta2", "0.95"),)
    assert result.cause.change.label == "with training.beta2 = 0.95 as before step 4" and result.cause.rows == 0
    assert len(result.trials) <= 1 + 2 * 2
    labels_of_repeats = {repeat.change.label for repeat in result.repeats}
    assert labels_of_repeats == {f"{result.cause.change.label}, and without 6 random groups"}


def test_the_steps_of_a_schedule_are_a_setting_only_if_they_changed() -> None:
    """A resume with more steps keeps the schedule's."""
    constant = RunConfig(steps=10)
    cosine = replace(constant, training=replace(constant.training, schedule="cosine"))
    longer = replace(cosine, steps=20, training=replace(cosine.training, schedule_steps=10))
    assert changed_settings(cosine, longer) == [] == changed_settings(constant, replace(constant, steps=20))
    changed = replace(longer, training=replace(longer.training, schedule_steps=20))
    assert changed_settings(cosine, changed) == ["training.schedule_steps"]
    assert restore_settings(changed, cosine, ["training.schedule_steps"]).training.schedule_steps == 10
    assert dict(undo_settings_change(cosine, changed, 5).settings) == {"training.schedule_steps": "10"}
    assert changed_settings(constant, cosine) == ["training.schedule"] == changed_settings(cosine, constant)
    keys = changed_settings(cosine, replace(constant, steps=20))
    assert restore_settings(replace(constant, steps=20), cosine, keys).training.schedule_steps == 10


def test_the_number_format_of_a_model_is_a_setting_and_the_measured_rows_are_none() -> None:
    before = RunConfig()
    measured = replace(before, training=replace(before.training, measured_rows=3))
    assert changed_settings(before, measured) == []
    assert changed_settings(before, replace(before, model=replace(before.model, dtype="bfloat16"))) == ["model.dtype"]


def test_a_part_of_the_reward_is_the_cause_if_no_fewer_rows_are() -> None:
    table = rows(range(8))
    part = Change(label="without the reward part short", reward_part="short")

    def lost_without(cause: np.ndarray) -> Training:
        return Training(table, lambda change, removed: not change.reward_part and bool((cause & ~removed).any()))

    result = find(table, 0, 8, [part], lost_without(table["group"] >= 0))
    assert result.cause is not None and result.cause.change is part
    assert all(repeat.change.reward_part and repeat.change.where for repeat in result.repeats)
    result = find(table, 0, 8, [part], lost_without(table["group"] == 7))
    assert result.cause is not None and result.cause.change.where == "group == 7"


def test_a_change_is_no_cause_if_random_groups_prevent_the_drop_as_well() -> None:
    """All rows do harm together, and any few that are left out undo it."""
    table = rows(range(8))
    training = Training(table, lambda _, removed: removed.sum() < SIZE)
    result = find(table, 0, 8, [], training)
    assert result.cause is None and result.confirmed is None
    assert result.reason.startswith("without ") and result.reason.endswith("but not more than random groups do")
    assert len(result.controls) == len(result.repeats) > 1, "one pair for each change is enough to see it"
    assert training.calls == len(result.trials) + 2 * len(result.controls)
    result = find(table, 0, 8, [], Training(table, lambda *_: True))
    assert result.cause is None and not result.controls and not result.is_limited
    assert result.reason == "no change that was tried prevents the drop"


def test_the_next_larger_change_is_confirmed_if_the_smallest_cannot_be() -> None:
    """The first training without groups 3 to 5 has a high reward by chance."""
    table = rows(range(2))

    class Lucky(Training):
        def train(self, change: Change) -> Rewards:
            self.calls += 1
            if change.where == "group in (5, 4, 3)":
                return HIGH
            return LOW if self.is_lost(change, self.removed(change)) else HIGH

    step = np.array(table["step"] == 0)
    result = find(table, 0, 2, [], Lucky(table, lambda _, removed: bool((step & ~removed).any())))
    assert [trial.change.where for trial in result.trials if trial.prevents][-1] == "group in (5, 4, 3)"
    assert result.cause is not None and result.cause.change.where == "step >= 0 and step <= 0"


@pytest.mark.parametrize("steps", [8, 512])
def test_harm_of_a_part_of_the_reward_is_named_after_rows_that_are_not_confirmed(steps: int) -> None:
    """The part harms in all rows, so any rows that are left out undo it, too, if they are enough. It is confirmed also
    if the search for rows has reached its limit."""
    table = rows(range(steps))
    part = Change(label="without the reward part short", reward_part="short")
    enough = 8 * SIZE * steps // 8
    training = Training(table, lambda change, removed: not change.reward_part and removed.sum() < enough)
    result = find(table, 0, steps, [part], training)
    assert [trial.change.where for trial in result.trials if trial.prevents][-1].startswith("step >= 0 and step <= ")
    assert result.cause is not None and result.cause.change is part
    assert training.calls == len(result.trials) + 2 + 2 * NUM_PAIRS, "one pair for the steps"


def test_a_change_that_another_does_significantly_better_than_is_no_cause() -> None:
    """Some prompts recover without a part of the reward, all without step 3."""
    table = rows(range(8))
    part = Change(label="without the reward part short", reward_part="short")
    some = {prompt: [float(int(prompt) < 11)] * 2 for prompt in HIGH}

    class TwoCauses(Training):
        def train(self, change: Change) -> Rewards:
            self.calls += 1
            if not ((table["step"] == 3) & ~self.removed(change)).any():
                return HIGH
            return some if change.reward_part else LOW

    result = find(table, 0, 8, [part], TwoCauses(table, lambda *_: True))
    first, *others = result.trials
    assert (first.change, first.reward, first.prevents) == (part, 0.55, False)
    assert {trial.reward for trial in others if trial.prevents} == {1.0}
    assert result.cause is not None and result.cause.change.where == "step >= 3 and step <= 3"


def test_rows_that_stand_out_are_confirmed_before_they_are_divided() -> None:
    """A part of them that does as well is the cause only if it is confirmed, too."""
    table = rows(range(8))
    table["staleness"] = np.where(table["group"] % 4 == 0, 2, 1)
    training = leaving_out(table, lambda table: table["group"] == 20)
    result = find(table, 0, 8, changes_without_conspicuous_rows(table, "step < 8"), training)
    assert result.trials[0].rows == 12 * SIZE and result.trials[0].prevents
    assert result.cause is not None and result.cause.rows < 12 * SIZE
    assert training.calls == len(result.trials) + 4 * NUM_PAIRS <= MAX_TRAININGS
    stale = table["staleness"] == 2
    everything = leaving_out(table, lambda _: stale)
    result = find(table, 0, 8, changes_without_conspicuous_rows(table, "step < 8"), everything)
    assert result.cause is not None and result.cause.change.where == "staleness >= 2 and step < 8"
    assert everything.calls == len(result.trials) + 2 * NUM_PAIRS and len(result.trials) == 3


def test_a_drop_that_does_not_come_back_has_no_cause() -> None:
    """The unchanged training was unlucky: without any random groups nothing is lost."""
    table = rows(range(8))
    result = find(table, 0, 8, [], Training(table, lambda *_: False))
    assert result.cause is None and result.reason.endswith("but not more than random groups do")


def test_a_search_trains_at_most_twenty_times() -> None:
    table = rows(range(4096))
    training = leaving_out(table, lambda table: table["group"] == table["group"][-1])
    result = find(table, 0, 4096, [], training)
    assert result.is_limited and training.calls == len(result.trials) + 2 * NUM_PAIRS <= MAX_TRAININGS
    assert len(result.trials) == MAX_TRIALS
    assert result.cause is not None and result.cause == [t for t in result.trials if t.prevents][-1]


@pytest.mark.parametrize("groups", [0, 1, 5, 16, 24, 40, 44, 45])
def test_a_control_leaves_out_as_many_rows_and_as_large_gradients_as_the_change(groups: int) -> None:
    table = rows(range(8))
    cause = Change(label="", where=f"group < {groups}" if groups else "")
    influence, rows_of_cause = np.abs(table["advantage"]) * table["response_tokens"], table["group"] < groups
    pairs = list(control_changes(table, cause))
    assert len(pairs) == NUM_PAIRS == len({control.where for control, _ in pairs})
    for control, repeat in pairs:
        left_out, also = (Selection(change.where).mask(table) for change in (control, repeat))
        few = -(-(48 - groups or 48) // GROUPS_PER_LEFT_OUT) * SIZE
        assert also[rows_of_cause].all() and also.sum() - rows_of_cause.sum() in (few, 0)
        assert not (left_out & rows_of_cause).any() or groups > 16
        assert left_out.sum() >= min(also.sum(), len(also) - 6 * SIZE)
        if groups <= 16:
            assert left_out.sum() >= also.sum()
            assert influence[left_out].sum() >= influence[also].sum() or left_out.sum() >= len(left_out) // 3
    assert len({repeat.where for _, repeat in pairs}) == NUM_PAIRS


@pytest.mark.parametrize("steps", [1, 3, 4, 7])
def test_a_control_leaves_out_as_many_whole_steps_as_the_change(steps: int) -> None:
    """A step with a few rows left has an update of about the usual size, which would make a control worse."""
    table = rows(range(8))
    for control, repeat in control_changes(table, Change(label="", where=f"step < {steps}")):
        left = [set(table["step"][~Selection(change.where).mask(table)].tolist()) for change in (control, repeat)]
        assert len(left[0]) == len(left[1]) == 8 - steps and left[0] != left[1]
        assert steps > 4 or left[0] >= set(range(steps))


def test_steps_that_do_as_much_harm_as_others_are_no_cause() -> None:
    """Each step that is trained does harm, with few rows or with all. Nearly all of them have stale rows only."""
    table = rows(range(8))
    table["staleness"] = np.where(table["step"] > 0, 1, 0)
    part = Change(label="without the reward part short", reward_part="short")

    class Steps(Training):
        def train(self, change: Change) -> Rewards:
            self.calls += 1
            num_trained = len(set(table["step"][~self.removed(change)].tolist()))
            recovered = 13 if change.reward_part else PROMPTS * (8 - num_trained) // 8
            return {prompt: [float(int(prompt) < recovered)] * 2 for prompt in HIGH}

    candidates = [part, *changes_without_conspicuous_rows(table, "step >= 0 and step < 8")]
    result = find(table, 0, 8, candidates, Steps(table, lambda *_: True))
    assert any(trial.rows == 7 * GROUPS * SIZE and trial.reward > 0.8 for trial in result.trials)
    assert result.cause is not None and result.cause.change is part


def test_controls_differ_also_where_no_rows_have_as_large_gradients() -> None:
    table = rows(range(8))
    table["advantage"] = np.where(table["group"] == 9, -1e6, table["advantage"])
    pairs = list(control_changes(table, Change(label="", where="group == 9")))
    assert len({control.where for control, _ in pairs}) == NUM_PAIRS
    for control, _ in pairs:
        assert (5 + 21) * SIZE <= Selection(control.where).mask(table).sum() <= (6 + 21) * SIZE


def test_a_change_leaves_groups_that_train_something() -> None:
    """Without any gradient the policy stays as it was, which prevents every drop."""
    table = rows(range(4))
    table["advantage"][table["group"] >= 2 * GROUPS] = 0.0
    table["finish"][table["group"] < 2 * GROUPS] = "length"
    training = Training(table, lambda _, removed: bool((table["advantage"][~removed] != 0).any()))
    result = find(table, 0, 4, changes_without_conspicuous_rows(table, "step >= 0 and step < 4"), training)
    assert result.cause is None and not result.controls


@pytest.mark.parametrize("slope", [1.2, 2.0, 3.0])
def test_harm_in_all_rows_has_no_cause(slope: float) -> None:
    """Each row that is left out gives back as much of the reward."""
    table = rows(range(8))

    class Linear(Training):
        def train(self, change: Change) -> Rewards:
            self.calls += 1
            recovered = round(PROMPTS * min(1.0, slope * self.removed(change).mean()))
            return {prompt: [float(int(prompt) < recovered)] * 2 for prompt in HIGH}

    result = find(table, 0, 8, [], Linear(table, lambda *_: True))
    assert any(trial.prevents for trial in result.trials) and result.cause is None


def test_groups_with_outstanding_gradients_stand_out() -> None:
    table = rows(range(8))
    table["advantage"] = np.where(table["group"] == 9, -1000.0, table["advantage"])
    (change,) = [c for c in changes_without_conspicuous_rows(table, "step < 8") if "gradients" in c.label]
    assert change == Change(label="without groups with outstanding gradients", where="group == 9")


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
    parts = [f"reward.parts.{name}.function={folder / 'mine.py'}:length" for name in ("one", "two")]
    return run(folder / "job.toml", "task.eval_prompts=12", *parts, "reward.parts.two.weight=-2").run_dir


@pytest.mark.parametrize(("since", "metric"), [(0, "reward"), (2, "one.letters")])
def test_unchanged_training_gives_the_weights_of_the_run_and_no_cause(stored: Path, since: int, metric: str) -> None:
    plan = bisection.make_plan(stored, since, 3, metric)
    result = bisection.bisect(plan, lambda _: None)
    assert result.metric == metric and (metric == "reward" or (result.reward_at.mean or 0) > 2)
    assert result.same_weights
    assert (result.trials, result.cause) == ([], None)
    assert result.reason == f"the {metric} is not significantly lower at version 3 than at {since}"


def test_training_without_rows_gives_the_weights_of_unlearning_them(stored: Path, tmp_path: Path) -> None:
    copy, where = Path(shutil.copytree(stored, tmp_path / "copy")), "step == 1 and trajectory % 2 == 0"
    with opened(copy, tmp_path) as repeated:
        repeated.restore_earlier_version()
        change = Change(label="", where=where)
        rewards = repeated.train(change)
        weights = repeated._opened.apply_to_weights(fingerprint)
        assert repeated.num_changed_rows(change) == 8
        assert repeated.train(UNCHANGED) and repeated.same_weights
    assert len(rewards) == 12
    offline, _ = unlearning.make_plan(copy, tmp_path / "unlearned", where, "without")
    result = training.train(offline, lambda _: None)
    assert fingerprint(load_file(Path(result.checkpoint) / "model.safetensors")) == weights
    records = VersionedStore.open(copy / "store").commits()
    assert weights != next(record.weight_fingerprint for record in records if record.step == 2)


def opened(run_dir: Path, folder: Path, since: int = 1) -> contextlib.closing[bisection._RepeatedTraining]:
    plan, work = bisection.make_plan(run_dir, since, 3), folder / "work"
    work.mkdir()
    return contextlib.closing(bisection._RepeatedTraining(plan, VersionedStore.open(run_dir / "store"), work))


def test_a_part_of_the_reward_is_left_out_of_advantages(stored: Path, tmp_path: Path) -> None:
    """One of two parts that are one function, weighted 1 and -2, has the sign of neither the other nor the sum."""
    with opened(stored, tmp_path) as repeated:
        changes = {change.reward_part: change for change in repeated.row_changes()}
        removed, rewards = repeated._apply(changes["two"])
        window, stored_rewards = repeated._window_mask, repeated._columns["reward"]
        assert not removed.any() and (rewards[window] == -stored_rewards[window]).all()
        assert (repeated._apply(changes["one"])[1][window] == 2 * stored_rewards[window]).all()
        assert repeated.num_changed_rows(changes["one"]) == int(np.sum(stored_rewards[window] != 0)) > 0
        assert not repeated.table["differs"].any() and len(repeated.table["prompt"]) == 32
        table, config = repeated._columns, repeated._plan.former
        none = np.zeros(len(window), bool)
        negative = unlearning.reestimate_advantages(config, table, window, none, rewards)
        np.testing.assert_allclose(negative[window], -table["advantage"][window], atol=1e-5)
        assert (unlearning.reestimate_advantages(config, table, window, none) == table["advantage"]).all()


def test_rows_with_another_reward_now_and_another_metric(stored: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stored.parents[1], tmp_path / "copy"))
    reward = stored.parents[1] / "mine.py"
    text = reward.read_text()
    try:
        reward.write_text(text.replace("len(answer) % 3", "(len(answer) % 3) % 2"))
        with opened(copy / stored.relative_to(stored.parents[1]), tmp_path) as repeated:
            repeated.row_changes()
            assert (repeated.table["differs"] == (repeated._columns["reward"][repeated._window_mask] == -2)).all()
    finally:
        reward.write_text(text)
    plan = bisection.make_plan(stored, 2, 3, "letters")
    with pytest.raises(ConfigError, match=r"--metric letters: the reward has no such part; there are reward, one, "):
        bisection.bisect(plan, lambda _: None)


SECOND_SOURCE = """
[[task]]
name = "letters"
source = "reasoning_gym:chain_sum"
options = {{ min_terms = 4, max_terms = 4, min_digits = 1, max_digits = 1 }}
reward = "{folder}/mine.py:length"
max_new_tokens = 7
eval_prompts = 10
"""


def test_a_source_is_a_change_and_each_has_its_held_out_prompts(tmp_path: Path, tiny_model: Path) -> None:
    text = JOB.format(runs=tmp_path / "runs", steps=1, model=tiny_model).replace("[task]", '[[task]]\nname = "sums"')
    (tmp_path / "job.toml").write_text(text + SECOND_SOURCE.format(folder=tmp_path))
    (tmp_path / "mine.py").write_text(REWARDS)
    folder = run(tmp_path / "job.toml").run_dir
    plan = bisection.make_plan(folder, 0, 1)
    result = bisection.bisect(plan, lambda _: None)
    assert result.same_weights and result.reward_at.num_prompts == 8 + 10
    (tmp_path / "work").mkdir()
    store = VersionedStore.open(folder / "store")
    with contextlib.closing(bisection._RepeatedTraining(plan, store, tmp_path / "work")) as repeated:
        where = {change.label: change.where for change in repeated.row_changes()}
        assert where["without source letters"] == "source == 1 and step >= 0 and step < 1"
        count = repeated.num_changed_rows(Change(label="", where=where["without source letters"]))
        assert count == int(np.sum(repeated.table["source"] == 1)) > 0


def test_settings_of_before_a_resume_give_the_weights_of_a_run_with_them(stored: Path, tmp_path: Path) -> None:
    """The job's learning rate, group statistics and temperature change at version 3; the training is repeated over the
    change bit for bit, and with the former settings it equals offline training with them."""
    shutil.copytree(stored.parents[1], tmp_path / "copy")
    folder = tmp_path / "copy" / stored.relative_to(stored.parents[1])
    changed = load_job(folder, ("steps=4", "training.learning_rate=0.01", "training.advantage='dr_grpo'"))
    asyncio.run(execute(changed, RunListener(), resume=True))
    plan = bisection.make_plan(folder, 2, 4)
    assert [(part.start, part.stop) for part in plan.window] == [(2, 3), (3, 4)]
    (tmp_path / "work").mkdir()
    store = VersionedStore.open(folder / "store")
    with contextlib.closing(bisection._RepeatedTraining(plan, store, tmp_path / "work")) as repeated:
        repeated.restore_earlier_version()
        repeated.train(UNCHANGED)
        assert repeated.same_weights
        (change,) = repeated.setting_changes()
        assert dict(change.settings) == {"training.learning_rate": "0.001", "training.advantage": '{ name = "grpo" }'}
        repeated.train(change)
        weights = repeated._opened.apply_to_weights(fingerprint)
    former = load_job(folder, file="config.1.toml")
    offline = training.make_plan(folder, tmp_path / "out")
    offline = replace(
        offline, config=replace(former, steps=4, task=replace(former.task, eval_prompts=0)), is_unchanged=False
    )
    table = store.stored_columns()
    consumed = table["fate"] == FATES.index(Fate.CONSUMED)
    expected = unlearning.reestimate_advantages(
        changed, table, consumed & (table["step"] == 3), np.zeros(len(consumed), bool), None, former
    )
    assert (expected != table["advantage"]).any()
    with open_policy(offline.config, offline.config, 4, store.header.num_held_out) as policy:
        for step, positions in repeated_steps.select_consumed_rows(store, "").items():
            batch = [
                row for row in repeated_steps.read_batch_rows(store, positions) if isinstance(row, EndedTrajectory)
            ]
            pairs = zip(batch, expected[positions], strict=True)
            repeated_steps.train_step(policy, step, [replace(row, advantage=float(value)) for row, value in pairs])
        assert policy.apply_to_weights(fingerprint) == weights


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--at", "4", "--since", "0"), "versions 0 and 4: need 0 <= since < at <= 3, the trained steps"),
        (("--at", "2", "--since", "2"), "versions 2 and 2: need 0 <= since < at <= 3, the trained steps"),
    ],
)
def test_invalid_versions_give_a_one_line_error(stored: Path, arguments: tuple[str, ...], line: str) -> None:
    assert line in error_line("bisect", stored, *arguments)


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


def result_of(*, found: bool) -> Bisection:
    base, other = {str(i): [0.0] for i in range(12)}, {str(i): [float(i > 2)] for i in range(12)}
    difference, low, high = paired_difference(base, other), estimate([*base.values()]), estimate([*other.values()])

    def attempt(label: str, where: str, rows: int, *, prevents: bool) -> Trial:
        return Trial(
            change=Change(label=label, where=where), rows=rows, reward=0.75, interval=high.interval,
            difference=difference, prevents=prevents,
        )  # fmt: skip

    step = attempt("without step 1", "step >= 1 and step <= 1", 32, prevents=True)
    group = attempt("without group 9", "group == 9", 4, prevents=found)
    controls, repeats = (
        [attempt(f"{also}without group {n}<script>", f"group == {n}", 4, prevents=False) for n in (1, 2)]
        for also in ("", "without group 9, and ")
    )
    return Bisection(
        run="runs/a b", metric="reward", since=1, at=3, reward_since=high, reward_at=low, reward_change=difference,
        same_weights=found, trials=[step, group], controls=controls, repeats=repeats, confirmed=difference,
        cause=group if found else None,
        reason="" if found else "no change alone prevents it", is_limited=not found,
    )  # fmt: skip


@pytest.mark.parametrize("found", [True, False])
def test_the_command_prints_each_change_and_how_to_unlearn_the_smallest(
    stored: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    monkeypatch.setattr(staleflow.Run, "bisect", lambda self, at, **_: result_of(found=found))
    end = command("bisect", stored, "--at", 3)
    assert end.returncode == 0, end.stderr
    first, *lines = end.stdout.splitlines()
    assert first == "held-out reward: version 1 0.750, version 3 0.000"
    assert ("not verified: the training repeated here gives other weights" in end.stdout) is not found
    words = "without step 1 32 rows 0.750 +0.750 (p 0.004) prevents it"
    assert lines[not found].split() == words.split()
    confirmed = "confirmed by 3 pairs of trainings that leave out random groups: +0.750 (p 0.004)"
    assert (confirmed in lines) is found
    assert any("20 in all" in line for line in lines) is not found
    if found:
        assert lines[-3] == "smallest confirmed change that prevents it: without group 9, 4 rows"
        assert lines[-1] == "  staleflow unlearn 'runs/a b' --where 'group == 9'"
    else:
        assert lines[-1] == "no cause found: no change alone prevents it"
    assert json.loads(command("bisect", stored, "--at", 3, "--json").stdout)["since"] == 1


@pytest.mark.parametrize("found", [True, False])
def test_the_page_shows_each_change_and_runs_nothing(tmp_path: Path, found: bool) -> None:
    result = bisection_page.write(tmp_path, result_of(found=found))
    text = Path(result.page).read_text()
    assert result.page == str(tmp_path / "bisect-3.html")
    assert text.count('class="row') == 2 + 6 + 1 and text.count("without group 1&lt;script&gt;") == 2
    assert "<script" not in text and "http" not in text and text.count(' cause"') == found
    assert ("staleflow unlearn &#x27;runs/a b&#x27; --where &#x27;group == 9&#x27;" in text) is found


@in_browser
@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_the_page_fits_its_window(tmp_path: Path, width: int) -> None:
    result = bisection_page.write(tmp_path, result_of(found=True))
    async with open_page(viewport={"width": width, "height": 800}) as page:
        await page.goto(f"file://{result.page}")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        strips, dots = page.locator(".row .strip"), page.locator(".row .dot")
        assert (await strips.count(), await dots.count()) == (9, 8)
        for number in range(8):
            strip, dot = await strips.nth(number).bounding_box(), await dots.nth(number).bounding_box()
            assert strip["x"] <= dot["x"] and dot["x"] + dot["width"] <= strip["x"] + strip["width"]
            assert strip["width"] > 150


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

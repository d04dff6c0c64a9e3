"""Unlearning: the weights equal those of offline training without the rows, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

import staleflow
from staleflow.pipeline.config import loading
from staleflow.pipeline.recovery import run_folder
from staleflow.pipeline.stored_runs import training, unlearning
from staleflow.pipeline.stored_runs.offline_verification import verify_offline
from staleflow.pipeline.stored_runs.training import OfflinePlan
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.tasks.training import numerics
from staleflow.tasks.training.advantage import ADVANTAGES
from tests.commands import command, error_line
from tests.conftest import JOB, REWARDS
from tests.runtime.test_run import run
from tests.runtime.test_run import staleflow as staleflow_process
from tests.stored_runs.in_process import repeat_in_this_process  # noqa: F401  used by name
from tests.stores.test_stores import edit
from tests.support.simulated_store import stored_simulation

ALL = 99


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of three steps in which nearly all groups have a signal; the reward is the length of the response."""
    folder = tmp_path_factory.mktemp("unlearned")
    (folder / "job.toml").write_text(JOB.format(runs=folder / "runs", steps=3, model=tiny_model))
    (folder / "mine.py").write_text(REWARDS)
    reward = f"reward.function={folder / 'mine.py'}:length"
    return run(folder / "job.toml", "task.eval_prompts=0", "batch.extra_members=1", reward).run_dir


@pytest.fixture
def run_copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of the run, since unlearning adds branches."""
    return Path(shutil.copytree(stored, tmp_path / "copy"))


def train_plan(plan: OfflinePlan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train in this process; returns the weights and the history."""
    result = training.train(plan, lambda _: None)
    history = (Path(plan.out) / "history.jsonl").read_text().splitlines()
    return load_file(Path(result.checkpoint) / "model.safetensors"), [json.loads(line) for line in history]


def train_from_beginning(plan: OfflinePlan) -> OfflinePlan:
    return dataclasses.replace(plan, start=0, resume_point="", out=f"{plan.out}-from-the-beginning")


def are_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def ids_by_step(run: Path) -> list[list[int]]:
    """Return the trajectories trained by each step."""
    columns = VersionedStore.open(run / "store").displayed_columns()
    consumed = columns["fate"] == "consumed"
    return [columns["trajectory"][consumed & (columns["step"] == step)].tolist() for step in range(3)]


@pytest.mark.parametrize(
    ("name", "start", "rows", "steps"),
    [
        ("a row of the first step", 0, 1, 3), ("a group of the last step", 2, 4, 3),
        ("the first step", 0, 16, 2), ("the middle step", 1, 16, 2), ("the last step", 1, 16, 2),
    ],
)  # fmt: skip
def test_unlearned_weights_equal_training_without_the_rows(
    name: str, start: int, rows: int, steps: int, run_copy: Path, tmp_path: Path
) -> None:
    first, middle, last = ids_by_step(run_copy)
    left_out = {
        "a row of the first step": first[3:4], "a group of the last step": last[4:8],
        "the first step": first, "the middle step": middle, "the last step": last,
    }[name]  # fmt: skip
    plan, facts = unlearning.make_plan(run_copy, tmp_path / "out", f"trajectory in {left_out}", "without")
    assert (facts.rows, facts.start) == (rows, start)
    assert (bool(plan.resume_point), bool(facts.reason)) == (start > 0, start == 0)
    assert len(facts.steps_left_out) == 3 - steps
    weights, history = train_plan(plan)
    expected, whole = train_plan(train_from_beginning(plan))
    assert are_equal(weights, expected)
    assert not are_equal(weights, load_file(run_copy / "checkpoints" / "step-000003" / "model.safetensors"))
    assert [(h["weights"], h["batch"]) for h in history] == [(h["weights"], h["batch"]) for h in whole[start:]]
    assert len(whole) == steps
    published = [record.weight_fingerprint for record in VersionedStore.open(run_copy / "store").commits()]
    assert [h["weights"] for h in whole[:start]] == published[:start]

    verified = verify_offline(tmp_path / "out", steps=ALL)
    assert verified.is_verified and not verified.unverified and verified.checkpoint_is_equal
    assert verified.repeated_steps == tuple(range(start, steps))


def test_values_of_an_unlearned_row_do_not_affect_the_weights(run_copy: Path, stored: Path, tmp_path: Path) -> None:
    """The weights are the same if its reward, tokens and logprobs are different."""
    row = ids_by_step(run_copy)[0][3]
    plan, facts = unlearning.make_plan(run_copy, tmp_path / "out", f"trajectory == {row}", "without")
    assert 0 < facts.recomputed <= 3, "the others of its group whose advantages it changed"
    weights, _ = train_plan(plan)

    def spoil(root: Any) -> None:
        (position,) = np.flatnonzero(root["rows/trajectory"][:] == row)
        for name, value in (("reward", 9.0), ("advantage", 9.0)):
            root[f"rows/{name}"][position] = value
        begin = int(root["rows/offset"][position] + root["rows/prompt_tokens"][position])
        root["tokens/ids"][begin] = 5
        root["tokens/logprobs"][begin] = -3.0

    spoiled = Path(shutil.copytree(stored, tmp_path / "spoiled"))
    edit(spoiled / "store", spoil)
    again, _ = unlearning.make_plan(spoiled, tmp_path / "again", f"trajectory == {row}", "without")
    assert are_equal(train_plan(again)[0], weights)


def test_a_killed_unlearning_resumes_on_the_same_branch(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def die(event: Mapping[str, Any]) -> None:
        if event.get("done") == 2:
            raise Killed

    monkeypatch.setattr(training, "RESUME_POINT_S", 0.0)
    where = f"trajectory == {ids_by_step(run_copy)[1][0]}"
    plan, _ = unlearning.make_plan(run_copy, tmp_path / "out", where, "without")
    with pytest.raises(Killed):
        training.train(plan, die)
    again, _ = unlearning.make_plan(run_copy, tmp_path / "out", where, "without")
    assert (again.digest, again.start) == (plan.digest, 1)
    steps: list[int] = []
    training.train(again, lambda event: steps.append(event.get("done", 0)))
    assert 2 not in steps and 3 in steps
    assert verify_offline(tmp_path / "out", steps=ALL).repeated_steps == (1, 2)


def test_steps_before_the_resume_point_are_verified(run_copy: Path, stored: Path, tmp_path: Path) -> None:
    """If the resume point is gone they are repeated, and a wrong batch among them is found."""
    first, middle, _ = ids_by_step(run_copy)
    plan, _ = unlearning.make_plan(run_copy, tmp_path / "out", f"trajectory == {middle[0]}", "without")
    forged = dataclasses.replace(plan, where=f"trajectory != {first[0]}", out=str(tmp_path / "forged"))
    train_plan(plan)
    train_plan(forged)
    (finding,) = verify_offline(tmp_path / "forged", steps=ALL).findings
    assert finding.location == "step 0" and "not the run's" in finding.message
    for point in (run_copy / "resume").iterdir():
        point.unlink()
    assert verify_offline(tmp_path / "out", steps=ALL).repeated_steps == (0, 1, 2)


def test_a_resume_point_of_other_weights_or_settings_is_not_used(run_copy: Path, tmp_path: Path) -> None:
    where = f"trajectory == {ids_by_step(run_copy)[1][0]}"
    shutil.copy(run_copy / "resume" / "v00000002.pt", run_copy / "resume" / "v00000001.pt")
    plan, _ = unlearning.make_plan(run_copy, tmp_path / "out", where, "without")
    with pytest.raises(StoreError, match=r"v00000001\.pt: not the weights that step 0 published; remove it"):
        training.train(plan, lambda _: None)
    (run_copy / "resume" / "v00000001.pt").unlink()
    _, facts = unlearning.make_plan(run_copy, tmp_path / "out", where, "without")
    assert (facts.start, facts.reason) == (0, "no resume point of version 1 or before is kept")
    with (run_copy / "config.toml").open("a") as file:
        file.write("# changed\n")
    _, facts = unlearning.make_plan(run_copy, tmp_path / "out", where, "without")
    assert facts.reason == "the run was not trained with the current settings"


def test_the_only_step_that_remains_is_trained_from_the_base_model(run_copy: Path) -> None:
    """The reason does not claim that step 0 is changed, or that inputs changed which no commit recorded."""
    store = VersionedStore.open(run_copy / "store")
    start, _, reason = unlearning.find_start(run_copy, store, first_changed_step=1, num_steps=1)
    assert (start, reason) == (0, "only one step remains")
    start, _, reason = unlearning.find_start(run_copy, store, first_changed_step=0, num_steps=3)
    assert (start, reason) == (0, "it is changed in step 0")


def test_a_run_without_recorded_inputs_is_trained_from_the_base_model(tmp_path: Path) -> None:
    run_dir = stored_simulation(tmp_path, "name=emulated")
    store = VersionedStore.open(run_dir / "store")
    start, _, reason = unlearning.find_start(run_dir, store, first_changed_step=1, num_steps=3)
    assert (start, reason) == (0, "the run did not record its settings and code")


def test_a_resume_point_of_another_kind_of_machine_is_named(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training from the beginning on this machine would give other weights before the resume point."""
    plan, _ = unlearning.make_plan(
        run_copy, tmp_path / "out", f"trajectory == {ids_by_step(run_copy)[1][0]}", "without"
    )
    monkeypatch.setattr(numerics, "describe_numerics", lambda: "another machine")
    lines: list[str] = []
    training.train(plan, lambda event: lines.append(event.get("say", "")))
    (line,) = (line for line in lines if line.startswith("the steps before were trained with torch"))
    assert line.endswith("; here it is another machine, which may give other weights")


@pytest.mark.parametrize("name", [name for name in ADVANTAGES.names if name != "none"])
def test_advantages_are_recomputed_only_where_they_depend_on_removed_rows(name: str, job: Path) -> None:
    """Three groups of four in two steps with arbitrary stored advantages; one row of the second group is removed."""
    config = loading.load(job, (f"training.advantage={name}",))
    count, odd = 12, np.float32(0.123)
    table: dict[str, npt.NDArray[Any]] = {
        "trajectory": np.arange(count), "group": np.arange(count) // 4, "step": np.arange(count) // 8,
        "reward": np.asarray([0, 1, 2, 5, 0, 0, 1, 3, 1, 0, 1, 0], np.float32), "loss_mask": np.ones(count, bool),
        "response_tokens": np.full(count, 5), "advantage": np.full(count, odd),
    }  # fmt: skip
    trained, removed = np.ones(count, bool), np.arange(count) == 7
    found = unlearning.reestimate_advantages(config, table, trained, removed)
    table["reward"][7] = -50.0
    again = unlearning.reestimate_advantages(config, table, trained, removed)
    assert found[7] == 0 and (found == again).all()
    assert (found[8:] == odd).all()
    rest: npt.NDArray[np.float64] = np.asarray([0, 0, 1]) - 1 / 3
    if name == "dr_grpo":
        assert found[4:7] == pytest.approx(rest)
    if name in ("grpo", "dapo", "dr_grpo", "rloo"):
        assert (found[:4] == odd).all()
    alone = unlearning.reestimate_advantages(config, table, trained, (table["group"] == 1) & (table["trajectory"] > 4))
    assert name not in ("grpo", "dapo", "dr_grpo", "rloo") or alone[4] == 0


def test_an_invalid_unlearning_is_rejected_and_stores_nothing(run_copy: Path, tmp_path: Path) -> None:
    before = VersionedStore.open(run_copy / "store").branches()
    (first, *_), *_ = ids_by_step(run_copy)
    emulated = stored_simulation(tmp_path, "name=emulated")
    taken = f"trajectory == {first}"
    (run_copy.parent / "copy-taken").mkdir()
    invalid: list[tuple[list[str | Path], str]] = [
        ([run_copy, "--where", "trajectory == 999999"], "no trajectories that were trained on match"),
        ([run_copy, "--where", "fate == 'aborted'"], "no trajectories that were trained on match"),
        ([run_copy, "--where", "step >= 0"], "all trajectories that were trained on match"),
        ([run_copy, "--where", " "], "where must say which"),
        ([run_copy, "--where", "colour == 3"], "there is no column 'colour'"),
        ([run_copy, "--where", taken, "--branch", "main"], "a branch cannot be called 'main'"),
        ([run_copy, "--where", taken, "--branch", "taken"], "already exists"),
        ([emulated, "--where", "step == 0"], "an emulated run has nothing to train a model on"),
        ([tmp_path / "none", "--where", taken], "no such run"),
    ]
    for arguments, message in invalid:
        assert message in error_line("unlearn", *arguments)
    with run_folder.lock_folder(run_copy):
        assert command("unlearn", run_copy, "--where", taken).returncode == 2
    with pytest.raises(ConfigError, match="the run as of a step"):
        staleflow.open_run(run_copy, at_step=1).unlearn(taken)
    assert VersionedStore.open(run_copy / "store").branches() == before


def test_the_unlearn_command_trains_and_lists_the_removed_rows(run_copy: Path) -> None:
    """On a branch, with a matching row that was never trained."""
    _, middle, _ = ids_by_step(run_copy)
    completed = staleflow_process(
        "unlearn", run_copy, "--where", f"trajectory in {middle[:2]} or fate == 'aborted'", "--json"
    )
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    columns = VersionedStore.open(run_copy / "store").displayed_columns()
    assert (result["rows"], result["start"], result["first_step"]) == (2, 1, 1)
    assert result["never_trained"] == int((columns["fate"] == "aborted").sum())
    view = VersionedStore.open(run_copy / "store", branch="unlearned")
    assert view.lineage["without"].startswith("trajectory in")
    masks = dict(zip(columns["trajectory"].tolist(), view.displayed_columns()["loss_mask"].tolist(), strict=True))
    assert {trajectory for trajectory in middle if not masks[trajectory]} == {*middle[:2]}
    assert [row.trajectory.error for row in view.trajectories()] == [
        row.trajectory.error for row in VersionedStore.open(run_copy / "store").trajectories()
    ]
    assert Path(result["training"]["checkpoint"]).parents[1] == run_copy.with_name("copy-unlearned")
    assert command("verify", run_copy.with_name("copy-unlearned"), "--steps", 1).returncode == 0

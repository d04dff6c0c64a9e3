"""Verification: unmodified runs are verified, also resumed ones and those of several ranks; forgeries are found with
their place, also with a new chain; what cannot be checked does not pass."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.recovery import certificate, resumption
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.pipeline.stored_runs import training
from staleflow.pipeline.stored_runs.offline_verification import verify_offline
from staleflow.pipeline.stored_runs.verification import Verification, verify_run
from staleflow.stores.auditing.chain import check_chain
from staleflow.stores.errors import StoreError
from staleflow.stores.files import remove
from staleflow.stores.trajectories.columns import COLUMNS
from staleflow.stores.trajectories.derived_branches import BranchRewards, derive_rewards
from staleflow.stores.trajectories.layout import TOKEN_ARRAYS
from staleflow.stores.trajectories.records import CommitRecord, batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, Fate, Segment
from staleflow.tasks.training import numerics
from tests.commands import command
from tests.stored_runs.in_process import repeat_in_this_process  # noqa: F401  used by name
from tests.stores import store_conformance
from tests.stores.test_stores import change_logprob, edit
from tests.support.examples import num_examples
from tests.support.simulated_store import stored_simulation

ALL = 99


@pytest.fixture
def run_copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of the run that tests may change."""
    shutil.copytree(stored, tmp_path / "copy")
    return tmp_path / "copy"


def finding_places(result: Verification) -> list[tuple[str, str]]:
    return [(finding.check, finding.location) for finding in result.findings]


def test_a_missing_first_step_is_reported(tmp_path: Path) -> None:
    row = store_conformance.ended(np.random.default_rng(0), 0, 1)
    store = VersionedStore.create(tmp_path / "store", store_conformance.HEADER)
    store.commit(store_conformance.record(1), [row])
    assert finding_places(verify_run(tmp_path)) == [("chain", "step 0")]


# -- honest runs -----------------------------------------------------------------------------------------------------


def test_an_unmodified_run_is_verified_with_every_step(stored: Path) -> None:
    events: list[Any] = []
    result = verify_run(stored, steps=ALL, report=events.append)
    assert result.is_verified and not result.findings and not result.unverified
    assert result.repeated_steps == result.sample_steps == (0, 1, 2)
    assert result.num_commits == 4
    assert [event["done"] for event in events if "done" in event] == [1, 2, 3]
    assert result.lines[0] == f"{stored}: verified"
    assert "  weights: 3 of 3 steps repeated bit for bit: steps 0-2" in result.lines
    one = verify_run(stored, steps=1, seed=2)
    assert one.is_verified and len(one.sample_steps) == 1 and {*one.sample_steps} <= {*one.repeated_steps}


def test_a_step_is_repeated_from_the_nearest_resume_point(stored: Path) -> None:
    seeds = (seed for seed in range(ALL) if random.Random(seed).sample(range(3), 1) == [2])
    result = verify_run(stored, steps=1, seed=next(seeds))
    assert result.repeated_steps == (2,)


def test_a_checkpoint_is_verified_with_its_steps(run_copy: Path, tmp_path: Path) -> None:
    folder = run_copy / "checkpoints" / "step-000003"
    completed = command("verify", folder, "--steps", ALL, "--json")
    assert completed.returncode == 0, completed.stderr
    assert (values := json.loads(completed.stdout))["checkpoint_is_equal"] and values["repeated_steps"] == [0, 1, 2]
    named = certificate.read(folder)
    assert (named.version, named.entry) == (3, VersionedStore.open(run_copy / "store").chain_entry(2))

    certificate.write(folder, replace(named, entry="0" * 64))
    assert finding_places(verify_run(run_copy, folder, steps=1)) == [("chain", certificate.FILE)]
    certificate.write(folder, named)
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name].copy()
    weights[name].flat[0] += np.float32(1e-4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    result = verify_run(run_copy, folder, steps=1)
    assert not result.is_verified and not result.checkpoint_is_equal
    assert finding_places(result) == [("weights", f"version 3 in {folder}")]
    moved = shutil.move(folder, tmp_path / "moved")
    assert command("verify", moved).returncode == 2


@pytest.mark.slow  # a separate run
def test_a_run_resumed_twice_with_other_settings_after_lost_resume_points_is_verified(job: Path) -> None:
    from tests.runtime.test_run import run

    folder = run(job, "steps=3", "task.eval_prompts=0", "training.schedule='linear'").run_dir
    for steps in (5, 7):
        max((folder / "resume").glob("v*")).unlink()  # so that a step is undone, and trained again on other rows
        changed = resumption.load(folder, (f"steps={steps}", f"training.schedule_steps={steps + 4}"))
        asyncio.run(execute(changed, RunListener(), resume=True))
    result = verify_run(folder, steps=ALL)
    assert result.is_verified and result.repeated_steps == tuple(range(7))
    undone = VersionedStore.open(folder / "store").branches()
    assert len(undone) == 2
    for branch in undone:
        assert not check_chain(VersionedStore.open(folder / "store", branch=branch)).findings


def test_offline_training_continues_the_chain_of_its_run(run_copy: Path, tmp_path: Path) -> None:
    """With other rewards, selected rows and two epochs: one of its steps is repeated, and a change is found."""
    reward_rescoring_branch(run_copy)
    out = tmp_path / "out"
    changes = ("task.eval_prompts=0", "training.learning_rate=1e-2")
    plan = training.make_plan(run_copy, out, changes, "other", "staleness <= 1", 2)
    training.train(plan, lambda _: None)
    result = verify_offline(out, steps=ALL)
    assert result.is_verified and not result.unverified and result.checkpoint_is_equal
    assert result.repeated_steps == (0, 1, 2, 3, 4, 5)
    completed = command("verify", out, "--steps", 1)
    assert completed.returncode == 0 and completed.stdout.startswith(f"{out / 'checkpoints' / 'step-000006'}: verified")
    shutil.copytree(out / "checkpoints" / "step-000006", out / "checkpoints" / "step-000005")
    refused = command("verify", out / "checkpoints" / "step-000005")
    assert refused.returncode == 2 and "which is step-000006; name that" in refused.stderr

    history = (out / "history.jsonl").read_text()
    (out / "history.jsonl").write_text(history.replace('"rows": 16.0', '"rows": 15.0', 1))
    assert finding_places(verify_offline(out)) == [("chain", "step 1 of history.jsonl")]
    (out / "history.jsonl").write_text(history)
    job = (out / "job.toml").read_text()
    (out / "job.toml").write_text(job.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    assert finding_places(verify_offline(out)) == [("chain", "step 0 of history.jsonl")]
    (out / "job.toml").write_text(job)
    shutil.rmtree(run_copy / "store")
    assert command("verify", out).returncode == 2


def reward_rescoring_branch(run: Path) -> None:
    """Create a branch whose rewards are the lengths of the responses."""
    store = VersionedStore.open(run / "store")
    columns = store.displayed_columns()
    lengths = columns["response_tokens"].astype(np.float32)
    new = BranchRewards(rewards=lengths, advantages=lengths - lengths.mean(), loss_mask=columns["loss_mask"], errors={})
    derive_rewards(store, run / "store", "other", new, {"reward": "length"})


# -- what cannot be checked does not pass ----------------------------------------------------------------------------


def test_a_run_without_weights_or_without_steps_is_not_verified(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "steps=2")
    result = verify_run(run)
    assert not result.is_verified and not result.findings and not result.repeated_steps
    assert "weights: no step can be repeated" in result.unverified
    completed = command("verify", run)
    assert completed.returncode == 1
    assert completed.stdout.startswith(f"{run}: NOT VERIFIED")


def test_other_weights_on_another_kind_of_machine_are_not_a_contradiction(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    step = PolicyTrainer.step

    def inexact(self: PolicyTrainer, number: int, rows: Any) -> dict[str, float]:
        metrics = step(self, number, rows)
        next(iter(self.model.parameters())).data.add_(1e-6)
        return metrics

    monkeypatch.setattr(PolicyTrainer, "step", inexact)
    assert finding_places(verify_run(stored, steps=ALL)) == [("weights", f"step {step}") for step in range(3)]
    monkeypatch.setattr(numerics, "describe_numerics", lambda: "another machine")
    result = verify_run(stored, steps=ALL)
    assert not result.is_verified and not result.findings
    assert any("another machine" in line for line in result.unverified)


# -- forgeries -------------------------------------------------------------------------------------------------------


def test_a_changed_store_is_found_by_its_chain_without_repeating_steps(run_copy: Path) -> None:
    edit(run_copy / "store", change_logprob)
    result = verify_run(run_copy)
    assert ("chain", "step 0") in finding_places(result)
    assert not result.is_verified and not result.repeated_steps
    assert command("verify", run_copy).returncode == 1


def reward(row: EndedTrajectory) -> EndedTrajectory:
    """Return a reward with the advantage it gives."""
    return replace(row, trajectory=replace(row.trajectory, reward=row.trajectory.reward + 1), advantage=0.5)


def logprob(row: EndedTrajectory) -> EndedTrajectory:
    return with_first_segment(row, lambda segment: replace(segment, logprobs=segment.logprobs - np.float32(0.5)))


def token(row: EndedTrajectory) -> EndedTrajectory:
    return with_first_segment(row, lambda segment: replace(segment, tokens=segment.tokens[::-1].copy()))


def unknown_token(row: EndedTrajectory) -> EndedTrajectory:
    return with_first_segment(row, lambda segment: replace(segment, tokens=segment.tokens + np.int32(2**30)))


def with_first_segment(row: EndedTrajectory, change: Callable[[Segment], Segment]) -> EndedTrajectory:
    first, *rest = row.trajectory.spans
    assert isinstance(first, Segment)
    return replace(row, trajectory=replace(row.trajectory, spans=(change(first), *rest)))


@pytest.mark.parametrize("change", [reward, logprob, token, unknown_token])
def test_a_forged_batch_with_a_new_chain_gives_other_weights(
    run_copy: Path, change: Callable[[EndedTrajectory], EndedTrajectory]
) -> None:
    """The forger changes the trained data and recomputes all hashes but does not train. Only rows with an advantage
    affect the weights."""
    rows = list(VersionedStore.open(run_copy / "store").trajectories())
    forged = [change(row) if row.fate is Fate.CONSUMED else row for row in rows]
    store = store_again(run_copy, VersionedStore.open(run_copy / "store").commits(), forged)
    assert not check_chain(store).findings
    trained = {f"step {row.step}" for row in (*rows, *forged) if row.fate is Fate.CONSUMED and row.advantage}
    result = verify_run(run_copy, steps=ALL)
    found = {where for _, where in finding_places(result)}
    # For the metrics, rows without an advantage are computed too, which fails at tokens that the model does not have.
    measured = {f"step {row.step}" for row in rows if row.fate is Fate.CONSUMED and change is unknown_token}
    assert found <= trained | measured and bool(found) >= bool(trained)
    assert result.is_verified == (not found)


def test_records_without_fingerprints_inputs_or_steps_are_not_verified(run_copy: Path) -> None:
    """With a new chain: weights that no step published, no inputs, and a missing step."""
    records = VersionedStore.open(run_copy / "store").commits()
    store_again(run_copy, [replace(record, weight_fingerprint="") for record in records])
    result = verify_run(run_copy, steps=ALL)
    assert not result.repeated_steps and ("weights", "step 0") in finding_places(result)
    store_again(run_copy, [replace(record, inputs={"more": ""} if record.inputs else {}) for record in records])
    result = verify_run(run_copy, steps=ALL)
    assert not result.is_verified and "steps 0-2: their job file is not in the run's folder" in result.unverified
    rows = list(VersionedStore.open(run_copy / "store").trajectories())
    before, after = records[0].num_rows, records[0].num_rows + records[1].num_rows
    store_again(run_copy, [records[0], *records[2:]], [*rows[:before], *rows[after:]])
    assert finding_places(verify_run(run_copy)) == [("chain", "step 1")]


def store_again(run: Path, records: Sequence[CommitRecord], rows: Sequence[EndedTrajectory] = ()) -> VersionedStore:
    """Commit the records and rows of a run, or others, to a new store with new hashes."""
    source = VersionedStore.open(run / "store")
    stored, header = list(rows or source.trajectories()), source.header
    shutil.rmtree(run / "store")
    store = VersionedStore.create(run / "store", header)
    for record in records:
        committed, stored = stored[: record.num_rows], stored[record.num_rows :]
        consumed = [(row.trajectory, row.advantage) for row in committed if row.fate is Fate.CONSUMED]
        batch = batch_fingerprint(consumed) if record.kind == "step" else ""
        store.commit(replace(record, batch_fingerprint=batch, rows_fingerprint="", previous=""), committed)
    return store


def test_changed_files_of_the_run_are_found(run_copy: Path) -> None:
    job = run_copy / "config.toml"
    text = job.read_text()
    job.write_text(text.replace("learning_rate = 0.001", "learning_rate = 0.002"))
    assert job.read_text() != text
    result = verify_run(run_copy)
    assert finding_places(result) == [("settings", "config.toml")] and not result.repeated_steps
    job.unlink()
    result = verify_run(run_copy)
    assert not result.findings and not result.is_verified
    assert "steps 0-2: their job file is not in the run's folder" in result.unverified
    job.write_text(text)
    (run_copy / "fingerprints.json").write_text(
        (run_copy / "fingerprints.json").read_text().replace("chain_sum", "chain_sun")
    )
    (run_copy / "code").mkdir()
    (run_copy / "code" / "more.py").write_text("x = 1\n")
    assert finding_places(verify_run(run_copy, steps=1)) == [("settings", "code"), ("settings", "fingerprints.json")]


def test_a_changed_resume_point_and_a_changed_base_model_are_found(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    point = run_copy / "resume" / "v00000001.pt"
    state = torch.load(point, weights_only=True)
    next(iter(state["model"].values())).view(-1)[0] += 1e-4
    torch.save(state, point)
    result = verify_run(run_copy, steps=ALL)
    assert finding_places(result) == [("weights", "resume point of version 1")]
    assert result.repeated_steps == (0, 2) and "step 1: of the sample, and not repeated to the end" in result.unverified
    point.write_bytes(point.read_bytes()[:-1000])
    assert verify_run(run_copy, steps=ALL).is_verified, "an incomplete resume point is ignored"

    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    load = PolicyTrainer._load_model

    def other(self: PolicyTrainer) -> Any:
        model = load(self)
        next(iter(model.parameters())).data.view(-1)[0] += 1e-4
        return model

    monkeypatch.setattr(PolicyTrainer, "_load_model", other)
    assert next(where for _, where in finding_places(verify_run(run_copy, steps=ALL))).startswith("version 0 in ")


COVERED = ("store/", "config.toml", "fingerprints.json", "resume/", "checkpoints/")
"""Verified parts of a run folder, with checkpoints by name."""
NOT_COVERED = (
    "events.jsonl", "job.log", "job.json", "starts.json", "summary.json", "summary.png", "tensorboard/", "spool/",
    ".running", ".store.lock", ".resume.writer",
)  # fmt: skip
"""Parts that are not verified; docs/stored-runs.md explains why."""


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one bit flipped."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def test_every_file_of_a_run_is_verified_or_listed_as_not_covered(run_copy: Path) -> None:
    files = {str(path.relative_to(run_copy)): path for path in run_copy.rglob("*") if path.is_file()}
    assert [name for name in files if not name.startswith((*COVERED, *NOT_COVERED))] == []
    rng = random.Random(1)
    for name in ("config.toml", "fingerprints.json"):
        data = files[name].read_bytes()
        for _ in range(max(2, num_examples() // 50)):
            files[name].write_bytes(flip_bit(data, rng))
            try:
                found = ("settings", name) in finding_places(verify_run(run_copy, steps=1))
            except StoreError:  # it cannot be read
                found = True
            assert found, files[name].read_bytes()
        files[name].write_bytes(data)
    point = next(path for name, path in files.items() if name.startswith("resume/"))
    data = point.read_bytes()
    for _ in range(3):
        point.write_bytes(flip_bit(data, rng))
        result = verify_run(run_copy, steps=ALL)
        assert result.findings or result.repeated_steps == (0, 1, 2), "a bit of the file's padding"
    for name in NOT_COVERED:
        remove(run_copy / name)
    point.write_bytes(data)
    assert verify_run(run_copy, steps=ALL).is_verified, "no part of it is needed"


def test_random_changes_of_store_files_are_found_or_not_read(run_copy: Path) -> None:
    """A flipped bit breaks the chain, makes the store unreadable, or affects only data that the current snapshot does
    not use."""
    contents = read_all(run_copy / "store")
    files = sorted(path for path in (run_copy / "store").rglob("*") if path.is_file() and path.stat().st_size)
    rng = random.Random(0)
    found = 0
    # The current snapshot uses nearly all chunks but only some of the manifests, which are most of the files.
    chunks = [file for file in files if file.parent.name == "chunks"]
    some = rng.sample(chunks, min(len(chunks), num_examples() // 2))
    for file in some + rng.choices(files, k=max(20, num_examples() // 7)):
        data = file.read_bytes()
        file.write_bytes(flip_bit(data, rng))
        try:
            findings = check_chain(VersionedStore.open_pinned(run_copy / "store")).findings
        except StoreError:
            findings = ["unreadable"]  # type: ignore[list-item]
        found += bool(findings)
        if not findings:
            assert read_all(run_copy / "store") == contents, file
        file.write_bytes(data)
    assert found > 5


def read_all(path: Path) -> dict[str, bytes]:
    """Return everything in the current snapshot of a store."""
    root = VersionedStore.open_pinned(path)._read_root()
    names = [
        *(f"tokens/{name}" for name in TOKEN_ARRAYS),
        *(c.array_name for c in COLUMNS),
        *("text", "commits", "records"),
    ]
    return {name: np.asarray(root[name][:]).tobytes() for name in names}


def test_the_first_record_has_the_inputs_of_the_weights(stored: Path) -> None:
    records: list[CommitRecord] = [r for r in VersionedStore.open(stored / "store").commits() if r.kind == "step"]
    assert {*records[0].inputs} == {"weights", "settings", "user_code", "staleflow", "sources", "numerics"}
    assert records[0].inputs["numerics"].startswith("torch ")
    assert all(not record.inputs for record in records[1:])

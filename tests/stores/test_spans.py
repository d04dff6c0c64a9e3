"""Multi-turn trajectories in a store: env tokens between turns, and every inconsistency of spans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.auditing.audit import audit
from staleflow.stores.auditing.row_checks import RowRange, Spans, check_rows, hash_batches
from staleflow.stores.auditing.weight_counts import RefusedInstance
from staleflow.stores.context_branches import ContextBranch
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.reader import TOKEN_POSITION_COLUMNS, StoreReader
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EnvSpan, TrajectoryId
from tests.stores.plain_audit import plain_audit
from tests.stores.store_conformance import HEADER, ended, record, span_fields
from tests.stores.test_stores import edit, set_int, valid_store
from tests.tasks.branching import branching_row

MANY_TURNS = 7
"""A row of the valid store with env tokens."""


def tokens_of(root: Any, row: int, *, sampled: bool) -> Any:
    """Return the positions of a row's tokens of one kind, after its prompt."""
    offset, prompt, response = (int(root[f"rows/{name}"][row]) for name in TOKEN_POSITION_COLUMNS)
    first = offset + prompt
    return first + np.flatnonzero((root["tokens/versions"][first : first + response] >= 0) == sampled)


def set_token(root: Any, name: str, *, sampled: bool, value: float) -> None:
    root[f"tokens/{name}"][int(tokens_of(root, MANY_TURNS, sampled=sampled)[2])] = value


def set_spans(root: Any, change: Callable[[list[list[Any]]], None]) -> None:
    """Change the span text of a row and its versions accordingly."""
    begin, size = (int(root[f"rows/{n}"][MANY_TURNS]) for n in ("text_offset", "text_bytes"))
    extra = json.loads(np.asarray(root["text"][begin : begin + size]).tobytes())
    change(extra["segments"])
    text = json.dumps(extra).encode()
    set_int(root, MANY_TURNS, "text_offset", int(root["text"].shape[0]))
    set_int(root, MANY_TURNS, "text_bytes", len(text))
    root["text"].append(np.frombuffer(text, np.uint8))
    at = sum(int(root[f"rows/{n}"][MANY_TURNS]) for n in ("offset", "prompt_tokens"))
    for _, version, count, *_ in extra["segments"]:
        root["tokens/versions"][at : at + count] = version
        at += count


def mark_as_env(spans: list[list[Any]]) -> None:
    spans[0] = ["tool", -1, spans[0][2], 0.0]


def mark_as_sampled(spans: list[list[Any]]) -> None:
    entry = next(i for i, span in enumerate(spans) if span[1] < 0)
    spans[entry] = ["rollout-0", spans[0][1], spans[entry][2]]


def make_longer(spans: list[list[Any]]) -> None:
    next(span for span in spans if span[1] < 0)[3] += 1.0


def remove_seconds(spans: list[list[Any]]) -> None:
    next(span for span in spans if span[1] < 0).pop()


def change_role(spans: list[list[Any]]) -> None:
    next(span for span in spans if span[1] < 0)[0] = "t\u0000l"


ROW = f"trajectory {MANY_TURNS}"
SPAN_FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a given token in the loss": (
        lambda root: set_token(root, "mask", sampled=False, value=1),
        "1 tokens have a loss mask, and carry no gradient",
    ),
    "a sampled token outside the loss": (
        lambda root: set_token(root, "mask", sampled=True, value=0),
        "1 tokens that carry gradient have no loss mask",
    ),
    "a given token with a logprob": (
        lambda root: set_token(root, "logprobs", sampled=False, value=-1.0),
        "1 tokens that were not sampled have a logprob",
    ),
    "a sampled token marked as given": (
        lambda root: set_token(root, "versions", sampled=True, value=-1),
        "its segments do not match its token versions",
    ),
    "a given token marked as sampled": (
        lambda root: set_token(root, "versions", sampled=False, value=2),
        "its segments do not match its token versions",
    ),
    "a sampled span marked as given": (
        lambda root: set_spans(root, mark_as_env),
        "tokens that were not sampled have a logprob",
    ),
    "a given span marked as sampled": (
        lambda root: set_spans(root, mark_as_sampled),
        "tokens that carry gradient have no loss mask",
    ),
    "another time": (lambda root: set_spans(root, make_longer), "its spans have 3 turns"),
    "a given span without its time": (lambda root: set_spans(root, remove_seconds), "its record is corrupt"),
    "other numbers of turns": (
        lambda root: root["rows/turns"].__setitem__(MANY_TURNS, 2),
        "given tokens, 1.75 s; stored are 2 turns",
    ),
    "another number of given tokens": (
        lambda root: root["rows/given_tokens"].__setitem__(MANY_TURNS, root["rows/given_tokens"][MANY_TURNS] + 1),
        "given tokens, 1.75 s; stored are 3 turns",
    ),
    "no numbers of turns": (lambda root: root.__delitem__("rows/turns"), "stored are 0 turns"),
    "a given token with a teacher's logprob": (
        lambda root: set_token(root, "teacher", sampled=False, value=-1.0),
        "1 tokens that were not sampled have a teacher's logprob",
    ),
    "a sampled token without the teacher's logprob": (
        lambda root: set_token(root, "teacher", sampled=True, value=np.nan),
        "1 sampled tokens have no finite logprob of the teacher",
    ),
    "an infinite logprob of the teacher": (
        lambda root: set_token(root, "teacher", sampled=True, value=-np.inf),
        "1 sampled tokens have no finite logprob of the teacher",
    ),
    "a prompt's token with a version": (
        lambda root: root["tokens/versions"].__setitem__(int(root["rows/offset"][MANY_TURNS]), 1),
        "1 tokens of the prompt have a version",
    ),
}


@pytest.mark.parametrize("fault", SPAN_FAULTS)
def test_spans_that_contradict_the_arrays_are_found(tmp_path: Path, fault: str) -> None:
    valid_store(tmp_path / "s")
    change, what = SPAN_FAULTS[fault]
    edit(tmp_path / "s", change)
    store = VersionedStore.open(tmp_path / "s")
    findings = audit(store).findings
    assert [f.message for f in findings if f.check == "arrays" and what in f.message], findings
    assert plain_audit(store).findings == findings


def test_a_derived_branch_masks_tokens_by_its_loss_mask(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    trained = np.arange(18) % 2 == 1
    zeros = np.zeros(18, np.float32)
    new = derived_branches.BranchRewards(rewards=zeros, advantages=zeros, loss_mask=trained, errors={})
    derived_branches.derive_rewards(store, tmp_path / "s", "other", new, {})
    branch = VersionedStore.open(tmp_path / "s", branch="other")
    assert [f for f in audit(branch).findings if f.check == "arrays"] == []
    assert int(branch.to_xarray().mask.sum()) == sum(
        r.trajectory.num_sampled for r in store.trajectories() if r.trajectory.id % 2
    )
    assert audit(store).is_clean


def test_an_empty_observation_is_stored_as_a_turn(tmp_path: Path) -> None:
    """An environment returns nothing, and no template bridges the turns."""
    row = ended(np.random.default_rng(0), 0, 0)
    nothing = EnvSpan(role="tool", tokens=np.zeros(0, np.int32), seconds=0.5)
    spans = (row.trajectory.spans[0], nothing, row.trajectory.spans[0], replace(nothing, seconds=0.0))
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [replace(row, trajectory=replace(row.trajectory, spans=spans))])
    columns = VersionedStore.open(tmp_path / "s").displayed_columns()
    assert [columns[name].tolist() for name in ("turns", "given_tokens", "tool_s")] == [[2], [0], [0.5]]
    (read,) = store.trajectories()
    assert list(map(span_fields, read.trajectory.spans)) == list(map(span_fields, spans))
    assert plain_audit(store).findings == audit(store).findings
    edit(tmp_path / "s", lambda root: root.__delitem__("rows/turns"))
    findings = audit(damaged := VersionedStore.open(tmp_path / "s")).findings
    assert "its spans have 2 turns, 0 given tokens, 0.5 s; stored are 0 turns, 0 given tokens, 0.5 s" in [
        f.message for f in findings
    ]
    assert plain_audit(damaged).findings == findings


def test_an_unknown_role_is_accepted(tmp_path: Path) -> None:
    valid_store(tmp_path / "s")
    edit(tmp_path / "s", lambda root: set_spans(root, change_role))
    store = VersionedStore.open(tmp_path / "s")
    assert audit(store).is_clean
    row = store.get(TrajectoryId(MANY_TURNS))
    assert row is not None
    assert [s.role for s in row.trajectory.spans if isinstance(s, EnvSpan)] == ["t\0l", "user"]


def test_columns_count_turns_and_env_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(rng, i, 0) for i in (0, 2, 3)])
    before = store.snapshot
    store.commit(record(1), [ended(rng, i, 1) for i in (5, 4)])
    store.commit(record(2), [ended(rng, 6, 2)])
    columns = VersionedStore.open(tmp_path / "s").displayed_columns()
    assert columns["turns"].tolist() == [1, 1, 1, 1, 3, 1]
    assert columns["tool_s"].tolist() == [0, 0, 0, 0, 1.75, 0]
    for row, sampled, between in zip(
        store.trajectories(), columns["response_tokens"].tolist(), columns["given_tokens"].tolist(), strict=True
    ):
        assert (row.trajectory.num_sampled, row.trajectory.num_given) == (sampled, between)
    assert [len(store.displayed_columns(a, b)["turns"]) for a, b in ((0, 0), (2, 5), (4, 99), (6, 9))] == [0, 3, 2, 0]
    assert {*StoreReader.at(store.path, before).displayed_columns()["turns"].tolist()} == {1}
    VersionedStore.rewind(tmp_path / "s", 1)
    assert not [f for f in audit(VersionedStore.open(tmp_path / "s")).findings if f.check == "arrays"]


def test_env_step_seconds_add_up_exactly(tmp_path: Path) -> None:
    """Seconds are stored rounded, and the sum is over the rounded values."""
    rows = ended(np.random.default_rng(0), 0, 0)
    values = tuple(EnvSpan(role="tool", tokens=np.ones(1, np.int32), seconds=0.1 + 4e-7) for _ in range(9))
    spans = tuple(span for pair in zip(values, rows.trajectory.segments * 9, strict=False) for span in pair[::-1])
    store = VersionedStore.create(tmp_path / "store", replace(HEADER, groups_per_step=1, group_size=1))
    store.commit(record(0), [replace(rows, trajectory=replace(rows.trajectory, spans=spans))])
    findings = audit(VersionedStore.open(tmp_path / "store")).findings
    assert not [f for f in findings if f.check == "arrays"]


def set_after(root: Any, after: int) -> None:
    def change(spans: list[list[Any]]) -> None:
        next(span for span in spans if span[1] < 0).append(after)

    set_spans(root, change)


def test_branches_are_stored_and_part_of_the_batch_fingerprint(tmp_path: Path) -> None:
    header = replace(HEADER, groups_per_step=1, group_size=1)
    row = branching_row()
    batch = [(row.trajectory, row.advantage)]
    state = replace(record(0).ledger, num_started=1, num_ended={"consumed:none": 1}, live=())
    made = replace(record(0), batch_fingerprint=batch_fingerprint(batch), ledger=state)
    store = VersionedStore.create(tmp_path / "s", header)
    store.commit(made, [row])
    store = VersionedStore.open(tmp_path / "s")
    (read,) = store.trajectories()
    assert read.trajectory.branches == row.trajectory.branches
    assert read.trajectory.context.tolist() == [0, 1, 2, 3, 4, 5, 6, 15, 16, 17]
    assert audit(store).findings == plain_audit(store).findings == ()
    plain = tuple(replace(s, parent_end=None) if isinstance(s, EnvSpan) else s for s in row.trajectory.spans)
    assert batch_fingerprint([(replace(row.trajectory, spans=plain), 1.0)]) != made.batch_fingerprint


@pytest.mark.parametrize(("after", "message"), [
    (3, "the stored batch is not the one the trainer received"),
    (10_000, "goes on after token 10000"),
    (-2, "its record is corrupt"),
])  # fmt: skip
def test_a_branch_with_a_wrong_parent_is_found(tmp_path: Path, after: int, message: str) -> None:
    valid_store(tmp_path / "s")
    edit(tmp_path / "s", lambda root: set_after(root, after))
    store = VersionedStore.open(tmp_path / "s")
    findings = audit(store).findings
    assert [f for f in findings if message in f.message], findings
    assert plain_audit(store).findings == findings


def test_branch_positions_are_computed_from_the_spans() -> None:
    """Spans: row, instance, version, tokens, seconds, and the parent position of a context branch."""
    spans = [(0, "a", 0, 3, 0.0, -1), (0, "tool", -1, 2, 0.5, -1), (1, "a", 0, 4, 0.0, -1), (1, "a", 1, 5, 0.0, 6)]
    assert Spans.of(spans).branches(np.asarray([10, 7])) == {1: [ContextBranch(7 + 4, 6)]}


def test_batch_hashes_of_a_range_match_the_recorded_ones(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "store")
    recorded = {r.step: r.batch_fingerprint for r in store.commits() if r.batch_fingerprint}
    everything = RowRange(start=0, stop=store.summary().num_rows, steps=frozenset(recorded), max_tokens=1000)
    assert recorded
    assert hash_batches(StoreReader.at(store.path, store.snapshot), everything) == recorded


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_tokens_of_a_refused_instance_are_found_up_to_the_accepted_row(tmp_path: Path, max_tokens: int) -> None:
    """Row numbers count from the beginning of the store for any block size."""
    store = valid_store(tmp_path / "store")
    instances = {segment.instance for row in store.trajectories() for segment in row.trajectory.segments}
    refused = tuple(RefusedInstance(instance=instance, version=2, first_accepted_row=11) for instance in instances)
    rows = RowRange(start=2, stop=16, steps=frozenset(), max_tokens=max_tokens, refusals=refused)
    findings = check_rows(StoreReader.at(store.path, store.snapshot), 1, rows).findings
    assert [finding.location for finding in findings] == [f"trajectory {row}" for row in (8, 9, 10)]


def test_another_logprob_of_the_teacher_is_not_what_the_trainer_received(tmp_path: Path) -> None:
    valid_store(tmp_path / "s")
    edit(tmp_path / "s", lambda root: set_token(root, "teacher", sampled=True, value=-1.25))
    store = VersionedStore.open(tmp_path / "s")
    findings = audit(store).findings
    assert [(f.check, f.message) for f in findings] == [
        ("fingerprints", "the stored batch is not the one the trainer received")
    ]
    assert plain_audit(store).findings == findings

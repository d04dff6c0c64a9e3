"""Every finding of the audit, each with one planted fault. A finding without a planted fault fails a test."""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

from staleflow.stores.auditing import (
    audit,
    conservation,
    findings,
    row_checks,
    single_consumption,
    snapshot_audit,
    weight_counts,
)
from staleflow.stores.auditing.chain import check_chain
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import StoreUnavailable
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.columns import FATES, FINISHES, REASONS
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX, TOKEN_ARRAYS
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, RunHeader, batch_fingerprint
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    EnvSpan,
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    Trajectory,
    outcome_key,
)
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from tests.stores.store_conformance import ended, segment, verified, with_teacher
from tests.stores.store_conformance import record as sound_record

MODULES: tuple[ModuleType, ...] = (
    audit, conservation, row_checks, single_consumption, snapshot_audit, weight_counts,
)  # fmt: skip
"""All modules that create findings."""
STEPS, ETA = 3, 2
HEADER = RunHeader(run="r", eta=ETA, groups_per_step=1, group_size=2, members_started_per_group=2)
Rows = Callable[[int, list[EndedTrajectory]], list[EndedTrajectory]]
Record = Callable[[CommitRecord], CommitRecord]
Edit = Callable[[Any], None]


def same_rows(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
    return rows


def same_record(record: CommitRecord) -> CommitRecord:
    return record


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in a valid run and its expected finding. rows, record: replace what a commit stores. edit: changes the
    arrays of the finished store. files: changes its folder. alone: whether it gives no other finding. history: whether
    only the full audit finds it."""

    name: str
    check: str
    where: str
    message: str
    """A regular expression that matches the whole text."""
    rows: Rows = same_rows
    record: Record = same_record
    edit: Edit | None = None
    files: Callable[[Path], None] | None = None
    alone: bool = True
    history: bool = False

    def __str__(self) -> str:
        return self.name


def weight_check(fingerprint: str, refused: str = "") -> WeightCheck:
    """Return the weight check of a pull of version 1 by instance a."""
    return WeightCheck(
        instance=InstanceId("a"), version=PolicyVersion(1), fingerprint=fingerprint, weights=WeightReport(verified=1),
        drift=0.0, limit=1.0, refused=refused,
    )  # fmt: skip


# -- a sound run -----------------------------------------------------------------------------------------------------


def write_run(folder: Path, fault: Fault | None = None) -> None:
    """Store a run of three steps with a fault: each step consumes a group of two and drops another."""
    if fault is None or (fault.rows, fault.record) == (same_rows, same_record):
        shutil.copytree(valid_run(), folder)
    else:
        commit_all(folder, fault.rows, fault.record)
    if fault is not None and fault.edit is not None:
        repository = repository_at(folder)
        session = repository.writable_session("main")
        fault.edit(zarr.open_group(session.store, mode="r+"))
        session.commit("planted")
    if fault is not None and fault.files is not None:
        fault.files(folder)


@functools.cache
def valid_run() -> Path:
    """The run without a fault, in a folder that is removed at exit."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    commit_all(Path(made) / "store", same_rows, same_record)
    return Path(made) / "store"


def commit_all(folder: Path, change_rows: Rows, change_record: Record) -> None:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(folder, HEADER)
    counts: Counter[str] = Counter()
    for step in range(STEPS + 1):
        first = 4 * step
        rows = [ended(rng, first + i, step) for i in range(2)] if step < STEPS else []
        dropped = [ended(rng, first + i, step, Fate.ABORTED, loss_mask=False) for i in (2, 3)]
        rows += [replace(row, reason=AbortReason.SURPLUS_GROUP) for row in dropped] if step < STEPS else []
        rows = change_rows(step, rows)
        counts.update(outcome_key(r.fate, r.reason) for r in rows)
        record = CommitRecord(
            kind="step" if step < STEPS else "end",
            step=step,
            ledger=LedgerState(num_started=min(first + 4, 4 * STEPS), num_ended=dict(counts), live=(),
                               next_step=min(step + 1, STEPS), version=min(step, STEPS)),
            weight_fingerprint=f"w{step + 1}" if step < STEPS else "",
            weight_checks=(verified("c", step, f"w{step}"),) if step else (),
            batch_fingerprint=batch_fingerprint((r.trajectory, r.advantage) for r in rows if r.fate is Fate.CONSUMED)
            if step < STEPS else "",
        )  # fmt: skip
        store.commit(change_record(record), rows)


def audit_findings(folder: Path, *, history: bool = False) -> list[Finding]:
    if history:
        return list(snapshot_audit.audit_history(folder))
    return list(audit.audit(VersionedStore.open(folder)).findings)


@dataclass(frozen=True)
class Audited:
    """The audit of a run with a fault. sites: (module, line) of the findings' origins."""

    findings: list[Finding]
    sites: set[tuple[str, int]]


@functools.cache
def audited(fault: Fault) -> Audited:
    """Plant a fault and run the audit."""
    made = Audited([], set())

    def finding(**values: str) -> Finding:
        caller = sys._getframe(1)
        made.sites.add((caller.f_globals["__name__"], caller.f_lineno))
        return Finding(**values)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        write_run(Path(folder) / "s", fault)
        for module in MODULES:
            patch.setattr(module, Finding.__name__, finding)
        made.findings.extend(audit_findings(Path(folder) / "s", history=fault.history))
    return made


# -- faults ----------------------------------------------------------------------------------------------------------


def of_row(number: int, **changes: Any) -> Rows:
    """Change values of a stored trajectory."""

    def change(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
        return [r if r.trajectory.id != number else replace(r, **changes) for r in rows]

    return change


def of_trajectory(number: int, **changes: Any) -> Rows:
    def change(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
        return [
            r if r.trajectory.id != number else replace(r, trajectory=replace(r.trajectory, **changes)) for r in rows
        ]

    return change


def of_record(step: int, change: Callable[[CommitRecord], CommitRecord], kind: str = "step") -> Record:
    return lambda record: change(record) if (record.kind, record.step) == (kind, step) else record


def of_ledger(step: int, kind: str = "step", **changes: Any) -> Record:
    return of_record(step, lambda record: replace(record, ledger=replace(record.ledger, **changes)), kind)


def sampled_under(number: int, version: int, instance: str = "") -> Rows:
    """Let a trajectory end with two tokens of a version allowed by its v_traj. instance: the default is any."""
    more = segment(np.random.default_rng(1), version, 2)
    if instance:
        more = replace(more, instance=InstanceId(instance))

    def change(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
        return [
            r
            if r.trajectory.id != number
            else replace(r, trajectory=replace(r.trajectory, spans=(*r.trajectory.spans, more)))
            for r in rows
        ]

    return change


def taught_rows(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
    """Give all rows a teacher's logprobs."""
    return list(map(with_teacher, rows))


def lose_row(number: int) -> Rows:
    return lambda step, rows: [r for r in rows if r.trajectory.id != number]


def set_token(array: str, row: int, token: Callable[[int], int], value: float) -> Edit:
    """Overwrite the value of a token. token: function of the prompt length."""

    def edit(root: Any) -> None:
        at = int(root["rows/offset"][row]) + token(int(root["rows/prompt_tokens"][row]))
        root[f"tokens/{array}"][at] = value

    return edit


def shorten_array(array: str, count: int = 1) -> Edit:
    def edit(root: Any) -> None:
        held = root[array]
        held.resize((held.shape[0] - count, *held.shape[1:]))

    return edit


def shorten_tokens(root: Any) -> None:
    for name in ("ids", "logprobs", "versions", "mask"):
        shorten_array(f"tokens/{name}", 2)(root)


def count_extra_row(root: Any) -> None:
    """The last record and its line in the table of commits count one row more than was stored."""
    table, text = np.asarray(root["commits"][:]), np.asarray(root["records"][:]).tobytes()
    at, size = table[-1, [COMMIT_COLUMN_INDEX["record_offset"], COMMIT_COLUMN_INDEX["record_bytes"]]].tolist()
    changed = re.sub(rb'"num_rows": ?0', b'"num_rows": 1', text[at : at + size])
    assert len(changed) in (size, size + 1)
    table[-1, COMMIT_COLUMN_INDEX["record_bytes"]] = len(changed)
    table[-1, COMMIT_COLUMN_INDEX["rows"]] = 1
    root["commits"][:] = table
    root["records"].resize((at + len(changed),))
    root["records"][at:] = np.frombuffer(changed, np.uint8)


def set_line(column: str, number: int) -> Edit:
    """Change a number of the second commit in the table of commits."""
    return lambda root: root["commits"].__setitem__((1, COMMIT_COLUMN_INDEX[column]), number)


def delete_array(name: str) -> Edit:
    return lambda root: root.__delitem__(name)


def remove_first_commit(folder: Path) -> None:
    """Damage the snapshot of the run's first commit."""
    repository = repository_at(folder)
    path = folder / "snapshots" / list(repository.ancestry(branch="main"))[-3].id
    path.write_bytes(path.read_bytes()[:20])


def corrupt_record(root: Any) -> None:
    at = int(root["commits"][-1, COMMIT_COLUMN_INDEX["record_offset"]])
    root["records"][at] = ord("x")


def make_self_parent_branch(step: int, rows: list[EndedTrajectory]) -> list[EndedTrajectory]:
    """A context branch of trajectory 1 starts with a token whose parent is itself."""

    def change(t: Trajectory) -> Trajectory:
        at, first = next((i, span) for i, span in enumerate(t.spans) if isinstance(span, EnvSpan))
        place = len(t.prompt_tokens) + sum(len(span.tokens) for span in t.spans[:at])
        return replace(t, spans=(*t.spans[:at], replace(first, parent_end=place), *t.spans[at + 1 :]))

    return [replace(r, trajectory=change(r.trajectory)) if r.trajectory.id == 1 else r for r in rows]


def split_first_span(root: Any) -> None:
    """Replace the first row's span by spans of as many tokens in all, one of them of a negative number."""
    start, size = (int(root[f"rows/{name}"][0]) for name in ("text_offset", "text_bytes"))
    extra = json.loads(root["text"][start : start + size].tobytes())
    instance, version, count = extra["segments"][0]
    extra["segments"][:1] = [[instance, version, count], [instance, version, -2], [instance, version, 2]]
    text = json.dumps(extra, separators=(",", ":")).encode()
    end = root["text"].shape[0]
    root["text"].resize((end + len(text),))
    root["text"][end:] = np.frombuffer(text, np.uint8)
    root["rows/text_offset"][0], root["rows/text_bytes"][0] = end, len(text)


def store_row_twice(root: Any) -> None:
    root["rows/trajectory"][0] = root["rows/trajectory"][4]


def set_env_logprob(root: Any) -> None:
    """Set the logprob of an env token."""
    versions, mask = root["tokens/versions"][:], root["tokens/mask"][:]
    prompts = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(root["rows/offset"][:], root["rows/prompt_tokens"][:], strict=True)]
    )
    given = np.setdiff1d(np.flatnonzero((versions == -1) & (mask == 0)), prompts)
    root["tokens/logprobs"][int(given[0])] = -0.5


def corrupt_largest_chunks(folder: Path) -> None:
    """Overwrite the second half of the four largest chunks: logprobs and two of ids."""
    for chunk in sorted((folder / "chunks").iterdir(), key=lambda path: -path.stat().st_size)[:4]:
        data = chunk.read_bytes()
        chunk.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


FAULTS = (
    # -- the bound
    Fault(
        name="older_than_v_traj", check="bound", where="trajectory 4", message="a token of version 0, v_traj is 1",
        rows=of_trajectory(4, v_traj=PolicyVersion(1)),
    ),
    Fault(
        name="too_old", check="bound", where="trajectory 8", message="consumed by step 2, v_traj is -1 and eta 2",
        rows=of_trajectory(8, v_traj=PolicyVersion(-1)),
    ),
    Fault(
        name="too_new", check="bound", where="trajectory 0", message="consumed by step 0, v_traj is 1 and eta 2",
        rows=of_trajectory(0, v_traj=PolicyVersion(1)), alone=False,
    ),
    *(
        Fault(
            name=f"token_{newer}_newer", check="bound", where="trajectory 4",
            message=f"a token of version {1 + newer}, consumed by step 1", rows=sampled_under(4, 1 + newer),
        )
        for newer in range(1, ETA + 2)
    ),
    # -- the arrays
    Fault(
        name="other_turns", check="arrays", where="trajectory 1",
        message=r"its spans have 3 turns, \d+ given tokens, 1.75 s; stored are 4 turns, .*",
        edit=lambda root: root["rows/turns"].__setitem__(1, 4),
    ),
    Fault(
        name="other_versions", check="arrays", where="trajectory 4",
        message="its tokens have versions 0 to 1 and staleness 1; stored are versions 0 to 2 and staleness 1",
        edit=lambda root: root["rows/v_max"].__setitem__(4, 2),
    ),
    Fault(
        name="other_staleness", check="arrays", where="trajectory 4",
        message="its tokens have versions 0 to 1 and staleness 1; stored are versions 0 to 1 and staleness 0",
        edit=lambda root: root["rows/staleness"].__setitem__(4, 0),
    ),
    Fault(
        name="other_ids_of_a_commit", check="arrays", where="step 1",
        message=r"its rows have (\d+) tokens and the ids 4 to 7, it was stored with \1 and 4 to 6",
        edit=set_line("last_id", 6),
    ),
    Fault(
        name="other_kind_of_a_commit", check="arrays", where="records",
        message=r"step records cannot be read: .*the table of commits has \[1, 1, 4, \d+\], it has \(0, 1, 4, \d+\)",
        edit=set_line("kind", 1), alone=False,
    ),
    Fault(
        name="prompt_has_version", check="arrays", where="trajectory 0",
        message="1 tokens of the prompt have a version",
        edit=set_token("versions", 0, lambda prompt: 0, 0),
    ),
    Fault(
        name="given_has_logprob", check="arrays", where="trajectory 1",
        message="1 tokens that were not sampled have a logprob", edit=set_env_logprob,
    ),
    Fault(
        name="logprob_not_finite", check="arrays", where="trajectory 0",
        message="1 sampled tokens have a logprob that is not finite",
        edit=set_token("logprobs", 0, lambda prompt: prompt, -np.inf), alone=False,
    ),
    Fault(
        name="prompt_has_teacher_logprob", check="arrays", where="trajectory 0", rows=taught_rows,
        message="1 tokens that were not sampled have a teacher's logprob",
        edit=set_token("teacher", 0, lambda prompt: 0, -1.0),
    ),
    Fault(
        name="teacher_logprob_not_finite", check="arrays", where="trajectory 0", rows=taught_rows,
        message="1 sampled tokens have no finite logprob of the teacher, which has computed others of the row",
        edit=set_token("teacher", 0, lambda prompt: prompt, np.nan), alone=False,
    ),
    Fault(
        name="masked_without_gradient", check="arrays", where="trajectory 1",
        message="1 tokens have a loss mask, and carry no gradient", edit=set_token("mask", 1, lambda prompt: 0, 1),
    ),
    Fault(
        name="gradient_without_mask", check="arrays", where="trajectory 1",
        message="1 tokens that carry gradient have no loss mask", edit=set_token("mask", 1, lambda prompt: prompt, 0),
    ),
    Fault(
        name="segments_differ", check="arrays", where="store",
        message="trajectory 0: its segments do not match its token versions",
        edit=set_token("versions", 0, lambda prompt: prompt, 1),
    ),
    Fault(
        name="damaged_chunk", check="arrays", where="tokens/(logprobs|ids)",
        message=r".*tokens/\w+, chunk \d, .*; it holds parts of 4 of 12 trajectories; the others can be read",
        files=corrupt_largest_chunks,
    ),
    Fault(
        name="negative_span", check="arrays", where="store", message=r"trajectory 0: .*a span of -2 tokens.*",
        edit=split_first_span, alone=False,
    ),
    Fault(
        name="branch_after_itself", check="arrays", where="store",
        message=r"trajectory 1: its branch at token (\d+) goes on after token \1", rows=make_self_parent_branch,
    ),
    Fault(
        name="unreadable_record", check="arrays", where="records", message="step records cannot be read: .*",
        edit=corrupt_record, alone=False,
    ),
    Fault(
        name="column_too_short", check="arrays", where="rows/reward", message="11 rows, step records count 12",
        edit=shorten_array("rows/reward"), alone=False,
    ),
    *(
        Fault(
            name=f"{array.replace('/', '_')}_missing", check="arrays", where=array, message=f".*/s: {array} is missing",
            edit=delete_array(array),
        )
        for array in (*(f"tokens/{name}" for name in TOKEN_ARRAYS), "rows/trajectory", "text", "commits", "records")
    ),
    *(
        Fault(
            name=f"{array.replace('/', '_')}_absent", check="arrays", where=array, message="was deleted",
            rows=rows, edit=delete_array(array), alone=array == "rows/sampled_s",
        )
        for array, rows in (("rows/reward", same_rows), ("rows/sampled_s", same_rows), ("tokens/teacher", taught_rows))
    ),
    Fault(
        name="first_commit_unreadable", check="arrays", where="deleted columns",
        message=".*/s: .* cannot be read: .*", files=remove_first_commit,
    ),
    Fault(
        name="tokens_of_different_lengths", check="arrays", where="tokens",
        message=r"arrays of different lengths \[\d+, \d+\]", edit=shorten_array("tokens/ids"), alone=False,
    ),
    Fault(
        name="tokens_cut_off", check="arrays", where="store",
        message=r".*tokens/ids has \d+ elements, a row needs \d+: truncated", edit=shorten_tokens,
    ),
    # -- single consumption
    Fault(
        name="step_left_out", check="once", where="steps", message=r"steps are not 0, 1, 2, ...: \[0, 2\]",
        record=of_record(1, lambda record: replace(record, kind="resume")), alone=False,
    ),
    Fault(
        name="group_incomplete", check="once", where="step 1",
        message=r"consumed 1 groups of sizes \[1\], a batch is 1 of 2", rows=of_row(4, fate=Fate.FILTERED),
    ),
    Fault(
        name="group_of_other_ids", check="once", where="trajectory [45]",
        message=r"stored with group 5000, its id is of group 2",
        edit=lambda root: root["rows/group"].__setitem__(slice(4, 6), 5000),
    ),
    Fault(
        name="two_groups", check="once", where="step 1", message=r"consumed 2 groups of sizes \[1\], a batch is 1 of 2",
        rows=of_trajectory(4, group=GroupId(99)), alone=False,
    ),
    Fault(
        name="group_consumed_twice", check="once", where="group 0", message=r"consumed by steps \[0, 1\]",
        rows=lambda step, rows: [replace(r, trajectory=replace(r.trajectory, group=GroupId(0))) if step == 1 else r
                                 for r in rows],
        alone=False,
    ),
    Fault(
        name="stored_twice", check="once", where="trajectory 4",
        message="stored 2 times", edit=store_row_twice, alone=False,
    ),
    Fault(
        name="step_never_trained", check="once", where="step 5", message="consumed rows, and no commit trained it",
        rows=of_row(4, step=5), alone=False,
    ),
    # -- conservation
    Fault(
        name="lost", check="conservation", where="step 1",
        message="1 trajectories are neither stored nor in flight, first 7", rows=lose_row(7), alone=False,
    ),
    Fault(
        name="stored_and_in_flight", check="conservation", where="step 1",
        message="1 trajectories are stored and in flight, or were never started, first 2",
        record=of_ledger(1, live=((2, 3),)),
    ),
    Fault(
        name="in_flight_without_a_number", check="conservation", where="step 1",
        message="2 trajectories are stored and in flight, or were never started, first -3",
        record=of_ledger(1, live=((-3, -1),)),
    ),
    Fault(
        name="never_started", check="conservation", where="step 2",
        message="1 trajectories are stored and in flight, or were never started, first 11",
        record=of_ledger(2, num_started=11),
    ),
    Fault(
        name="counted_otherwise", check="conservation", where="step 0",
        message="the ledger counted .*consumed:none': 1.*, the rows are .*consumed:none': 2.*",
        record=of_ledger(0, num_ended={"consumed:none": 1, "aborted:surplus_group": 2}),
    ),
    Fault(
        name="rows_not_accounted_for", check="conservation", where="rows",
        message="12 rows, the step records account for 13", edit=count_extra_row, alone=False,
    ),
    Fault(
        name="work_in_flight_at_the_end", check="conservation", where="end",
        message="2 trajectories still in flight after the end",
        record=of_ledger(3, "end", num_started=14, live=((12, 14),)),
    ),
    # -- fingerprints
    Fault(
        name="other_batch", check="fingerprints", where="step 1",
        message="the stored batch is not the one the trainer received",
        record=of_record(1, lambda record: replace(record, batch_fingerprint="0" * 32)),
    ),
    Fault(
        name="instance_refused", check="fingerprints", where="step 2",
        message="a was taken out of service at version 1: its logprobs differ",
        record=of_record(2, lambda record: replace(record, weight_checks=(weight_check("w1", "its logprobs differ"),))),
    ),
    Fault(
        name="tokens_of_refused_instance", check="fingerprints", where="trajectory 4",
        message="2 tokens of a at version 1, at which it was taken out of service",
        rows=sampled_under(4, 1, instance="a"),
        record=of_record(2, lambda record: replace(record, weight_checks=(weight_check("w1", "its logprobs differ"),))),
        alone=False,
    ),
    Fault(
        name="instance_with_other_weights", check="fingerprints", where="step 2",
        message="a had wrong weights and kept sampling at version 1: it had w9, w1 was published; 1 parts verified.*",
        record=of_record(2, lambda record: replace(record, weight_checks=(weight_check("w9"),))),
    ),
    Fault(
        name="instance_with_other_logprobs", check="fingerprints", where="step 2",
        message="a had wrong weights and kept sampling at version 1: its logprobs differed by 5 nats, limit 1",
        record=of_record(
            2, lambda record: replace(record, weight_checks=(replace(weight_check("w1"), drift=5.0, limit=1.0),))
        ),
    ),
    Fault(
        name="instance_with_other_weights_and_logprobs", check="fingerprints", where="step 2",
        message="a had wrong .*: it had w9, w1 was published; .*; its logprobs differed by 5 nats, limit 1",
        record=of_record(
            2, lambda record: replace(record, weight_checks=(replace(weight_check("w9"), drift=5.0, limit=1.0),))
        ),
    ),
)  # fmt: skip


# -- what only the full audit reads ----------------------------------------------------------------------------------


def add_branch(folder: Path, kind: str) -> set[Path]:
    """Add a branch with other logprobs; returns the files that only it uses."""
    before = set((folder / kind).iterdir())
    store = VersionedStore.open(folder)
    count = store.array_lengths()["tokens/logprobs"]
    logprobs = np.random.default_rng(0).random(count).astype(np.float32)
    derived_branches.derive_logprobs(store, store.path, "other", logprobs, {})
    return set((folder / kind).iterdir()) - before


def check_added_branch(folder: Path) -> None:
    """Its ancestors belong to the main branch, which is read once."""
    add_branch(folder, "chunks")


def corrupt_branch(folder: Path) -> None:
    for path in add_branch(folder, "chunks"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_branch_unreadable(folder: Path) -> None:
    for path in add_branch(folder, "snapshots"):
        path.write_bytes(path.read_bytes()[:20])


def remove_oldest_snapshot(folder: Path) -> None:
    """Remove the oldest snapshot that is not empty."""
    repository = repository_at(folder)
    (_, _, earlier, *_) = repository.ancestry(branch="main")
    path = folder / "snapshots" / earlier.id
    path.write_bytes(path.read_bytes()[:20])


def change_earlier_value(root: Any) -> None:
    """A value stored by step 0 is changed."""
    root["rows/reward"][0] = 77.0


HISTORY = (
    Fault(
        name="branch_damaged", check="history", where="branch other", message=".*", files=corrupt_branch, history=True,
        alone=False,
    ),
    Fault(
        name="branch_not_opened", check="history", where="branch other", message=".*", files=make_branch_unreadable,
        history=True, alone=False,
    ),
    Fault(
        name="earlier_snapshot_unreadable", check="history", where="main, step .*|branch main",
        message="cannot be read: .*", files=remove_oldest_snapshot, history=True, alone=False,
    ),
    *(
        Fault(
            name=f"{array.replace('/', '_')}_deleted", check="history", where="main, planted",
            message=f"{array} was deleted", edit=delete_array(array), history=True,
        )
        for array in ("rows/reward", "tokens/ids", "rows/trajectory")
    ),
    Fault(
        name="earlier_value_changed", check="history", where="main, .*",
        message="rows/reward, chunk 0: it differs from what the newest snapshot has in its place",
        edit=change_earlier_value, files=check_added_branch, history=True,
    ),
)  # fmt: skip
ALL = (*FAULTS, *HISTORY)


def test_a_valid_run_has_no_findings_and_reads_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(row_checks, "token_faults")
    monkeypatch.delattr(audit, "hash_batches")
    monkeypatch.delattr(StoreReader, "unpack")
    write_run(tmp_path / "s")
    assert audit_findings(tmp_path / "s") == []
    assert audit_findings(tmp_path / "s", history=True) == []
    consumed = VersionedStore.create(tmp_path / "consumed", HEADER)
    consumed.commit(sound_record(0), [ended(np.random.default_rng(0), i, 0) for i in range(2)])
    assert audit.audit(consumed).num_trajectories == 2, "its last row is of a batch"


@pytest.mark.parametrize("number", [-1, 99, None])
@pytest.mark.parametrize(("name", "members"), [("finish", FINISHES), ("fate", FATES), ("reason", REASONS)])
def test_an_out_of_range_enum_number_is_a_finding(
    name: str, members: Sequence[Any], number: int | None, tmp_path: Path
) -> None:
    def edit(root: Any) -> None:
        root[f"rows/{name}"][2] = len(members) if number is None else number

    write_run(tmp_path / "s", Fault(name="", check="", where="", message="", edit=edit))
    assert audit_findings(tmp_path / "s")


@pytest.mark.parametrize("fault", ALL, ids=str)
def test_a_planted_fault_gives_its_finding(fault: Fault) -> None:
    found = audited(fault).findings
    matching = [
        f
        for f in found
        if f.check == fault.check and re.fullmatch(fault.where, f.location) and re.fullmatch(fault.message, f.message)
    ]
    assert matching, found
    assert not fault.alone or found == matching


READS = (
    "_commit_lines",
    "array_lengths",
    "damaged_chunks",
    "read_tokens",
    "fingerprint_rows",
    "token_masks",
    "row_columns",
    "stored_columns",
    "unpack",
)
"""Functions that send requests of an audit to a store or its bucket."""


@pytest.mark.parametrize(
    ("check", "name"),
    [
        *((check, name) for check in (audit.audit, check_chain) for name in ("", "damaged_chunk")),
        (lambda store: list(snapshot_audit.audit_history(store.path)), "branch_damaged"),
    ],
    ids=["audit", "audit, damaged", "chain", "chain, damaged", "history, damaged"],
)
def test_a_bucket_failure_at_any_request_of_an_audit_is_not_a_finding(
    check: Callable[[StoreReader], Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "s", next((fault for fault in ALL if fault.name == name), None))
    store, fails_at, request = VersionedStore.open(tmp_path / "s"), 0, 0

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any, **kwargs: Any) -> Any:
            nonlocal request
            request += 1
            if request == fails_at:
                raise StoreUnavailable("503 Slow Down")
            return read(*args, **kwargs)

        return reading

    for read in READS:
        monkeypatch.setattr(StoreReader, read, failing(getattr(StoreReader, read)))
    check(store)
    for fails_at in range(1, request + 1):  # noqa: B007  the number of the request that fails
        request = 0
        with pytest.raises(StoreUnavailable):
            check(store)


# -- completeness ----------------------------------------------------------------------------------------------------


def sites() -> Iterator[tuple[str, int, int]]:
    """Return (module, first line, last line) of all places that create a finding."""
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == Finding.__name__:
                yield module.__name__, node.lineno, node.end_lineno or node.lineno


def texts() -> Iterator[re.Pattern[str]]:
    """Return the messages of functions that yield texts, as expressions."""
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in node.value.values
                ]
                yield re.compile("".join(parts))


def test_every_module_that_creates_findings_is_listed() -> None:
    names = {path.stem for path in Path(findings.__file__).parent.glob("*.py") if "Finding(" in path.read_text()}
    # The chain is not part of the audit; tests/stores/test_chain.py tests its findings.
    assert names - {"findings", "chain"} == {module.__name__.rpartition(".")[2] for module in MODULES}
    assert all(importlib.import_module(module.__name__) is module for module in MODULES)


def test_every_finding_has_a_planted_fault() -> None:
    made = {site for fault in ALL for site in audited(fault).sites}
    missing = [f"{name}:{a}" for name, a, b in sites() if not any(m == name and a <= at <= b for m, at in made)]
    assert not missing, "findings that no row of FAULTS makes"
    messages = {finding.message for fault in ALL for finding in audited(fault).findings}
    unsaid = [text.pattern for text in texts() if not any(text.fullmatch(message) for message in messages)]
    assert not unsaid, "texts of findings that no row of FAULTS makes"

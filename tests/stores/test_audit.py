"""The audit against its plain implementation: the same findings in the same words and order for any fault."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from staleflow.stores.auditing import audit as audit_module
from staleflow.stores.auditing import conservation, row_checks, single_consumption, weight_counts
from staleflow.stores.auditing.audit import AuditReport, audit
from staleflow.stores.auditing.conservation import ConservationCheck
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.auditing.single_consumption import ConsumedRows
from staleflow.stores.auditing.weight_counts import WeightCheckCounter, WeightCounts
from staleflow.stores.id_sets import IdSet, merge_ranges
from staleflow.stores.trajectories import reader
from staleflow.stores.trajectories.columns import COLUMNS, FATES, empty_rows, select_columns
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX
from staleflow.stores.trajectories.records import (
    EMPTY_LEDGER,
    CommitRecord,
    LedgerState,
    RunHeader,
    batch_fingerprint,
    id_ranges,
)
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    outcome_key,
)
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from tests.stores.plain_audit import _token_faults, conservation_of, once_findings, plain_audit
from tests.stores.store_conformance import ended, verified
from tests.support.examples import num_examples

INTEGERS = [column.array_name for column in COLUMNS if np.dtype(column.dtype).kind in "ib"]
NUMBERS = (-(2**40), -2, -1, 0, 1, 2, 3, 5, 17, 40, 2**20, 2**40)


def shuffled_runner(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """A runner that returns results in another order."""
    results = [function(*call) for call in calls]
    random.Random(len(results)).shuffle(results)
    return iter(results)


def random_store(folder: Path, rng: random.Random) -> VersionedStore:
    """Return a store of a run of a few steps without faults, with dropped trajectories and a remainder in flight."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    size, groups, eta = rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((0, 1, 2))
    header = RunHeader(run="r", eta=max(1, eta), groups_per_step=groups, group_size=size, members_started_per_group=4)
    store = VersionedStore.create(folder, header)
    counts: Counter[str] = Counter()
    live: set[int] = set()
    started = 0
    num_steps = rng.randint(0, 5)
    for step in range(num_steps):
        batch, dropped = [], []
        for _ in range(groups):
            first = -(-started // 4) * 4
            batch += [in_group_of_four(ended(numbers, first + member, step)) for member in range(size)]
            started = first + size
        for _ in range(rng.randint(0, 3)):
            reason = rng.choice((AbortReason.SURPLUS_GROUP, AbortReason.ENGINE_FAILED))
            row = in_group_of_four(ended(numbers, started, step, Fate.ABORTED, loss_mask=False))
            dropped.append(replace(row, reason=reason))
            started += 1
        skipped = set(range(started)) - {r.trajectory.id for r in [*batch, *dropped]} - live - stored_of(store)
        late = rng.sample(sorted(live), min(len(live), rng.randint(0, 2)))
        filtered = [in_group_of_four(ended(numbers, i, step, Fate.FILTERED)) for i in late]
        dropped += [replace(row, reason=AbortReason.NO_SIGNAL) for row in filtered]
        live = (live | skipped) - set(late)
        started += (more := rng.randint(0, 3))
        live |= set(range(started - more, started))
        rows = [*batch, *dropped]
        counts.update(outcome_key(r.fate, r.reason) for r in rows)
        store.commit(
            CommitRecord(
                kind="step", step=step,
                ledger=LedgerState(num_started=started, num_ended=dict(counts), live=id_ranges(live),
                                   next_step=step + 1, version=step),
                weight_fingerprint=f"w{step + 1}", weight_checks=(verified("a", step, f"w{step}"),) if step else (),
                batch_fingerprint=batch_fingerprint((e.trajectory, e.advantage) for e in batch),
            ),
            rows,
        )  # fmt: skip
    rest = [in_group_of_four(ended(numbers, i, num_steps, Fate.ABORTED)) for i in sorted(live)]
    counts.update(outcome_key(r.fate, r.reason) for r in rest)
    ledger = LedgerState(num_started=started, num_ended=dict(counts), live=(), next_step=num_steps, version=num_steps)
    if rng.random() < 0.8:
        store.commit(CommitRecord(kind="end", step=num_steps, ledger=ledger), rest)
    return store


def in_group_of_four(row: EndedTrajectory) -> EndedTrajectory:
    """Return the row with a group of four; `ended` has groups of two."""
    return replace(row, trajectory=replace(row.trajectory, group=GroupId(row.trajectory.id // 4)))


def stored_of(store: VersionedStore) -> set[int]:
    return set(store.stored_columns()["trajectory"].tolist())


def fits(number: int, dtype: Any) -> bool:
    """Return whether a column of this type can hold a number."""
    return (dtype.kind != "b" and np.iinfo(dtype).min <= number <= np.iinfo(dtype).max) or number in (0, 1)


# -- faults ----------------------------------------------------------------------------------------------------------


def change_number(root: Any, rng: random.Random) -> None:
    column = root[rng.choice(INTEGERS)]
    column[rng.randrange(column.shape[0])] = rng.choice([n for n in NUMBERS if fits(n, column.dtype)])


def copy_number(root: Any, rng: random.Random) -> None:
    """Copy a column value from another row: a step, group or id that exists."""
    column = root[rng.choice(INTEGERS)]
    column[rng.randrange(column.shape[0])] = column[rng.randrange(column.shape[0])]


def change_float(root: Any, rng: random.Random) -> None:
    column = root[rng.choice([c.array_name for c in COLUMNS if c.dtype == "float32"])]
    column[rng.randrange(column.shape[0])] = rng.random()


def change_token(root: Any, rng: random.Random) -> None:
    array = root[rng.choice(("tokens/ids", "tokens/logprobs", "tokens/versions", "tokens/mask"))]
    offsets = root["rows/offset"]
    at = int(offsets[rng.randrange(offsets.shape[0])]) + rng.randrange(20)
    if 0 <= at < array.shape[0]:
        values = (0, 1, 2) if array.dtype == np.uint8 else (-1, 0, 1, 2, 9)
        array[at] = rng.choice((*values, np.nan, -np.inf) if array.dtype == np.float32 else values)


def change_turns(root: Any, rng: random.Random) -> None:
    name = rng.choice(("turns", "given_tokens", "tool_s"))
    column = root[f"rows/{name}"]
    values = (0.0, 1.0, 1.5, 3.0, -1.0, float("nan")) if name == "tool_s" else (0, 1, 3, -1)
    column[rng.randrange(column.shape[0])] = rng.choice(values)


def change_text(root: Any, rng: random.Random) -> None:
    at = rng.randrange(root["text"].shape[0])
    root["text"][at : at + 1] = np.frombuffer(rng.choice((b"9", b"x", b"}", b"\xff", b"1")), np.uint8)


def move_rows(root: Any, rng: random.Random) -> None:
    """Remove a row, repeat one, or exchange two."""
    count = root["rows/trajectory"].shape[0]
    order = list(range(count))
    i, j = rng.randrange(count), rng.randrange(count)
    kind = rng.randrange(3)
    if kind == 0:
        del order[i]
    elif kind == 1:
        order.insert(i, order[j])
    else:
        order[i], order[j] = order[j], order[i]
    for name in (column.array_name for column in COLUMNS):
        values = np.asarray(root[name][:])[order]
        root[name].resize(values.shape)
        root[name][:] = values


def truncate_array(root: Any, rng: random.Random) -> None:
    names = ("tokens/ids", "tokens/logprobs", "tokens/versions", "rows/reward", "rows/turns", "text")
    array = root[rng.choice(names)]
    array.resize((max(0, array.shape[0] - rng.randint(1, 30)), *array.shape[1:]))


def change_record(root: Any, rng: random.Random) -> None:
    table, text = np.asarray(root["commits"][:]), np.asarray(root["records"][:]).tobytes()
    places = table[:, [COMMIT_COLUMN_INDEX["record_offset"], COMMIT_COLUMN_INDEX["record_bytes"]]].tolist()
    records = [json.loads(text[a : a + size]) for a, size in places]
    record = rng.choice(records)
    ledger = record["ledger"]
    match rng.randrange(7):
        case 0:
            ledger["num_started"] = max(0, ledger["num_started"] + rng.choice((-3, -1, 1, 2, 50)))
        case 1:
            a = rng.randint(0, 40)
            ledger["live"] = sorted([*ledger["live"], [a, a + rng.randint(-1, 5)]])
        case 2:
            ledger["live"] = ledger["live"][1:]
        case 3:
            ledger["num_ended"]["consumed:none"] = rng.randint(0, 9)
        case 4:
            record["num_rows"] = max(0, record["num_rows"] + rng.choice((-1, 1)))
        case 5:
            record["step"] = rng.choice((0, 1, 2, 9))
        case 6:
            record["weight_fingerprint"] = "other"
    table[:, COMMIT_COLUMN_INDEX["rows"]] = [r["num_rows"] for r in records]
    table[:, COMMIT_COLUMN_INDEX["step"]] = [r["step"] for r in records]
    if rng.random() < 0.2:
        table[rng.randrange(len(table)), rng.randrange(6)] += rng.choice((-1, 1))
    written = [json.dumps(r).encode() for r in records]
    ends = np.cumsum([len(w) for w in written])
    table[:, COMMIT_COLUMN_INDEX["record_bytes"]] = [len(w) for w in written]
    table[:, COMMIT_COLUMN_INDEX["record_offset"]] = ends - table[:, COMMIT_COLUMN_INDEX["record_bytes"]]
    root["commits"][:] = table
    root["records"].resize((int(ends[-1]),))
    root["records"][:] = np.frombuffer(b"".join(written), np.uint8)


EDITS = (
    change_number, copy_number, copy_number, change_float, change_token, change_token, change_turns, change_text,
    move_rows, truncate_array, change_record, change_record,
)  # fmt: skip


def damage(folder: Path, rng: random.Random) -> None:
    """Overwrite the end of a chunk file."""
    chunks = sorted((folder / "chunks").glob("*"))
    if chunks:
        chunk = rng.choice(chunks)
        data = chunk.read_bytes()
        chunk.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def plant_faults(folder: Path, rng: random.Random, count: int) -> None:
    """Plant faults, each as a separate commit."""
    repository = repository_at(folder)
    for _ in range(count):
        session = repository.writable_session("main")
        root: Any = zarr.open_group(session.store, mode="r+")
        try:
            rng.choice(EDITS)(root, rng)
            session.commit("tampered")
        except (ValueError, IndexError, KeyError, icechunk.IcechunkError):
            continue  # nothing there to change
    if count and rng.random() < 0.15:
        damage(folder, rng)


def finding_texts(findings: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return findings as text, without details that depend on the reading order of the implementation."""
    return [(f.check, f.location, "unreadable" if f.location == "store" else f.message) for f in findings]


@pytest.mark.parametrize("faults", [0, 1, 6])
@settings(max_examples=max(2, num_examples() // 25))
@given(seed=st.integers(0, 2**32))
def test_the_audit_finds_random_faults_as_the_plain_audit_does(
    tmp_path_factory: pytest.TempPathFactory, faults: int, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("store") / "s"
    random_store(folder, rng)
    plant_faults(folder, rng, faults)
    store = VersionedStore.open(folder)
    with pytest.MonkeyPatch.context() as patch:  # a store of a few rows is read in several blocks and tasks too
        patch.setattr(reader, "RECORDS_AT_ONCE", rng.choice((1, 3, 2**20)))
        for name in ("ROWS_AT_ONCE", "RANGE_TOKENS", "RANGE_COMMITS"):
            patch.setattr(audit_module, name, rng.choice((1, 3, 2**20)))
        patch.setattr(row_checks, "BLOCK_ROWS", rng.choice((1, 3, 2**20)))
        patch.setattr(row_checks, "MAX_GAP_TOKENS", rng.choice((0, 2**20)))
        report = audit(store, shuffled_runner, max_tokens=rng.choice((1, 60, 2**21)))
    try:
        expected = plain_audit(store)
    except IndexError:  # of the model, which joins columns of different lengths
        assert any(f.location.startswith("rows/") for f in report.findings)
        return
    except ValueError:  # of the model, which reads a damaged file of columns whose lengths differ
        assert "arrays" in {f.check for f in report.findings}
        return
    assert finding_texts(report.findings) == finding_texts(expected.findings)
    for name in ("num_steps", "num_trajectories", "num_tokens", "max_staleness", "checks", "unchecked"):
        assert getattr(report, name) == getattr(expected, name), name
    if not faults:
        assert report.is_clean
    shutil.rmtree(folder)


# -- parts -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-5, 30), max_size=8), max_size=6), st.integers(-8, 35), st.integers(-8, 35))
def test_id_ranges_match_a_python_set(batches: list[list[int]], a: int, b: int) -> None:
    ids, model = IdSet(), set[int]()
    for batch in batches:
        twice = {i for i, n in Counter(batch).items() if n > 1} | (model & set(batch))
        assert set(ids.add(np.asarray(batch, np.int64)).tolist()) == twice
        model |= set(batch)
        assert ids.count == len(model)
    assert ids.count_absent(np.asarray([min(a, b)]), np.asarray([max(a, b)])) == len(
        set(range(min(a, b), max(a, b))) - model
    )
    assert ids.next_absent(a) == next(i for i in range(a, 99) if i not in model)
    present = [i for i in model if i >= a]
    assert ids.next_present(a) == (min(present) if present else np.iinfo(np.int64).max)


@given(st.lists(st.tuples(st.integers(-9, 30), st.integers(-9, 30))))
def test_merge_ranges_keeps_the_same_ids(ranges: list[tuple[int, int]]) -> None:
    first, last = merge_ranges(ranges)
    assert [i for a, b in zip(first, last, strict=True) for i in range(a, b)] == sorted(
        {i for a, b in ranges for i in range(a, b)}
    )


IDS = st.integers(0, 14)


@given(
    st.lists(
        st.tuples(st.lists(IDS, max_size=5), st.integers(0, 16), st.lists(st.tuples(IDS, IDS), max_size=3)), max_size=5
    )
)
def test_conservation_findings_match_an_implementation_with_sets(
    commits: list[tuple[list[int], int, list[tuple[int, int]]]],
) -> None:
    kept = ConservationCheck(IdSet())
    found: list[Finding] = []
    expected: list[Finding] = []
    stored: set[int] = set()
    counts: Counter[str] = Counter()
    for step, (ids, started, live) in enumerate(commits):
        ledger = LedgerState(
            num_started=started, num_ended={"consumed:none": 3 * step}, live=tuple(live), next_step=0, version=0
        )
        record = CommitRecord(kind="step", step=step, ledger=ledger)
        rows = empty_rows(len(ids), select_columns(conservation.READ_COLUMNS))
        rows["fate"], rows["reason"] = 0, 0
        kept._stored_ids.add(np.asarray(ids, np.int64))
        kept.add(rows)
        found += kept.check_commit(record)
        stored |= set(ids)
        counts.update(["consumed:none"] * len(ids))
        expected += conservation_of(record, stored, counts)
    assert found == expected


def test_a_ledger_with_huge_numbers_is_a_finding_and_uses_no_memory() -> None:
    conservation = ConservationCheck(IdSet())
    ledger = LedgerState(num_started=2**60, num_ended={}, live=((5, 2**70),), next_step=0, version=0)
    (lost, wrong) = conservation.check_commit(CommitRecord(kind="step", step=0, ledger=ledger))
    assert lost.message == "5 trajectories are neither stored nor in flight, first 0"
    assert f"first {2**60}" in wrong.message


ROW = st.tuples(
    st.integers(0, 12), st.integers(0, 3), st.sampled_from((Fate.CONSUMED, Fate.ABORTED)), st.integers(0, 2)
)


INTERLEAVED = [(id, group, Fate.CONSUMED, id // 4) for id, group in enumerate((1, 0, 0, 1, 0, 1))]
"""Step 0 consumed group 1 first, and step 1 both groups again."""


@given(st.lists(st.lists(ROW, max_size=6), max_size=3), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 2))
@example([INTERLEAVED], [0, 1], 2)
def test_consumption_findings_match_the_plain_ones(
    blocks: list[list[tuple[int, int, Fate, int]]], trained: list[int], group_size: int
) -> None:
    header = RunHeader(run="r", eta=1, groups_per_step=2, group_size=group_size, members_started_per_group=2)
    consumed, tables = ConsumedRows(header), []
    for block in blocks:
        rows = empty_rows(len(block), select_columns(single_consumption.READ_COLUMNS))
        rows["v_traj"] = np.arange(len(block)) % 2
        for i, (id, group, fate, step) in enumerate(block):
            for name, value in (("trajectory", id), ("group", group), ("fate", FATES.index(fate)), ("step", step)):
                rows[name][i] = value
        tables.append(rows)
        consumed.add(rows)
    rows_of_all = [row for block in blocks for row in block]
    places: dict[int, list[int]] = {}
    for number, (_, _, fate, step) in enumerate(rows_of_all):
        if fate is Fate.CONSUMED:
            places.setdefault(step, []).append(number)
    assert consumed.step_ranges() == {step: (min(numbers), max(numbers) + 1) for step, numbers in places.items()}
    lags = [step - i % 2 for block in blocks for i, (_, _, fate, step) in enumerate(block) if fate is Fate.CONSUMED]
    assert (consumed.num_rows, consumed.max_staleness) == (len(rows_of_all), max([-1, *lags]))
    plain_rows: Any = [
        SimpleNamespace(trajectory=SimpleNamespace(id=id, group=group), fate=fate, step=step)
        for id, group, fate, step in rows_of_all
    ]
    records = [CommitRecord(kind="step", step=step, ledger=EMPTY_LEDGER) for step in trained]
    assert list(consumed.findings(trained, tables)) == list(once_findings(header, records, plain_rows))


CHECK = st.builds(
    WeightCheck, instance=st.sampled_from([InstanceId("a"), InstanceId("b")]),
    version=st.integers(0, 1).map(PolicyVersion), fingerprint=st.sampled_from(["w0", "w1"]),
    weights=st.builds(
        WeightReport, verified=st.integers(0, 2), contradicted=st.integers(0, 1),
        not_verified=st.dictionaries(st.sampled_from(["packed", "tied"]), st.integers(1, 2)),
    ),
    drift=st.sampled_from([0.0, 2.0]), limit=st.just(1.0), refused=st.sampled_from(["", "its logprobs differ"]),
)  # fmt: skip
SPAN = st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(1, 3))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(CHECK, max_size=2)), max_size=4),
    st.lists(st.lists(SPAN, max_size=3), max_size=5),
    st.sampled_from([None, 0]),
)
def test_weight_counts_match_a_count_per_pull_and_per_row(
    commits: list[tuple[int, list[WeightCheck]]], rows: list[list[tuple[str, int, int]]], base_record: int | None
) -> None:
    ledger = LedgerState(num_started=0, num_ended={}, live=(), next_step=0, version=0)
    records = [
        CommitRecord(
            kind="step" if i == 0 else "refusal",
            step=i,
            ledger=ledger,
            num_rows=count,
            weight_fingerprint="w1",
            weight_checks=tuple(checks),
            inputs={"weights": "w0"} if i == base_record else {},
        )
        for i, (count, checks) in enumerate(commits)
    ]
    pulls, parts, reasons = Counter[str](), Counter[str](), Counter[str]()
    held: list[tuple[int, WeightCheck]] = []
    for i, (_, checks) in enumerate(commits):
        for check in checks:
            held.append((sum(count for count, _ in commits[:i]), check))
            is_published = check.version == 1 or base_record == 0
            other = is_published and check.fingerprint != f"w{check.version}"
            differs = other or check.refused or check.drift > check.limit or check.weights.contradicted
            pulls["contradicted" if differs else check.weights.outcome if is_published else "not verified"] += 1
            pulls["unpublished"] += not differs and not is_published
            parts.update(verified=check.weights.verified, contradicted=check.weights.contradicted)
            reasons.update(check.weights.not_verified)
    sampled = Counter(dict.fromkeys([("a", 0), ("b", 1), ("c", 1)], 5))
    pulled = {(check.instance, check.version) for _, check in held}
    collected = WeightCheckCounter(records)
    assert collected.counts(sampled) == WeightCounts(
        verified=pulls["verified"], not_verified=pulls["not verified"], contradicted=pulls["contradicted"],
        unpublished=pulls["unpublished"],
        parts_verified=parts["verified"], parts_not_verified=sum(reasons.values()),
        parts_contradicted=parts["contradicted"], reasons=dict(reasons),
        unchecked_tokens=5 * len(sampled.keys() - pulled),
    )  # fmt: skip
    refused = collected.refusals
    for number, spans in enumerate(rows):
        expected = Counter[tuple[str, int]]()
        for instance, version, size in spans:
            own = [(at, check) for at, check in held if (check.instance, check.version) == (instance, version)]
            accepted = any(at <= number for at, check in own if not check.refused)
            expected[instance, version] += size * (any(check.refused for _, check in own) and not accepted)
        messages = [f.message for f in weight_counts.refused_token_findings("row", number, spans, refused)]
        assert sorted(messages) == sorted(
            f"{count} tokens of {instance} at version {version}, at which it was taken out of service"
            for (instance, version), count in expected.items()
            if count
        )


token = st.tuples(st.sampled_from([-1, 0, 3]), st.sampled_from([0.0, -0.5, float("nan")]), st.integers(0, 2))


@given(st.lists(token, max_size=5), st.integers(0, 5), st.integers(0, 1))
def test_token_faults_match_a_token_by_token_check(
    tokens: list[tuple[int, float, int]], prompt: int, trained: int
) -> None:
    versions, logprobs, mask = zip(*tokens, strict=True) if tokens else ((), (), ())
    faults = row_checks.token_faults(
        np.asarray(versions, np.int32), np.asarray(logprobs, np.float32), np.asarray(mask, np.uint8), prompt, trained
    )
    assert list(faults) == list(_token_faults(prompt, trained != 0, tokens))


def test_a_run_without_a_verified_pull_is_reported_as_not_verified() -> None:
    pulls, parts = WeightCounts(not_verified=2, contradicted=1, parts_verified=5).lines
    assert pulls == "weights of instances: NOT VERIFIED at any pull (0 pulls verified, 2 not verified, 1 contradicted)"
    assert parts == "5 parts verified, 0 not verified, 0 contradicted"
    (*_, unpublished) = WeightCounts(verified=2, not_verified=3, unpublished=3).lines
    assert unpublished == "not verified: 3 pulls, no step that published their version is stored"
    (*_, unchecked) = WeightCounts(verified=2, unchecked_tokens=7).lines
    assert unchecked == "not verified: 7 sampled tokens, no pull of their version is stored"


@pytest.mark.parametrize(
    ("steps", "verified", "check", "results", "verdict"),
    [
        (1, 1, "", (True, True), "holds"),
        (0, 1, "", (True, False), "NOT VERIFIED: no steps are stored yet, so there is nothing to verify"),
        (1, 0, "", (True, False), "NOT VERIFIED: the weights of no instance were verified"),
        (1, 1, "once", (False, False), "BROKEN"),
        (1, 1, "arrays", (False, False), "BROKEN"),
    ],
)
def test_a_report_proves_something_only_if_something_was_checked(
    steps: int, verified: int, check: str, results: tuple[bool, bool], verdict: str
) -> None:
    report = AuditReport(
        num_steps=steps, num_trajectories=7, num_tokens=8, max_staleness=2, checks=(),
        weights=WeightCounts(verified=verified),
        findings=(Finding(check=check, location="w", message="m"),) if check else (),
    )  # fmt: skip
    assert (report.is_clean, report.is_verified) == results
    assert report.verdict == verdict
    assert report.as_dict()["num_tokens"] == 8
    assert replace(report, unchecked=("once",)).as_dict() | {"num_steps": None, "max_staleness": None} == {
        **report.as_dict(), "unchecked": ("once",), **dict.fromkeys(audit_module.COUNTS),
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=8), st.integers(0, 12), st.integers(1, 12),
    st.integers(1, 4),
)  # fmt: skip
def test_tasks_cover_all_rows_and_are_as_small_as_allowed(
    sizes: list[tuple[int, int]], num_rows: int, most_tokens: int, most_commits: int
) -> None:
    commits = [
        CommitRecord(kind="step", step=i, ledger=EMPTY_LEDGER, num_rows=rows, num_tokens=tokens)
        for i, (rows, tokens) in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "RANGE_TOKENS", most_tokens)
        patch.setattr(audit_module, "RANGE_COMMITS", most_commits)
        ranges = list(audit_module._ranges(commits, num_rows))
    task, at, edges = [0, 0], 0, [0]
    for rows, tokens in sizes:
        task, at = [task[0] + tokens, task[1] + 1], min(at + rows, num_rows)
        if task[0] >= most_tokens or task[1] >= most_commits:
            edges.append(at)
            task = [0, 0]
    edges = sorted({*edges, num_rows})
    assert ranges == list(itertools.pairwise(edges))

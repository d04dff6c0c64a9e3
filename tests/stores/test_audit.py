"""The audit against its plain model: the same findings, in the same words and order, whatever is wrong with a store."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.auditing import conservation
from staleflow.stores.auditing.audit import audit
from staleflow.stores.auditing.conservation import Conservation
from staleflow.stores.id_sets import IdSet, merged
from staleflow.stores.trajectories.columns import COLUMNS, chosen, empty_rows
from staleflow.stores.trajectories.layout import COMMIT_AT
from staleflow.stores.trajectories.records import LedgerState, RunHeader, StepRecord, batch_fingerprint, id_ranges
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason, EndedTrajectory, Fate, outcome_key
from tests.stores.plain_audit import conservation_of, plain_audit
from tests.stores.store_conformance import ended, verified
from tests.support.examples import num_examples

INTEGERS = [column.array for column in COLUMNS if np.dtype(column.dtype).kind in "ib"]
NUMBERS = (-(2**40), -2, -1, 0, 1, 2, 3, 5, 17, 40, 2**20, 2**40)


def shuffled(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """A runner whose results come in another order."""
    results = [function(*call) for call in calls]
    random.Random(len(results)).shuffle(results)
    return iter(results)


def random_store(folder: Path, rng: random.Random) -> VersionedStore:
    """A store as a faultless run of a few steps writes it, with dropped trajectories and a remainder in flight."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    size, groups, eta = rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((0, 1, 2))
    header = RunHeader(run="r", eta=max(1, eta), groups_per_step=groups, group_size=size, members_started=2)
    store = VersionedStore.create(folder, header)
    counts: Counter[str] = Counter()
    live: set[int] = set()
    started = 0
    num_steps = rng.randint(0, 5)
    for step in range(num_steps):
        batch, dropped = [], []
        for _ in range(groups):
            first = -(-started // 2)
            for member in range(size):
                row = ended(numbers, 2 * first + member, step)
                batch.append(row)
            # `ended` groups ids by two; a group of any size is one here.
            batch[-size:] = [with_group(row, 100 * step + len(batch)) for row in batch[-size:]]
            started = 2 * first + size
        for _ in range(rng.randint(0, 3)):
            reason = rng.choice((AbortReason.SURPLUS_GROUP, AbortReason.ENGINE_FAILED))
            dropped.append(replace(ended(numbers, started, step, Fate.ABORTED, loss_mask=False), reason=reason))
            started += 1
        skipped = set(range(started)) - {r.trajectory.id for r in [*batch, *dropped]} - live - stored_of(store)
        late = rng.sample(sorted(live), min(len(live), rng.randint(0, 2)))
        dropped += [replace(ended(numbers, i, step, Fate.FILTERED), reason=AbortReason.NO_SIGNAL) for i in late]
        live = (live | skipped) - set(late)
        started += (more := rng.randint(0, 3))
        live |= set(range(started - more, started))
        rows = [*batch, *dropped]
        counts.update(outcome_key(r.fate, r.reason) for r in rows)
        store.commit(
            StepRecord(
                kind="step", step=step,
                ledger=LedgerState(num_started=started, num_ended=dict(counts), live=id_ranges(live),
                                   next_step=step + 1, version=step),
                weight_fingerprint=f"w{step + 1}", weight_checks=(verified("a", step, f"w{step}"),) if step else (),
                batch_fingerprint=batch_fingerprint((e.trajectory, e.advantage) for e in batch),
            ),
            rows,
        )  # fmt: skip
    rest = [ended(numbers, i, num_steps, Fate.ABORTED) for i in sorted(live)]
    counts.update(outcome_key(r.fate, r.reason) for r in rest)
    ledger = LedgerState(num_started=started, num_ended=dict(counts), live=(), next_step=num_steps, version=num_steps)
    if rng.random() < 0.8:
        store.commit(StepRecord(kind="end", step=num_steps, ledger=ledger), rest)
    return store


def with_group(row: EndedTrajectory, group: int) -> EndedTrajectory:
    return replace(row, trajectory=replace(row.trajectory, group=group))


def stored_of(store: VersionedStore) -> set[int]:
    return set(store.table()["trajectory"].tolist())


def fits(number: int, dtype: Any) -> bool:
    """Whether a column of this type can hold a number."""
    return (dtype.kind != "b" and np.iinfo(dtype).min <= number <= np.iinfo(dtype).max) or number in (0, 1)


# -- faults ----------------------------------------------------------------------------------------------------------


def change_number(root: Any, rng: random.Random) -> None:
    column = root[rng.choice(INTEGERS)]
    column[rng.randrange(column.shape[0])] = rng.choice([n for n in NUMBERS if fits(n, column.dtype)])


def copy_number(root: Any, rng: random.Random) -> None:
    """Give a row a column of another: a step, a group, an id that exists."""
    column = root[rng.choice(INTEGERS)]
    column[rng.randrange(column.shape[0])] = column[rng.randrange(column.shape[0])]


def change_float(root: Any, rng: random.Random) -> None:
    column = root[rng.choice([c.array for c in COLUMNS if c.dtype == "float32"])]
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
    """Lose a row, repeat one, or exchange two."""
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
    for name in (column.array for column in COLUMNS):
        values = np.asarray(root[name][:])[order]
        root[name].resize(values.shape)
        root[name][:] = values


def cut(root: Any, rng: random.Random) -> None:
    names = ("tokens/ids", "tokens/logprobs", "tokens/versions", "rows/reward", "rows/turns", "text")
    array = root[rng.choice(names)]
    array.resize((max(0, array.shape[0] - rng.randint(1, 30)), *array.shape[1:]))


def change_record(root: Any, rng: random.Random) -> None:
    table, text = np.asarray(root["commits"][:]), np.asarray(root["records"][:]).tobytes()
    places = table[:, [COMMIT_AT["record_offset"], COMMIT_AT["record_bytes"]]].tolist()
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
    written = [json.dumps(r).encode() for r in records]
    ends = np.cumsum([len(w) for w in written])
    table[:, COMMIT_AT["record_bytes"]] = [len(w) for w in written]
    table[:, COMMIT_AT["record_offset"]] = ends - table[:, COMMIT_AT["record_bytes"]]
    root["commits"][:] = table
    root["records"].resize((int(ends[-1]),))
    root["records"][:] = np.frombuffer(b"".join(written), np.uint8)


EDITS = (
    change_number, copy_number, copy_number, change_float, change_token, change_token, change_turns, change_text,
    move_rows, cut, change_record, change_record,
)  # fmt: skip


def damage(folder: Path, rng: random.Random) -> None:
    """Overwrite the end of a chunk's file."""
    chunks = sorted((folder / "chunks").glob("*"))
    if chunks:
        chunk = rng.choice(chunks)
        data = chunk.read_bytes()
        chunk.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def tamper(folder: Path, rng: random.Random, count: int) -> None:
    """Plant faults, each as a commit of its own."""
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder)))
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


def plain(findings: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Findings as texts. Which of several unreadable rows is met first, and how far a block of rows reaches, is of the
    reader and not of the store."""
    return [(f.check, f.where, "unreadable" if f.where == "store" else f.message) for f in findings]


@pytest.mark.parametrize("faults", [0, 1, 6])
@settings(max_examples=max(5, num_examples() // 25))
@given(seed=st.integers(0, 2**32))
def test_whatever_is_wrong_is_found_as_the_plain_audit_finds_it(
    tmp_path_factory: pytest.TempPathFactory, faults: int, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("store") / "s"
    random_store(folder, rng)
    tamper(folder, rng, faults)
    store = VersionedStore.open(folder)
    report = audit(store, shuffled, most_tokens=rng.choice((1, 60, 2**21)))
    try:
        expected = plain_audit(store)
    except IndexError:  # of the model, which joins columns of different lengths
        assert any(f.where.startswith("rows/") for f in report.findings)
        return
    except ValueError:  # of the model, which reads a damaged file of columns whose lengths differ
        assert "arrays" in {f.check for f in report.findings}
        return
    assert plain(report.findings) == plain(expected.findings)
    for name in ("num_steps", "num_trajectories", "num_tokens", "max_staleness", "checks", "unchecked"):
        assert getattr(report, name) == getattr(expected, name), name
    if not faults:
        assert report.clean
    shutil.rmtree(folder)


# -- parts -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-5, 30), max_size=8), max_size=6), st.integers(-8, 35), st.integers(-8, 35))
def test_a_set_of_ids_is_a_set(batches: list[list[int]], a: int, b: int) -> None:
    ids, model = IdSet(), set[int]()
    for batch in batches:
        twice = {i for i, n in Counter(batch).items() if n > 1} | (model & set(batch))
        assert set(ids.add(np.asarray(batch, np.int64)).tolist()) == twice
        model |= set(batch)
        assert ids.count == len(model)
    assert ids.absent(np.asarray([min(a, b)]), np.asarray([max(a, b)])) == len(set(range(min(a, b), max(a, b))) - model)
    assert ids.next_absent(a) == next(i for i in range(a, 99) if i not in model)
    present = [i for i in model if i >= a]
    assert ids.next_present(a) == (min(present) if present else np.iinfo(np.int64).max)


@given(st.lists(st.tuples(st.integers(-9, 30), st.integers(-9, 30))))
def test_ranges_are_merged_to_the_same_ids(ranges: list[tuple[int, int]]) -> None:
    first, last = merged(ranges)
    assert [i for a, b in zip(first, last, strict=True) for i in range(a, b)] == sorted(
        {i for a, b in ranges for i in range(a, b)}
    )


IDS = st.integers(0, 14)


@given(
    st.lists(
        st.tuples(st.lists(IDS, max_size=5), st.integers(0, 16), st.lists(st.tuples(IDS, IDS), max_size=3)), max_size=5
    )
)
def test_conservation_is_counted_as_with_sets(commits: list[tuple[list[int], int, list[tuple[int, int]]]]) -> None:
    kept, found, expected = Conservation(), [], []
    stored: set[int] = set()
    counts: Counter[str] = Counter()
    for step, (ids, started, live) in enumerate(commits):
        ledger = LedgerState(
            num_started=started, num_ended={"consumed:none": 3 * step}, live=tuple(live), next_step=0, version=0
        )
        record = StepRecord(kind="step", step=step, ledger=ledger)
        rows = empty_rows(len(ids), chosen(conservation.READ))
        rows["trajectory"], rows["fate"], rows["reason"] = ids, 0, 0
        kept.add(rows)
        found += kept.ends(record)
        stored |= set(ids)
        counts.update(["consumed:none"] * len(ids))
        expected += conservation_of(record, stored, counts)
    assert found == expected


def test_a_ledger_out_of_all_bounds_is_a_finding_and_takes_no_memory() -> None:
    kept = Conservation()
    ledger = LedgerState(num_started=2**60, num_ended={}, live=((5, 2**70),), next_step=0, version=0)
    (lost, wrong) = kept.ends(StepRecord(kind="step", step=0, ledger=ledger))
    assert lost.message == "5 trajectories are neither stored nor in flight, first 0"
    assert f"first {2**60}" in wrong.message

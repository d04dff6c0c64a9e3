"""The hash chain of the commits: every change is found with its place."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from staleflow.stores.auditing.chain import ChainReport, check_chain
from staleflow.stores.trajectories import layout
from staleflow.stores.trajectories.columns import COLUMNS
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX
from staleflow.stores.trajectories.reader import TOKEN_POSITION_COLUMNS, StoreReader
from staleflow.stores.trajectories.records import chain_hash
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.stores.store_conformance import HEADER, ended, record, with_teacher
from tests.support.examples import num_examples

ROWS = 5
"""Rows of a commit: four trained ones and one aborted."""


def make(path: Path, num_steps: int = 3) -> VersionedStore:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(path, HEADER)
    for step in range(num_steps):
        rows = [ended(rng, ROWS * step + i, step) for i in range(ROWS - 1)]
        if step == 1:  # the array is made in this commit, and others have nothing in it
            rows = list(map(with_teacher, rows))
        store.commit(record(step), [*rows, ended(rng, ROWS * step + ROWS - 1, step, Fate.ABORTED)])
    return store


def places(report: ChainReport) -> list[str]:
    return [finding.location for finding in report.findings]


def test_the_chain_continues_over_reopening_rewinds_and_other_commit_kinds(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 4)
    entries = check_chain(store).step_entries
    assert sorted(entries) == [0, 1, 2, 3]
    VersionedStore.rewind(tmp_path / "s", 2)
    store = VersionedStore.open(tmp_path / "s")
    inputs = {"weights": "w", "settings": "s"}
    store.commit(record(2, "resume"), [])
    store.commit(replace(record(2), inputs=inputs), [ended(np.random.default_rng(1), 70, 2)])
    store.commit(record(3, "end"), [])
    report = check_chain(store)
    assert (report.findings, report.num_commits) == ([], 6), "and the checks of undone commits"
    assert report.weight_inputs == [(2, inputs)]
    assert {step: entries[step] for step in (0, 1)} == {step: report.step_entries[step] for step in (0, 1)}
    assert report.step_entries[2] != entries[2]
    texts = [commit.text for commit in store.stored_commits()]
    assert json.loads(texts[0])["previous"] == store.first_chain_entry
    assert store.newest_chain_entry == chain_hash(texts[-1])
    undone = next(iter(store.branches()))
    assert check_chain(VersionedStore.open(tmp_path / "s", branch=undone)).step_entries == entries


def test_record_that_cannot_be_decoded_is_reported_after_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "s")
    read = StoreReader._commit_lines

    def corrupt(store: StoreReader, *args: Any) -> Iterator[tuple[list[int], bytes]]:
        return ((line, b"{}" if i == 1 else text) for i, (line, text) in enumerate(read(store, *args)))

    monkeypatch.setattr(StoreReader, "_commit_lines", corrupt)
    (finding,) = check_chain(store).findings
    assert finding.location == "step 0"
    assert finding.message.startswith(f"what follows cannot be read: {store.path}: the record of step 1 is corrupt: ")


# -- forgeries -------------------------------------------------------------------------------------------------------


def change_bits(array: Any, at: int, rng: random.Random) -> None:
    """Flip one bit of an element."""
    value = np.asarray(array[at : at + 1])
    raw = value.view(np.uint8)
    if value.dtype == np.bool_:
        raw ^= 1
    else:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    array[at : at + 1] = value


def in_tokens(root: Any, rng: random.Random, name: str) -> str:
    """Flip a bit of a token value; returns the commit that contains it."""
    row = rng.randrange(int(root["rows/offset"].shape[0]))
    begin, prompt, response = (int(root[f"rows/{column}"][row]) for column in TOKEN_POSITION_COLUMNS)
    change_bits(root[f"tokens/{name}"], begin + rng.randrange(prompt + response), rng)
    return f"step {row // ROWS}"


def in_column(root: Any, rng: random.Random, name: str) -> str:
    row = rng.randrange(int(root[name].shape[0]))
    change_bits(root[name], row, rng)
    return f"step {row // ROWS}"


def in_text(root: Any, rng: random.Random) -> str:
    at = rng.randrange(int(root["text"].shape[0]))
    change_bits(root["text"], at, rng)
    return f"step {int(np.searchsorted(root['rows/text_offset'][:], at, side='right') - 1) // ROWS}"


def in_records(root: Any, rng: random.Random) -> str:
    """Change a digit in the JSON of a record."""
    text = root["records"][:].tobytes()
    at = rng.choice([i for i, byte in enumerate(text) if byte in b"1234567"])
    root["records"][at] = text[at] + 1
    return ""


def in_commits(root: Any, rng: random.Random) -> str:
    table = root["commits"]
    row, column = rng.randrange(table.shape[0]), rng.randrange(len(COMMIT_COLUMN_INDEX))
    table[row, column] = int(table[row, column]) + rng.choice([-1, 1])
    return ""


def move_a_row(root: Any, rng: random.Random) -> str:
    """Exchange two rows of different steps."""
    a, b = rng.randrange(ROWS), ROWS + rng.randrange(ROWS)
    for column in COLUMNS:
        values = root[column.array_name][:]
        values[[a, b]] = values[[b, a]]
        root[column.array_name][:] = values
    return "step 0"


def drop_a_row(root: Any, rng: random.Random) -> str:
    row = rng.randrange(int(root["rows/offset"].shape[0]))
    for column in COLUMNS:
        kept = np.delete(root[column.array_name][:], row)
        root[column.array_name].resize(kept.shape)
        root[column.array_name][:] = kept
    return f"step {row // ROWS}"


def add_a_row(root: Any, rng: random.Random) -> str:
    row = rng.randrange(int(root["rows/offset"].shape[0]) - 1)
    for column in COLUMNS:
        values = root[column.array_name][:]
        more = np.insert(values, row + 1, values[row])
        root[column.array_name].resize(more.shape)
        root[column.array_name][:] = more
    return f"step {(row + 1) // ROWS}"


def drop_a_step(root: Any, rng: random.Random) -> str:
    """Remove a commit with its rows, and leave all others as they are."""
    step = rng.randrange(2)
    for column in COLUMNS:
        kept = np.delete(root[column.array_name][:], slice(ROWS * step, ROWS * (step + 1)))
        root[column.array_name].resize(kept.shape)
        root[column.array_name][:] = kept
    kept = np.delete(root["commits"][:], step, axis=0)
    root["commits"].resize(kept.shape)
    root["commits"][:] = kept
    return f"step {step + 1}"


def change_header(root: Any, rng: random.Random) -> str:
    root.attrs["header"] = {**root.attrs["header"], "held_out": rng.randint(1, 9)}
    return "step 0"


def remove_the_chain(root: Any, rng: random.Random) -> str:
    without_entries(root, range(3))
    return "step 0"


def remove_an_entry(root: Any, rng: random.Random) -> str:
    step = rng.randrange(1, 3)
    without_entries(root, [step])
    return f"step {step}"


def without_entries(root: Any, steps: Container[int]) -> str:
    text, table, records = root["records"][:].tobytes(), root["commits"][:], b""
    for step, row in enumerate(table):
        offset, size = (int(row[COMMIT_COLUMN_INDEX[name]]) for name in ("record_offset", "record_bytes"))
        stored = json.loads(text[offset : offset + size])
        hashes = ("previous", "rows_fingerprint") if step in steps else ()
        encoded = json.dumps({name: value for name, value in stored.items() if name not in hashes}).encode()
        row[COMMIT_COLUMN_INDEX["record_offset"]], row[COMMIT_COLUMN_INDEX["record_bytes"]] = len(records), len(encoded)
        records += encoded
    root["records"].resize((len(records),))
    root["records"][:] = np.frombuffer(records, np.uint8)
    root["commits"][:] = table
    return ""


FORGERIES: dict[str, Callable[[Any, random.Random], str]] = {
    **{f"tokens/{name}": partial(in_tokens, name=name) for name in (*layout.TOKEN_ARRAYS, layout.TEACHER_ARRAY)},
    **{c.array_name: partial(in_column, name=c.array_name) for c in COLUMNS},
    "text": in_text,
    "records": in_records,
    "commits": in_commits,
    "a row moved": move_a_row,
    "a row dropped": drop_a_row,
    "a row added": add_a_row,
    "a step dropped": drop_a_step,
    "header": change_header,
    "the chain removed": remove_the_chain,
    "an entry removed": remove_an_entry,
}


def forge(folder: Path, change: Callable[[Any], str]) -> str:
    """Change a store in a forged last commit; returns the result of `change`."""
    repository = repository_at(folder)
    newest = next(iter(repository.ancestry(branch="main")))
    session = repository.writable_session("main")
    where = change(zarr.open_group(session.store, mode="r+"))
    session.commit(newest.message, metadata=dict(newest.metadata))
    return where


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without a forgery, which tests must not change."""
    path = tmp_path_factory.mktemp("sound") / "s"
    assert check_chain(make(path)).findings == []
    return path


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forgery_is_found_with_its_place(tmp_path: Path, sound: Path, kind: str) -> None:
    shutil.copytree(sound, tmp_path / "s")
    rng, snapshot = random.Random(kind), VersionedStore.open(sound).snapshot
    for _ in range(max(1, num_examples() // 50)):
        repository_at(tmp_path / "s").reset_branch("main", snapshot)
        where = forge(tmp_path / "s", lambda root: FORGERIES[kind](root, rng))
        found = places(check_chain(VersionedStore.open(tmp_path / "s")))
        assert found, kind
        assert not where or where in found, (where, found)


def test_a_foreign_snapshot_is_found(tmp_path: Path) -> None:
    make(tmp_path / "s")
    repository = repository_at(tmp_path / "s")
    session = repository.writable_session("main")
    zarr.open_group(session.store, mode="r+").attrs["more"] = 1
    session.commit("tampered")
    (finding,) = check_chain(VersionedStore.open(tmp_path / "s")).findings
    assert finding.location == "step 2"

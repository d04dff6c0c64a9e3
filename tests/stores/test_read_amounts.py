"""Amounts of data that store operations read."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.errors import StoreError
from staleflow.stores.id_sets import Ints
from staleflow.stores.trajectories import reader
from staleflow.stores.trajectories.versioned import StoredIds, VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from tests.stores.store_conformance import HEADER, ended, record


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the elements read of each array."""
    counts: Counter[str] = Counter()
    real = VersionedStore._slice

    def counted(self: VersionedStore, root: Any, name: str, first: int, last: int) -> Any:
        counts[name] += last - first
        return real(self, root, name, first, last)

    columns = VersionedStore._stored_columns

    def counted_columns(self: VersionedStore, root: Any, first: int, last: int, wanted: Any) -> Any:
        counts.update({column.array_name: last - first for column in wanted})
        return columns(self, root, first, last, wanted)

    monkeypatch.setattr(VersionedStore, "_slice", counted)
    monkeypatch.setattr(VersionedStore, "_stored_columns", counted_columns)
    return counts


def make(path: Path, num_steps: int, rows: int = 8) -> VersionedStore:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(path, HEADER)
    for step in range(num_steps):
        store.commit(record(step), [ended(rng, rows * step + i, step) for i in range(rows)])
    return store


def rows_of(values: Ints, start: int, stop: int) -> Ints:
    return values[start:stop]


def test_summary_and_steps_read_no_row(tmp_path: Path, read: Counter[str]) -> None:
    make(tmp_path / "s", 20)
    read.clear()
    store = VersionedStore.open(tmp_path / "s")
    result = store.summary()
    assert (result.num_steps, result.num_rows, result.has_ended) == (20, 160, False)
    assert result.last_commit == result.last_step == store.commits(-1)[0] == store.commits()[19]
    assert len(store.commits(5, 8)) == 3
    assert store.commits(-2) == store.commits()[-2:]
    assert set(read) == {"commits", "records"}
    read.clear()
    store.summary()
    assert read["records"] < 2_000  # of the last commit only


def test_rows_of_many_small_commits_are_read_without_the_space_between_commits(
    tmp_path: Path, read: Counter[str]
) -> None:
    store = make(tmp_path / "s", 20)
    read.clear()
    rows = list(store.trajectories())
    assert len(rows) == 160
    assert read["tokens/ids"] == sum(len(row.trajectory.prompt_tokens) + row.trajectory.num_tokens for row in rows)


def test_scattered_rows_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path / "s", 4)
    reads: list[tuple[int, int]] = []
    columns = VersionedStore._stored_columns

    def recorded(self: VersionedStore, root: Any, start: int, stop: int, wanted: Any) -> Any:
        reads.append((start, stop))
        return columns(self, root, start, stop, wanted)

    monkeypatch.setattr(VersionedStore, "_stored_columns", recorded)
    monkeypatch.setattr(reader, "BLOCK_ROWS", 20)
    positions = [1, 3, 9, 20, 21, 31, 5, 5]
    rows = list(store.trajectories_at(positions))
    assert [row.trajectory.id for row in rows if isinstance(row, EndedTrajectory)] == positions
    assert reads == [(1, 21), (21, 32), (5, 6), (5, 6)]


def test_a_commit_after_reopening_reads_no_row_unless_ids_overlap(tmp_path: Path, read: Counter[str]) -> None:
    rng = np.random.default_rng(1)
    make(tmp_path / "s", 20)
    store = VersionedStore.open(tmp_path / "s")
    read.clear()
    store.commit(record(20), [ended(rng, 160, 20)])
    assert set(read) == {"commits", "records"}  # of the last commit, which this one follows
    assert read["records"] < 2_000
    read.clear()
    with pytest.raises(StoreError, match="trajectory 155 would be stored twice"):
        store.commit(record(21), [ended(rng, 161, 21), ended(rng, 155, 21)])
    assert read == {"rows/trajectory": 8}
    with pytest.raises(StoreError, match="trajectory 160 would be stored twice"):
        store.commit(record(21), [ended(rng, 160, 21)])
    with pytest.raises(StoreError, match="trajectory 170 would be stored twice"):
        store.commit(record(21), [ended(rng, 170, 21), ended(rng, 170, 21)])
    store.commit(record(21), [ended(rng, 161, 21)])
    assert [r.trajectory.id for r in store.trajectories()] == list(range(162))


def test_stored_ids_detects_duplicates_in_any_commit_order() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        ids = rng.permutation(60)[: rng.integers(1, 60)]
        cuts = np.sort(rng.integers(0, len(ids), 4))
        spans = np.stack([np.r_[0, cuts], np.r_[cuts, len(ids)]], axis=1)
        table = [(ids[a:b].min(initial=99), ids[a:b].max(initial=-1), a, b) for a, b in spans]
        stored = StoredIds(np.asarray(table), partial(rows_of, ids))
        known = set(ids.tolist())
        for _ in range(5):
            new = rng.integers(0, 80, rng.integers(0, 6)).tolist()
            repeated = known & set(new) | {id for id in new if new.count(id) > 1}
            assert stored.add(np.asarray(new, np.int64)).tolist() == sorted(repeated)
            known |= set(new)

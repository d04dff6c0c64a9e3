"""A store as a dask.dataframe and an xarray.Dataset, read in blocks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.columns import select_displayed_columns
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from tests.stores.test_stores import valid_store


def stored_rows(path: str, snapshot: str, start: int, stop: int) -> list[EndedTrajectory]:
    """Rows of a store at a snapshot; a function that can be sent to a worker."""
    return StoreReader.at(Path(path), snapshot).trajectories_in_range(start, stop)


def frame_of(store: StoreReader, block_rows: int = 512) -> Any:
    read = functools.partial(stored_rows, str(store.path), store.snapshot)
    return dataframes.to_dask(store.summary().num_rows, block_rows, read)


def test_a_dataframe_has_every_trajectory_with_its_tokens(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    frame = frame_of(store, block_rows=5)
    assert frame.npartitions == 4
    read = frame.compute(scheduler="sync")
    for row, (_, got) in zip(store.trajectories(), read.iterrows(), strict=True):
        t = row.trajectory
        assert (got.trajectory, got.group, got.step, got.fate) == (t.id, t.group, row.step, row.fate.value)
        assert (got.staleness, got.v_traj, got.error) == (row.staleness, t.v_traj, t.error)
        assert (got.reward, got.advantage) == (np.float32(t.reward), np.float32(row.advantage))
        np.testing.assert_array_equal(got.prompt_ids, t.prompt_tokens)
        np.testing.assert_array_equal(got.response_ids, t.response_tokens)
        np.testing.assert_array_equal(got.logprobs, t.logprobs)
        np.testing.assert_array_equal(got.versions, t.versions)
        np.testing.assert_array_equal(got.sampled, t.sampled)
        assert (got.response_tokens, got.given_tokens) == (t.sampled.sum(), (~t.sampled).sum())
        assert (got.turns, got.tool_s) == (len(t.turns), t.environment_s)
    by_staleness = frame[frame.fate == "consumed"].groupby("staleness").reward.mean().compute(scheduler="sync")
    assert set(by_staleness.index) == {r.staleness for r in store.trajectories() if r.step < 4}


def test_a_dataset_locates_the_tokens_of_a_trajectory_by_offset(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    data = store.to_xarray()
    for row in store.trajectories():
        at = data.sel(trajectory=row.trajectory.id)
        begin = int(at.offset) + int(at.prompt_tokens)
        here = slice(begin, begin + int(at.response_tokens) + int(at.given_tokens))
        np.testing.assert_array_equal(data.ids[here].values, row.trajectory.response_tokens)
        np.testing.assert_array_equal(data.logprobs[here].values, row.trajectory.logprobs)
    trained = int(data.mask.sum().compute())
    assert trained == sum(r.trajectory.num_sampled for r in store.trajectories() if r.loss_mask)


def test_the_token_axis_has_the_number_of_tokens(tmp_path: Path) -> None:
    """The tokens of a commit start at a chunk boundary; the gaps are not tokens."""
    store = valid_store(tmp_path / "s")
    data = store.to_xarray()
    rows = [row.trajectory for row in store.trajectories()]
    ids = np.concatenate([part for t in rows for part in (t.prompt_tokens, t.response_tokens)])
    assert data.sizes["token"] == len(ids) < store.array_lengths()["tokens/ids"]
    np.testing.assert_array_equal(data.ids.values, ids)
    np.testing.assert_array_equal(data.ids[5:-7].values, ids[5:-7])
    versions = np.concatenate([part for t in rows for part in (np.full(len(t.prompt_tokens), -1), t.versions)])
    np.testing.assert_array_equal(data.versions.values, versions)
    ends = np.cumsum([len(t.prompt_tokens) + t.num_tokens for t in rows]).tolist()
    assert data.offset.values.tolist() == [0, *ends[:-1]]
    assert VersionedStore.create(tmp_path / "empty", store.header).to_xarray().sizes == {"trajectory": 0, "token": 0}


def test_tables_have_every_column_in_its_type(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    frame = dataframes.to_pandas(store.trajectories())
    columns = store.displayed_columns()
    assert list(columns) == [column.name for column in select_displayed_columns()]
    for column in select_displayed_columns():
        assert frame[column.name].tolist() == columns[column.name].tolist(), column.name
        if not column.members:
            assert frame[column.name].dtype == columns[column.name].dtype == column.dtype
    for _, row in frame.iterrows():
        sampled = row.versions[row.sampled]
        assert (row.v_min, row.v_max) == (sampled.min(), sampled.max())


def test_an_empty_store_is_an_empty_frame_and_at_step_limits_the_rows(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    assert len(frame_of(VersionedStore.open(store.path, at_step=1)).compute(scheduler="sync")) == 8
    empty = VersionedStore.create(tmp_path / "empty", store.header)
    assert len(frame_of(empty).compute(scheduler="sync")) == 0


def test_without_xarray_the_error_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = valid_store(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ConfigError, match=r"pip install 'staleflow\[offline\]'"):
        store.to_xarray()

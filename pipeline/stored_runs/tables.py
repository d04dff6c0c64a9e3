"""Stored trajectories as tables of pandas, datasets and dask.dataframe, with texts."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.exporting import TEXT_COLUMNS
from staleflow.pipeline.stored_runs.pool import cache_per_process, open_store_at
from staleflow.pipeline.stored_runs.response_texts import decode_trajectory, make_display_detokenizer
from staleflow.pipeline.stored_runs.stored_trajectories import read_rows, read_rows_at, select_positions
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.dataframes import RowTexts
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer

TABLE_ROWS = 512
"""Trajectories converted together, to a part of a dataset or a partition of a dask.dataframe."""


def pandas_table(store: StoreReader, where: str, detokenizer: Detokenizer | None) -> Any:
    """Make a pandas.DataFrame with one row per trajectory that `where` selects. Raises ConfigError, StoreError.
    detokenizer: for the columns `prompt` and `response`; None leaves them out."""
    dataframes.import_offline_module("pandas")
    rows = list(read_rows(store, where))
    frame = dataframes.to_pandas(rows)
    if detokenizer is not None:
        texts = [decode_trajectory(row.trajectory, detokenizer) for row in rows]
        frame["prompt"], frame["response"] = [t.prompt for t in texts], [t.response for t in texts]
    return frame


def hugging_face_dataset(store: StoreReader, where: str, detokenizer: Detokenizer) -> Any:
    """Make a datasets.Dataset in memory of the trajectories that `where` selects, with the columns of an export. Raises
    ConfigError, StoreError."""
    arrow = dataframes.import_offline_module("pyarrow")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"this needs datasets ({error}); pip install 'staleflow[datasets]'") from error
    names, rows = TEXT_COLUMNS["hf"], read_rows(store, where)
    parts = [dataframes.arrow_schema(names).empty_table()]
    while part := list(itertools.islice(rows, TABLE_ROWS)):
        parts.append(
            dataframes.arrow_table(part, names, [decode_trajectory(row.trajectory, detokenizer) for row in part])
        )
    return datasets.Dataset(arrow.concat_tables(parts))


def dask_table(run_dir: Path, store: VersionedStore, where: str = "", *, texts: bool = True) -> Any:
    """A dask.dataframe with one row per trajectory. Workers read and decode its partitions.

    Args:
        run_dir: The run's folder; its job names the tokenizer. Without the tokenizer, texts are token ids.
        store: The run's store, at the snapshot or branch to read.
        where: Which trajectories, as an expression over columns such as "staleness <= 1 and reward > 0".
        texts: Whether there are the columns prompt, response and messages.

    Raises:
        ConfigError: `where` cannot be read, or dask.dataframe is not installed.
    """
    store = VersionedStore.at(store.path, store.snapshot)
    positions = select_positions(store, where)
    read_block = functools.partial(_read_rows, str(store.path), store.snapshot, positions)
    decode = functools.partial(_decode_rows, str(run_dir.resolve())) if texts else None
    return dataframes.to_dask(len(positions), TABLE_ROWS, read_block, decode)


def _read_rows(
    path: str, snapshot: str, positions: npt.NDArray[np.int64], start: int, stop: int
) -> list[EndedTrajectory]:
    return list(read_rows_at(open_store_at(path, snapshot), positions[start:stop]))


def _decode_rows(run_dir: str, rows: Sequence[EndedTrajectory]) -> list[RowTexts]:
    return [decode_trajectory(row.trajectory, _cached_detokenizer(run_dir)) for row in rows]


@cache_per_process(2)
def _cached_detokenizer(run_dir: str) -> Detokenizer:
    return make_display_detokenizer(load_job(Path(run_dir)))

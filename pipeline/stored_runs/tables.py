"""Stored trajectories as tables of pandas and datasets, with texts."""

from __future__ import annotations

import importlib
from typing import Any

from staleflow.pipeline.stored_runs.exporting import TEXT_COLUMNS
from staleflow.pipeline.stored_runs.response_texts import decode_row
from staleflow.pipeline.stored_runs.stored_trajectories import read_rows
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer

TABLE_ROWS = 512
"""Trajectories converted together to a part of a dataset."""


def pandas_table(store: StoreReader, where: str, detokenizer: Detokenizer | None) -> Any:
    """Make a pandas.DataFrame with one row per trajectory that `where` selects. Raises ConfigError, StoreError.
    detokenizer: for the columns `prompt` and `response`; None leaves them out."""
    dataframes.import_offline_module("pandas")
    rows = list(read_rows(store, where))
    frame = dataframes.to_pandas(rows)
    if detokenizer is not None:
        texts = [decode_row(row.trajectory, detokenizer) for row in rows]
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
    names = TEXT_COLUMNS["hf"]
    parts, rows = [dataframes.arrow_schema(names).empty_table()], []
    for row in read_rows(store, where):
        rows.append(row)
        if len(rows) == TABLE_ROWS:
            parts.append(_make_part(rows, names, detokenizer))
            rows = []
    return datasets.Dataset(arrow.concat_tables([*parts, _make_part(rows, names, detokenizer)]))


def _make_part(rows: list[Any], names: dict[str, str], detokenizer: Detokenizer) -> Any:
    return dataframes.arrow_table(rows, names, [decode_row(row.trajectory, detokenizer) for row in rows])

"""Stored trajectories as tables for dask.dataframe, pandas, xarray and pyarrow.

No run needs these libraries; `pip install 'staleflow[offline]'` installs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.columns import select_displayed_columns
from staleflow.stores.trajectory import EndedTrajectory

STORE_CHUNKS_PER_DASK_CHUNK = 16
"""Chunks of the store per dask chunk: one task per MiB of tokens costs less than one per chunk."""

SCALAR_TYPES = {**{column.name: column.display_dtype for column in select_displayed_columns()}, "error": "str"}
"""Scalar columns and their types: those of stores/trajectories/columns.py, and the reward function's error."""
ARRAY_TYPES = {
    "prompt_ids": "int32", "response_ids": "int32", "logprobs": "float32", "versions": "int32", "sampled": "bool",
}  # fmt: skip
"""Columns with one array per row. response_ids are all tokens after the prompt, given ones included, and the others are
theirs: behaviour logprobs, nats, 0 of given ones; versions, -1 of given ones; whether each was sampled."""


def import_offline_module(module: str) -> Any:
    """Import a module of the offline extra. Raises ConfigError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this needs {module.partition('.')[0]} ({error}); pip install 'staleflow[offline]'"
        ) from error


def plain_row(row: EndedTrajectory) -> dict[str, Any]:
    """A trajectory as plain values and numpy arrays, by the names of SCALAR_TYPES and ARRAY_TYPES."""
    t = row.trajectory
    return {
        **{column.name: column.display_value(row) for column in select_displayed_columns()},
        "error": t.error,
        "prompt_ids": t.prompt_tokens,
        "response_ids": t.response_tokens,
        "logprobs": t.logprobs,
        "versions": t.versions,
        "sampled": t.sampled,
    }


@dataclass(frozen=True, slots=True)
class RowTexts:
    """Texts of a trajectory. messages: the messages after the prompt, with the keys role, content, tokens, seconds."""

    prompt: str
    response: str
    messages: list[dict[str, Any]]


ReadTexts = Callable[[Sequence[EndedTrajectory]], list[RowTexts]]
"""Decodes the tokens of rows. Stores have no tokenizer: pipeline/stored_runs/tables.py has."""
TEXT_COLUMNS = ("prompt", "response", "messages")
"""Columns of tables with texts, as in RowTexts."""


def to_pandas(rows: Iterable[EndedTrajectory], read_texts: ReadTexts | None = None) -> Any:
    """A pandas.DataFrame with one row per trajectory; token columns hold numpy arrays.

    Args:
        rows: The trajectories, in the order of the table.
        read_texts: Decodes them, for the columns TEXT_COLUMNS. Without it there are none.

    Raises:
        ConfigError: pandas is not installed.
    """
    pandas = import_offline_module("pandas")
    rows = list(rows)
    records = [plain_row(row) for row in rows]
    columns: dict[str, Any] = {
        name: pandas.Series([r[name] for r in records], dtype=dtype) for name, dtype in SCALAR_TYPES.items()
    }
    for name in ARRAY_TYPES:
        columns[name] = pandas.Series([r[name] for r in records], dtype=object)
    if read_texts is not None:
        row_texts = read_texts(rows)
        for name in TEXT_COLUMNS:
            kind = object if name == "messages" else "str"
            columns[name] = pandas.Series([getattr(text, name) for text in row_texts], dtype=kind)
    return pandas.DataFrame(columns)


def to_dask(
    count: int,
    block_rows: int,
    read: Callable[[int, int], Iterable[EndedTrajectory]],
    read_texts: ReadTexts | None = None,
) -> Any:
    """A dask.dataframe with one row per trajectory, computed on workers.

    Args:
        count: Number of rows.
        block_rows: Rows of a partition.
        read: read(start, stop) returns the rows start <= row < stop; called on workers.
        read_texts: As in `to_pandas`; called on workers.

    Raises:
        ConfigError: dask.dataframe or pandas is not installed.
    """
    import_offline_module("pandas")
    dataframe = import_offline_module("dask.dataframe")
    dask = import_offline_module("dask")
    starts = range(0, max(count, 1), block_rows)
    # By default dask.dataframe would convert the token arrays to strings.
    with dask.config.set({"dataframe.convert-string": False}):
        return dataframe.from_map(
            _partition,
            list(starts),
            [min(start + block_rows, count) for start in starts],
            read=read,
            read_texts=read_texts,
            meta=to_pandas([], None if read_texts is None else lambda _: []),
            label="trajectories",
        )


def _partition(
    start: int, stop: int, read: Callable[[int, int], Iterable[EndedTrajectory]], read_texts: ReadTexts | None
) -> Any:
    return to_pandas(read(start, stop), read_texts)


def to_xarray(
    table: Mapping[str, Any], row_coordinates: Mapping[str, Any], root: Any, attributes: Mapping[str, Any]
) -> Any:
    """Make an xarray.Dataset of a store's columns and, lazily, its tokens.

    Args:
        table: The columns, by name.
        row_coordinates: The stored columns `offset`, `prompt_tokens` and `response_tokens`.
        root: The store's arrays.
        attributes: Of the dataset.

    Returns:
        A dataset over `trajectory` and `token`. `token` is as long as the stored trajectories together; those of a
        trajectory begin at its `offset`, and are prompt_tokens + response_tokens + given_tokens.

    Raises:
        ConfigError: xarray or dask.array is not installed.
    """
    xarray, array = import_offline_module("xarray"), import_offline_module("dask.array")
    offsets, sizes = row_coordinates["offset"], row_coordinates["prompt_tokens"] + row_coordinates["response_tokens"]
    # The tokens of a commit are adjacent, and between two commits are unused elements.
    starts = np.flatnonzero(np.concatenate([[True], offsets[1:] != (offsets + sizes)[:-1]])[: len(offsets)])
    totals = np.add.reduceat(sizes, starts) if len(starts) else sizes
    variables: dict[str, Any] = {name: ("trajectory", column) for name, column in table.items() if name != "trajectory"}
    variables["offset"] = ("trajectory", np.cumsum(sizes) - sizes)
    for name in ("ids", "logprobs", "versions", "mask"):
        source = root[f"tokens/{name}"]
        stored = array.from_array(source, chunks=source.chunks[0] * STORE_CHUNKS_PER_DASK_CHUNK, name=False)
        parts = [stored[start : start + total] for start, total in zip(offsets[starts], totals, strict=True)]
        variables[name] = ("token", array.concatenate(parts or [stored[:0]]))
    return xarray.Dataset(variables, coords={"trajectory": table["trajectory"]}, attrs=dict(attributes))


def arrow_schema(text_columns: dict[str, str]) -> Any:
    """The pyarrow schema of `arrow_table`. text_columns: names of the columns of texts and messages."""
    arrow = import_offline_module("pyarrow")
    fields = [
        (name, arrow.type_for_alias("string" if dtype == "str" else dtype)) for name, dtype in SCALAR_TYPES.items()
    ]
    lists = [(name, arrow.list_(arrow.type_for_alias(dtype))) for name, dtype in ARRAY_TYPES.items()]
    # Not a map: the datasets library does not support maps.
    parts = ("reward_parts", arrow.list_(arrow.struct([("name", arrow.string()), ("value", arrow.float64())])))
    message_fields = [
        ("role", arrow.string()),
        ("content", arrow.string()),
        ("tokens", arrow.int64()),
        ("seconds", arrow.float64()),
    ]
    kinds = {**dict.fromkeys(text_columns, arrow.string()), "messages": arrow.list_(arrow.struct(message_fields))}
    return arrow.schema(
        [*fields, *((name, kinds[attribute]) for attribute, name in text_columns.items()), *lists, parts]
    )


def arrow_table(rows: list[EndedTrajectory], text_columns: dict[str, str], decoded_texts: list[RowTexts]) -> Any:
    """Make a pyarrow.Table of trajectories and their texts. text_columns: column names for `prompt`, `response`,
    `messages`."""
    arrow = import_offline_module("pyarrow")
    records = [
        {
            **plain_row(row),
            **{name: getattr(texts_of_row, attribute) for attribute, name in text_columns.items()},
            "reward_parts": [{"name": n, "value": v} for n, v in row.trajectory.reward_parts.items()],
        }
        for row, texts_of_row in zip(rows, decoded_texts, strict=True)
    ]
    schema = arrow_schema(text_columns)
    if len(schema) != len({*SCALAR_TYPES, *ARRAY_TYPES, *text_columns.values(), "reward_parts"}):
        raise StoreError(f"text columns cannot be called {', '.join(text_columns.values())}")
    return arrow.Table.from_pydict({name: [r[name] for r in records] for name in schema.names}, schema=schema)

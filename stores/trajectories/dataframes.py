"""Stored trajectories as tables for dask.dataframe, pandas, xarray and pyarrow.

No run needs these libraries; `pip install 'staleflow[offline]'` installs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import Ended

TOKEN_CHUNKS = 16
"""Chunks of the store per dask chunk: one task per MiB of tokens costs less than one per chunk."""

COLUMNS = {
    "trajectory": "int64", "group": "int64", "step": "int64", "fate": "str", "reason": "str", "finish": "str",
    "v_traj": "int64", "staleness": "int64", "reward": "float32", "advantage": "float32", "loss_mask": "bool",
    "error": "str", "prompt_tokens": "int64", "response_tokens": "int64", "turns": "int64", "given_tokens": "int64",
    "tool_s": "float64",
}  # fmt: skip
"""Scalar columns and their types; counts are in tokens. response_tokens: the sampled ones; given_tokens: those given
between turns; tool_s: seconds that environments took."""
ARRAYS = {
    "prompt_ids": "int32", "response_ids": "int32", "logprobs": "float32", "versions": "int32", "sampled": "bool",
}  # fmt: skip
"""Columns with one array per row. response_ids are all tokens after the prompt, given ones included, and the others are
theirs: behaviour logprobs, nats, 0 of given ones; versions, -1 of given ones; whether each was sampled."""


def require(module: str) -> Any:
    """Import a module of the offline extra. Raises ConfigError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this needs {module.partition('.')[0]} ({error}); pip install 'staleflow[offline]'"
        ) from error


def record(row: Ended) -> dict[str, Any]:
    """A row as plain values and numpy arrays, by the names of COLUMNS and ARRAYS."""
    t = row.trajectory
    return {
        "trajectory": int(t.id),
        "group": int(t.group),
        "step": row.step,
        "fate": row.fate.value,
        "reason": row.reason.value,
        "finish": t.finish.value,
        "v_traj": int(t.v_traj),
        "staleness": row.staleness,
        "reward": np.float32(t.reward),
        "advantage": np.float32(row.advantage),
        "loss_mask": row.loss_mask,
        "error": t.error,
        "prompt_tokens": len(t.prompt_tokens),
        "response_tokens": t.num_sampled,
        "turns": len(t.turns),
        "given_tokens": t.num_given,
        "tool_s": t.tool_s,
        "prompt_ids": t.prompt_tokens,
        "response_ids": t.response_tokens,
        "logprobs": t.logprobs,
        "versions": t.versions,
        "sampled": t.sampled,
    }


def to_pandas(rows: Iterable[Ended]) -> Any:
    """A pandas.DataFrame with one row per trajectory; token columns hold numpy arrays."""
    pandas = require("pandas")
    records = [record(row) for row in rows]
    columns: dict[str, Any] = {
        name: pandas.Series([r[name] for r in records], dtype=dtype) for name, dtype in COLUMNS.items()
    }
    for name in ARRAYS:
        columns[name] = pandas.Series([r[name] for r in records], dtype=object)
    return pandas.DataFrame(columns)


def to_dask(count: int, block_rows: int, read: Callable[[int, int], Iterable[Ended]]) -> Any:
    """A dask.dataframe of `count` rows, in partitions of `block_rows`. read(first, last): the rows first <= row < last;
    called on workers. Raises ConfigError."""
    require("pandas")
    dataframe = require("dask.dataframe")
    dask = require("dask")
    firsts = range(0, max(count, 1), block_rows)
    # By default dask.dataframe would convert the token arrays to strings.
    with dask.config.set({"dataframe.convert-string": False}):
        return dataframe.from_map(
            _partition,
            list(firsts),
            [min(first + block_rows, count) for first in firsts],
            read=read,
            meta=to_pandas([]),
            label="trajectories",
        )


def _partition(first: int, last: int, read: Callable[[int, int], Iterable[Ended]]) -> Any:
    return to_pandas(read(first, last))


def to_xarray(table: Mapping[str, Any], offsets: Any, root: Any, attributes: Mapping[str, Any]) -> Any:
    """An xarray.Dataset of a store's columns and, lazily, its flat token arrays. offsets: index in `token` of each
    trajectory's first token; prompt_tokens + response_tokens + given_tokens of them follow. Raises ConfigError."""
    xarray, array = require("xarray"), require("dask.array")
    variables: dict[str, Any] = {name: ("trajectory", column) for name, column in table.items() if name != "trajectory"}
    variables["offset"] = ("trajectory", offsets)
    for name in ("ids", "logprobs", "versions", "mask"):
        source = root[f"tokens/{name}"]
        chunks = source.chunks[0] * TOKEN_CHUNKS
        variables[name] = ("token", array.from_array(source, chunks=chunks, name=False))
    return xarray.Dataset(variables, coords={"trajectory": table["trajectory"]}, attrs=dict(attributes))


def arrow_schema(texts: dict[str, str]) -> Any:
    """The pyarrow schema of `arrow_table`. texts: names of the columns of texts and messages."""
    arrow = require("pyarrow")
    fields = [(name, arrow.type_for_alias("string" if dtype == "str" else dtype)) for name, dtype in COLUMNS.items()]
    lists = [(name, arrow.list_(arrow.type_for_alias(dtype))) for name, dtype in ARRAYS.items()]
    # Not a map: the datasets library does not support maps.
    parts = ("reward_parts", arrow.list_(arrow.struct([("name", arrow.string()), ("value", arrow.float64())])))
    said = [
        ("role", arrow.string()),
        ("content", arrow.string()),
        ("tokens", arrow.int64()),
        ("seconds", arrow.float64()),
    ]
    kinds = {**dict.fromkeys(texts, arrow.string()), "messages": arrow.list_(arrow.struct(said))}
    return arrow.schema([*fields, *((name, kinds[what]) for what, name in texts.items()), *lists, parts])


@dataclass(frozen=True, slots=True)
class RowTexts:
    """A row's texts. messages: what was said after the prompt, by the names role, content, tokens, seconds."""

    prompt: str
    response: str
    messages: list[dict[str, Any]]


def arrow_table(rows: list[Ended], texts: dict[str, str], read: list[RowTexts]) -> Any:
    """A pyarrow.Table of rows and their texts. texts: names of the columns for `prompt`, `response` and `messages`."""
    arrow = require("pyarrow")
    records = [
        {
            **record(row),
            **{name: getattr(one, what) for what, name in texts.items()},
            "reward_parts": [{"name": n, "value": v} for n, v in row.trajectory.reward_parts.items()],
        }
        for row, one in zip(rows, read, strict=True)
    ]
    schema = arrow_schema(texts)
    if len(schema) != len({*COLUMNS, *ARRAYS, *texts.values(), "reward_parts"}):
        raise StoreError(f"text columns cannot be called {', '.join(texts.values())}")
    return arrow.Table.from_pydict({name: [r[name] for r in records] for name in schema.names}, schema=schema)

"""Writes rows of a notebook to a JSON lines file, so that a job can name them as a data set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.stores.files import replace_text


def write_rows(rows: Any, path: Path) -> None:
    """Write rows as JSON lines.

    Args:
        rows: Mappings from column to value, a pandas.DataFrame, or a datasets.Dataset. A value is a text, a number, a
            list or a mapping.
        path: The file.

    Raises:
        ConfigError: There is no row, one is not a mapping, or a value cannot be written as JSON.
        StoreError: The file cannot be written.
    """
    lines = []
    for number, row in enumerate(_rows(rows)):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"rows: row {number} is a {type(row).__name__}; each must be a mapping, such as "
                '{"prompt": ..., "answer": ...}'
            )
        try:
            lines.append(json.dumps({str(name): value for name, value in row.items()}, default=_plain))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows: row {number} cannot be written as JSON: {error}; use plain values") from error
    if not lines:
        raise ConfigError("rows: there are none")
    replace_text(path, "\n".join(lines) + "\n", "free space in the temporary folder")


def _rows(rows: Any) -> Iterable[Any]:
    """The rows of a table or iterable, one by one. Raises ConfigError."""
    if type(rows).__module__.partition(".")[0] == "pandas":
        return (
            {name: value for name, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
            for row in rows.to_dict("records")
        )
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise ConfigError(
            f"rows: a {type(rows).__name__}; expected a list of mappings, a pandas.DataFrame or a datasets.Dataset"
        )
    return rows


def _plain(value: Any) -> Any:
    """A value of numpy, pandas or the standard library as JSON knows it. Raises TypeError."""
    for convert in ("tolist", "isoformat"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"{value!r} is a {type(value).__name__}")

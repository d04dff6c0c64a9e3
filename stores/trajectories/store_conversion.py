"""Conversion of a store from the layout of the version before: rows of numbers packed in matrices.

Everything else of that layout is as it is now, so arrays are copied as they are, snapshot by snapshot: what was wrong
with a store is wrong with its copy. A snapshot that a training step committed appends; one that derived a branch has
other rewards or logprobs. The copy has the same branches, and its commits the same messages and metadata.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.column_chunks import append_all
from staleflow.stores.trajectories.columns import COLUMNS
from staleflow.stores.trajectories.layout import TOKEN_ARRAYS
from staleflow.stores.trajectories.reader import RESCORED, num_rows, stored_chunk
from staleflow.stores.trajectories.repository import (
    CREATED,
    INCOMPLETE,
    MAIN,
    branch_names,
    creating,
    first_line,
    repository_at,
)
from staleflow.stores.trajectories.versioned import create_arrays

INTEGERS = (
    "trajectory", "group", "v_traj", "v_min", "v_max", "offset", "prompt_tokens", "response_tokens", "finish", "fate",
    "reason", "step", "staleness", "text_offset", "text_bytes", "loss_mask",
)  # fmt: skip
"""Columns of the matrix rows/int."""
FLOATS = ("reward", "advantage", "arrived_s", "routed_s", "sampled_s", "rewarded_s")
"""Columns of the matrix rows/float."""
TURNS = ("turns", "given_tokens", "tool_s")
"""Columns of the matrix rows/turns, which a store has from its first trajectory of several turns on."""
CONVERTED = [column for column in COLUMNS if column.name in (*INTEGERS, *FLOATS, *TURNS)]
NO_SAMPLED_TOKEN = 2**31 - 1
"""v_min of a row without sampled tokens, -1 now."""
CONVERTED_FORMATS = (2, 3, 4)
UNDONE = "undone-"
"""Prefix of the branches of undone steps; the rest of the name is their last snapshot."""
DERIVED = ("rewards", "logprobs")
"""Kinds of commits that replace values."""
BLOCK = 16 * 65_536
"""Elements copied together: 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedStore:
    """The size of a converted store. rows: of the run's own branch."""

    rows: int
    snapshots: int
    branches: int


def needs_conversion(path: Path) -> bool:
    """Whether the store at a path has the layout of the version before. Raises ConfigError if it has an older one."""
    format = _group(repository_at(path).readonly_session(MAIN)).attrs.get("format")
    if format == 1:
        raise ConfigError(f"{path}: store format 1 is of a version that this one does not convert")
    return format in CONVERTED_FORMATS


def convert_store(source: Path, target: Path, *, keeps_bound: bool = True) -> ConvertedStore:
    """Write a converted copy of the store at `source`, which is not changed, to the folder `target`, which appears when
    it is complete. keeps_bound: whether the run keeps a staleness bound: of one that does not, the version before wrote
    the number of steps as eta. Raises StoreError."""
    try:
        old = repository_at(source)
        names = sorted(branch_names(old), key=lambda name: (not name.startswith(UNDONE), name != MAIN))
        chains = {name: list(old.ancestry(branch=name))[::-1] for name in names}
        # A branch that was derived from another derived one comes after that.
        order = [*names[: names.index(MAIN) + 1], *sorted(names[names.index(MAIN) + 1 :], key=lambda n: len(chains[n]))]
        with creating(target) as new:
            first = chains[MAIN][0].id
            copied = {str(first): str(new.lookup_branch(MAIN))}
            for name in order:
                head = _copy_chain(old, new, chains[name], copied, keeps_bound=keeps_bound)
                if name == MAIN:
                    new.reset_branch(MAIN, head)
                else:
                    new.create_branch(f"{UNDONE}{head}" if name.startswith(UNDONE) else name, head)
            rows = num_rows(_group(new.readonly_session(MAIN)))
    except (icechunk.IcechunkError, OSError, KeyError, ValueError) as error:
        if isinstance(error, (ConfigError, StoreError)):
            raise
        raise StoreError(f"{source}: cannot be converted: {first_line(error)}") from error
    return ConvertedStore(rows=rows, snapshots=len(copied), branches=len(names))


def _copy_chain(old: Any, new: Any, chain: list[Any], copied: dict[str, str], *, keeps_bound: bool) -> str:
    """Copy the snapshots of a branch, oldest first, of which some may be copied already; returns the copy of the last.
    copied: by snapshot of `old` its copy; added to."""
    known = max(i for i, snapshot in enumerate(chain) if snapshot.id in copied)
    head = copied[chain[known].id]
    if known == len(chain) - 1:
        return head
    work = f"{INCOMPLETE}{secrets.token_hex(4)}"
    new.create_branch(work, head)
    for snapshot in chain[known + 1 :]:
        before = _group(old.readonly_session(snapshot_id=snapshot.id))
        session = new.writable_session(work)
        kind = snapshot.metadata.get("kind")
        if kind == CREATED:
            after = zarr.open_group(session.store, mode="w", zarr_format=3)
            header = {**before.attrs["header"], "url": ""}
            create_arrays(after, header if keeps_bound else {**header, "eta": None}, CONVERTED)
        else:
            after = zarr.open_group(session.store, mode="r+")
            if kind in DERIVED:
                _copy_derived(before, after, copied)
            else:
                _append(before, after)
        copied[snapshot.id] = head = str(session.commit(snapshot.message, metadata=dict(snapshot.metadata)))
    new.delete_branch(work)
    return head


def _append(before: Any, after: Any) -> None:
    """Append what a snapshot has more than the one before it."""
    first, last = num_rows(after), int(before["rows/int"].shape[0])
    if first < last:
        append_all(after.store, {f"rows/{name}": values for name, values in _columns(before, first, last)})
    for name in (*(f"tokens/{name}" for name in TOKEN_ARRAYS), "text", "commits", "records"):
        source, array = before[name], after[name]
        size = stored_chunk(source) if name.startswith("tokens/") else 1
        # The tokens of a commit begin at the boundary of a file; nothing is stored before it.
        begin, end = -(-int(array.shape[0]) // size) * size, int(source.shape[0])
        if end > array.shape[0]:
            array.resize((end, *array.shape[1:]))
            for at in range(begin, end, BLOCK):
                array[at : min(end, at + BLOCK)] = source[at : min(end, at + BLOCK)]


def _columns(before: Any, first: int, last: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    integers, floats = before["rows/int"][first:last], before["rows/float"][first:last]
    values = {name: integers[:, i] for i, name in enumerate(INTEGERS)}
    values |= {name: floats[:, i] for i, name in enumerate(FLOATS)}
    if "rows/turns" in before:
        turns = before["rows/turns"][first:last]
        values |= {name: turns[:, i] for i, name in enumerate(TURNS)}
    else:
        zeros = np.zeros(last - first)
        values |= {"turns": values["response_tokens"] > 0, "given_tokens": zeros, "tool_s": zeros}
    values["v_min"] = np.where(values["v_min"] == NO_SAMPLED_TOKEN, -1, values["v_min"])
    values["loss_mask"] = values["loss_mask"] != 0
    for column in CONVERTED:
        yield column.name, np.asarray(values[column.name]).astype(column.dtype)


def _copy_derived(before: Any, after: Any, copied: dict[str, str]) -> None:
    """Make what a derived branch has other than its parent: rewards and loss masks, or logprobs under other weights."""
    for name, values in _columns(before, 0, num_rows(after)):
        if name in ("reward", "advantage", "loss_mask"):
            after[f"rows/{name}"][:] = values
    _copy_changed(before["tokens/mask"], after["tokens/mask"])
    if RESCORED in before:
        tokens = after["tokens/logprobs"]
        if RESCORED not in after:
            after.create_array(
                RESCORED, shape=tokens.shape, chunks=tokens.chunks, shards=tokens.shards, dtype="float32",
                compressors=tokens.compressors, fill_value=0, dimension_names=("tokens_rescored",),
            )  # fmt: skip
        _copy_changed(before[RESCORED], after[RESCORED])
    lineage = dict(before.attrs["lineage"])
    after.attrs["lineage"] = {**lineage, "parent": copied.get(str(lineage.get("parent")), "")}
    if "errors" in before.attrs:
        after.attrs["errors"] = before.attrs["errors"]


def _copy_changed(source: Any, array: Any) -> None:
    """Copy the blocks of files in which two arrays of one length differ."""
    size = stored_chunk(array)
    for at in range(0, int(source.shape[0]), size):
        values = source[at : at + size]
        if not np.array_equal(values, array[at : at + size]):
            array[at : at + size] = values


def _group(session: Any) -> Any:
    return zarr.open_group(session.store, mode="r")

"""Reading of a store at a snapshot, or of a branch as it is now: commits, trajectories, columns, damage.

What is asked for is read and nothing else: `summary` reads a few numbers per commit, `steps` the records of commits
but no row, columns come in the range that is asked for. Stores of format 1 have their records among the texts of rows,
and are read whole for them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import zarr

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories import dataframes, layout
from staleflow.stores.trajectories.layout import (
    AT,
    COMMIT_AT,
    FATES,
    FINISHES,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    KINDS,
    REASONS,
    TOKEN_ARRAYS,
    TURN_COLUMNS,
)
from staleflow.stores.trajectories.records import CODEC, RunHeader, StepRecord
from staleflow.stores.trajectories.repository import MAIN, branch_names, first_line, repository_at
from staleflow.stores.trajectory import Ended, Fate, TrajectoryId

FORMATS = (1, 2, 3, 4)
"""Versions of the layout that are read. Raised whenever code for the old layout would misread the new one. Format 1 has
`steps` (step, offset and length of the record in `text`) in place of `commits` and `records`. Format 3 has given tokens
between sampled ones, and TURNS. Format 4 has branches; see stores/context_branches.py."""
Extent = tuple[dict[str, npt.NDArray[Any]], int, bytes, int]
"""Tokens by name and where they begin in the store, texts and where they begin."""
BLOCK_ROWS = 4096
"""Rows read together."""
ARRAYS = (*(f"tokens/{name}" for name in TOKEN_ARRAYS), "rows/int", "rows/float", "text")
"""The arrays of all stores."""
TURNS = "rows/turns"
"""float64 [R, len(TURN_COLUMNS)], in stores of format 3."""
RESCORED = "tokens/rescored"
"""float32 [T], on branches with logprobs: of each sampled token under another model, nats; 0 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A stored trajectory that can no longer be read, and why."""

    trajectory: TrajectoryId
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedChunk:
    """A chunk that cannot be read. number: among its array's chunks; elements: per chunk of that array."""

    array: str
    number: int
    elements: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How far a run has come, as its store has it."""

    num_steps: int
    num_rows: int
    """Stored trajectories, of any fate."""
    num_tokens: int
    """Stored tokens, prompts included."""
    last: StepRecord | None
    """The latest commit; None before the first."""
    last_step: StepRecord | None
    """The latest training step; None before the first."""

    @property
    def ended(self) -> bool:
        """Whether the run's end is stored."""
        return self.last is not None and self.last.kind == "end"


class Root:
    """The arrays of a session, by name; each is looked up once."""

    def __init__(self, session: Any) -> None:
        self._group = zarr.open_group(session.store, mode="r")
        self._arrays: dict[str, Any] = {}

    @property
    def attrs(self) -> Any:
        return self._group.attrs

    def __getitem__(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._group[name]
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._group


class StoreReader:
    """A store at a snapshot, or a branch of it. Reading changes nothing, so threads may share one."""

    def __init__(self, repository: Any, *, at_snapshot: str | None, where: str, branch: str = MAIN) -> None:
        self._repository = repository
        self._at_snapshot = at_snapshot
        self._branch = branch
        self._where = where
        self._root: Root | None = None
        attributes = dict(self._read_root().attrs)
        if attributes.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise ConfigError(f"{where}: store format {attributes.get('format')!r}, this version reads {known}")
        try:
            self.header = CODEC.decode(attributes.get("header"), RunHeader)
        except ValueError as error:
            raise StoreError(f"{where}: the store's header is corrupt: {error}") from error
        self.lineage: dict[str, Any] = attributes.get("lineage", {})
        """How a branch was made; empty on the branch of the run itself. See stores/trajectories/derived_branches.py."""
        self._errors: dict[str, str] | None = attributes.get("errors")

    @classmethod
    def at(cls, path: Path, snapshot: str) -> Self:
        """Open a store as it was at a snapshot, read-only."""
        return cls(repository_at(path), at_snapshot=snapshot, where=str(path))

    # -- commits -------------------------------------------------------------------------------------------------

    def steps(self, first: int = 0, last: int | None = None) -> list[StepRecord]:
        """The commits at first <= number < last, all by default, oldest first; as in slices, negative numbers count
        from the end. Reads no row."""
        root = self._read_root()
        return list(self._records(root, *slice(first, last).indices(self._num_commits(root))[:2]))

    def _records(self, root: Any, first: int, last: int) -> Iterator[StepRecord]:
        if first >= last:
            return
        name, places = self._record_places(root, first, last)
        length = int(root[name].shape[0])
        begin = min(max(0, min(offset for _, offset, _ in places)), length)
        end = min(max(begin, *(offset + size for _, offset, size in places)), length)
        text = self._slice(root, name, begin, end).tobytes()
        for step, offset, size in places:
            try:
                yield CODEC.decode(json.loads(text[max(0, offset - begin) : offset - begin + size]), StepRecord)
            except ValueError as error:
                raise StoreError(f"{self._where}: the record of step {step} is corrupt: {error}") from error

    def _record_places(self, root: Any, first: int, last: int) -> tuple[str, list[tuple[int, int, int]]]:
        """The array that has the records of these commits, and (step, offset, length) of each."""
        if "commits" not in root:
            return "text", [tuple(place) for place in self._slice(root, "steps", first, last).tolist()]
        table = self._slice(root, "commits", first, last)
        columns = [COMMIT_AT[name] for name in ("step", "record_offset", "record_bytes")]
        return "records", [tuple(place) for place in table[:, columns].tolist()]

    def _num_commits(self, root: Any) -> int:
        return int(root["commits" if "commits" in root else "steps"].shape[0])

    def summary(self) -> Summary:
        """How far the run has come. Reads a few numbers per commit, and the records of two."""
        root = self._read_root()
        count = self._num_commits(root)
        if "commits" in root:
            table = self._slice(root, "commits", 0, count)
            trained = np.flatnonzero(table[:, COMMIT_AT["kind"]] == KINDS.index("step"))
            num_tokens = int(table[:, COMMIT_AT["tokens"]].sum())
            records = {int(i): next(self._records(root, i, i + 1)) for i in {*trained[-1:].tolist(), count - 1} - {-1}}
        else:
            records = dict(enumerate(self._records(root, 0, count)))
            trained = np.flatnonzero([r.kind == "step" for r in records.values()])
            num_tokens = sum(r.num_tokens for r in records.values())
        return Summary(
            num_steps=len(trained),
            num_rows=int(root["rows/int"].shape[0]),
            num_tokens=num_tokens,
            last=records.get(count - 1),
            last_step=records[int(trained[-1])] if len(trained) else None,
        )

    # -- trajectories --------------------------------------------------------------------------------------------

    def ended(self, step: int | None = None) -> Iterable[Ended]:
        root = self._read_root()
        ints = self._column(root, "rows/int")
        at = np.arange(len(ints))
        if step is not None:
            consumed = ints[:, AT["fate"]] == FATES.index(Fate.CONSUMED)
            at = at[consumed & (ints[:, AT["step"]] == step)]
        floats = self._column(root, "rows/float")
        # In blocks: the rows of a block are adjacent in the token arrays.
        for block in (at[i : i + BLOCK_ROWS] for i in range(0, len(at), BLOCK_ROWS)):
            yield from self._block(root, ints[block], floats[block])

    def rows(self, first: int, last: int) -> list[Ended]:
        """The stored trajectories at positions first <= position < last."""
        root = self._read_root()
        ints = self._slice(root, "rows/int", first, last)
        return list(self._block(root, ints, self._slice(root, "rows/float", first, last)))

    def places(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """[N] index of the first response token of each row at first <= position < last."""
        ints = self._slice(self._read_root(), "rows/int", first, last)
        return np.asarray(ints[:, AT["offset"]] + ints[:, AT["prompt_tokens"]], np.int64)

    def readable(self, first: int, last: int) -> Iterator[Ended | Damaged]:
        """As `rows`, but yields Damaged for rows in a corrupt chunk instead of raising."""
        return self._readable(self._read_root(), first, last)

    def picked(self, positions: Iterable[int]) -> Iterator[Ended | Damaged]:
        """The rows at these positions, in this order; Damaged for those that cannot be read. Adjacent ones are read
        together."""
        root = self._read_root()
        wanted = list(positions)
        first = 0
        for i in range(1, len(wanted) + 1):
            if i == len(wanted) or wanted[i] != wanted[i - 1] + 1:
                yield from self._readable(root, wanted[first], wanted[i - 1] + 1)
                first = i

    def _readable(self, root: Any, first: int, last: int) -> Iterator[Ended | Damaged]:
        ints, floats = self._slice(root, "rows/int", first, last), self._slice(root, "rows/float", first, last)
        try:
            yield from list(self._block(root, ints, floats))
            return
        except StoreError:
            pass
        for i in range(len(ints)):
            try:
                yield from self._block(root, ints[i : i + 1], floats[i : i + 1])
            except StoreError as error:
                yield Damaged(trajectory=TrajectoryId(int(ints[i, AT["trajectory"]])), what=str(error))

    def damage(self) -> Iterator[DamagedChunk]:
        """Every chunk that cannot be read. Reads the whole store."""
        root = self._read_root()
        for name in array_names(root):
            length, size = root[name].shape[0], stored_chunk(root[name])
            for number in range(-(-length // size)):
                try:
                    self._slice(root, name, number * size, min(length, (number + 1) * size))
                except StoreError as error:
                    yield DamagedChunk(array=name, number=number, elements=size, what=str(error))

    def branches(self) -> set[str]:
        """All branches except the one the run commits to."""
        return branch_names(self._repository) - {MAIN}

    @property
    def path(self) -> Path:
        """The absolute path of the store."""
        return Path(self._where).resolve()

    @property
    def snapshot(self) -> str:
        """The snapshot id this store reads from."""
        return self._at_snapshot or str(self._repository.lookup_branch(self._branch))

    def follows(self, snapshot: str) -> bool:
        """Whether what this store reads was committed after `snapshot`, or is that."""
        return any(str(one.id) == snapshot for one in self._repository.ancestry(snapshot_id=self.snapshot))

    def get(self, trajectory: TrajectoryId) -> Ended | None:
        root = self._read_root()
        ints = self._column(root, "rows/int")
        (at,) = np.nonzero(ints[:, AT["trajectory"]] == trajectory)
        if not len(at):
            return None
        return next(iter(self._block(root, ints[at[:1]], self._column(root, "rows/float")[at[:1]])))

    def table(self, first: int = 0, last: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """The scalar columns of the rows at first <= position < last, all by default, by name."""
        return self._table(self._read_root(), first, last)

    def _table(self, root: Any, first: int, last: int | None) -> dict[str, npt.NDArray[Any]]:
        size = root["rows/int"].shape[0]
        first, last = min(first, size), size if last is None else min(last, size)
        ints = self._slice(root, "rows/int", first, last)
        floats = self._slice(root, "rows/float", first, last)
        columns: dict[str, npt.NDArray[Any]] = {name: ints[:, i] for i, name in enumerate(INT_COLUMNS)}
        return columns | {name: floats[:, i] for i, name in enumerate(FLOAT_COLUMNS)}

    def columns(self, first: int = 0, last: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """As `table`, for display: fate, reason and finish in words, TURN_COLUMNS, without the columns of the layout.
        response_tokens: the sampled ones."""
        root = self._read_root()
        table = self._table(root, first, last)
        count = len(table["trajectory"])
        if TURNS in root:
            turns, given, tool_s = self._slice(root, TURNS, first, first + count).T if count else np.zeros((3, 0))
        else:
            turns, given, tool_s = table["response_tokens"] > 0, np.zeros(count), np.zeros(count)
        table["response_tokens"] = table["response_tokens"] - given.astype(np.int64)
        table |= {"turns": turns.astype(np.int64), "given_tokens": given.astype(np.int64), "tool_s": tool_s}
        for name, members in (("fate", FATES), ("reason", REASONS), ("finish", FINISHES)):
            table[name] = np.asarray([m.value for m in members])[table[name]]
        return {name: column for name, column in table.items() if name not in ("offset", "text_offset", "text_bytes")}

    def to_dask(self, block_rows: int = 512) -> Any:
        """A dask.dataframe with one row per trajectory, tokens included, read in blocks on the workers."""
        read = functools.partial(_rows_at, str(self.path), self.snapshot)
        return dataframes.to_dask(len(self.table()["trajectory"]), block_rows, read)

    def to_xarray(self) -> Any:
        """An xarray.Dataset over dimensions `trajectory` and `token`; token arrays stay on disk until computed."""
        attributes: dict[str, str | int] = {"run": self.header.run, "snapshot": self.snapshot}
        if self.header.eta is not None:  # NetCDF has no None
            attributes["eta"] = self.header.eta
        return dataframes.to_xarray(self.columns(), self.table()["offset"], self._read_root(), attributes)

    def rescored(self, trajectory: TrajectoryId) -> npt.NDArray[np.float32] | None:
        """[T] logprobs of a response under another model, nats; None on branches without (derived_branches.py)."""
        root = self._read_root()
        if RESCORED not in root:
            return None
        ints = self._column(root, "rows/int")
        (at,) = np.nonzero(ints[:, AT["trajectory"]] == trajectory)
        begin = int(ints[at[0], AT["offset"]] + ints[at[0], AT["prompt_tokens"]])
        return self._slice(root, RESCORED, begin, begin + int(ints[at[0], AT["response_tokens"]]))

    def array_lengths(self) -> dict[str, int]:
        """Length of each array, by name; an audit compares them with the records."""
        root = self._read_root()
        return {name: int(root[name].shape[0]) for name in array_names(root)}

    def numbers(self, first: int, last: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """INT_COLUMNS and FLOAT_COLUMNS of the rows at first <= position < last."""
        root = self._read_root()
        return self._slice(root, "rows/int", first, last), self._slice(root, "rows/float", first, last)

    def turns(self, first: int, last: int) -> npt.NDArray[np.float64] | None:
        """TURN_COLUMNS of the rows at first <= position < last; None if no trajectory stored has several turns."""
        root = self._read_root()
        return self._slice(root, TURNS, first, last) if TURNS in root else None

    def integers(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """INT_COLUMNS of the rows at first <= position < last."""
        return self._slice(self._read_root(), "rows/int", first, last)

    def extent(self, ints: npt.NDArray[np.int64]) -> Extent:
        """Everything from the first of these rows to the last. ints: their INT_COLUMNS, at least one."""
        return self._extent(self._read_root(), ints)

    def _block(self, root: Any, ints: npt.NDArray[Any], floats: npt.NDArray[Any]) -> Iterable[Ended]:
        return self.unpacked(ints, floats, *self._extent(root, ints)) if len(ints) else ()

    def _extent(self, root: Any, ints: npt.NDArray[Any]) -> Extent:
        first = int(ints[:, AT["offset"]].min())
        sizes = ints[:, AT["prompt_tokens"]] + ints[:, AT["response_tokens"]]
        last = int((ints[:, AT["offset"]] + sizes).max())
        tokens = {name: self._slice(root, f"tokens/{name}", first, last) for name in ("ids", "logprobs", "versions")}
        text_first = int(ints[:, AT["text_offset"]].min())
        text_last = int((ints[:, AT["text_offset"]] + ints[:, AT["text_bytes"]]).max())
        return tokens, first, self._slice(root, "text", text_first, text_last).tobytes(), text_first

    def masks(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """The loss masks of tokens at first <= token < last. Rows have their mask, too: an audit compares them."""
        return self._slice(self._read_root(), "tokens/mask", first, last)

    def unpacked(
        self,
        ints: npt.NDArray[Any],
        floats: npt.NDArray[Any],
        tokens: Mapping[str, npt.NDArray[Any]],
        first: int,
        text: bytes,
        text_first: int,
    ) -> Iterator[Ended]:
        """Rows from their numbers and their `extent`. Raises StoreError if they contradict each other."""
        for row, values in zip(ints.tolist(), floats.tolist(), strict=True):
            ended = layout.unpack(row, values, tokens, first, text, text_first)
            if self._errors is not None:
                error = self._errors.get(str(ended.trajectory.id), "")
                ended = replace(ended, trajectory=replace(ended.trajectory, error=error, reward_parts={}))
            yield ended

    def _slice(self, root: Any, name: str, first: int, last: int) -> npt.NDArray[Any]:
        array = root[name]
        if first < 0:  # which an array would take for a place counted from its end
            raise StoreError(f"{self._where}: a row begins at {first} of {name}: its numbers are corrupt")
        if last > array.shape[0]:
            raise StoreError(f"{self._where}: {name} has {array.shape[0]} elements, a row needs {last}: truncated")
        try:
            return np.asarray(array[first:last])
        except Exception as error:  # zarr, numcodecs and icechunk each raise their own for a damaged chunk
            size = stored_chunk(array)
            for number in range(first // size, -(-last // size)):  # find the damaged one
                try:
                    array[number * size : min(last, (number + 1) * size)]
                except Exception as found:  # noqa: BLE001  the same
                    what = f"{self._where}: {name}, chunk {number}, is corrupt: {first_line(found)}"
                    raise StoreError(what) from error
            raise StoreError(f"{self._where}: {name} cannot be read: {first_line(error)}") from error

    def _column(self, root: Any, name: str) -> npt.NDArray[Any]:
        return self._slice(root, name, 0, root[name].shape[0])

    def _read_root(self) -> Root:
        """The arrays as they are now; of a snapshot always the same."""
        if self._at_snapshot is None:
            return Root(self._repository.readonly_session(self._branch))
        if self._root is None:
            self._root = Root(self._repository.readonly_session(snapshot_id=self._at_snapshot))
        return self._root


def array_names(root: Any) -> list[str]:
    """The arrays of a store: those of all stores first, then those that only its format or branch has."""
    return [*ARRAYS, *(name for name in (TURNS, "steps", "commits", "records", RESCORED) if name in root)]


def single_turns(ints: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """TURN_COLUMNS of rows without given tokens. ints: their INT_COLUMNS."""
    turns = np.zeros((len(ints), len(TURN_COLUMNS)))
    turns[:, TURN_COLUMNS.index("turns")] = ints[:, AT["response_tokens"]] > 0
    return turns


def stored_chunk(array: Any) -> int:
    """Elements along an array's first dimension that are stored together, in one file."""
    return int((array.shards or array.chunks)[0])


def _rows_at(path: str, snapshot: str, first: int, last: int) -> list[Ended]:
    """Rows of a store as it was at a snapshot; a function, so that it can be sent to a worker."""
    return StoreReader.at(Path(path), snapshot).rows(first, last)

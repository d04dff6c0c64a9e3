"""Reads a store at a snapshot, or the current state of a branch: commits, trajectories, columns, damage.

Reads only what is requested: `summary` reads a few numbers per commit, `commits` the records of commits but no row, and
columns are read in the requested range.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from staleflow.stores.errors import ConfigError, StoreError, StoreUnavailable, raised_as
from staleflow.stores.serialization import parse_json
from staleflow.stores.trajectories import dataframes, layout
from staleflow.stores.trajectories.column_chunks import read_arrays
from staleflow.stores.trajectories.columns import (
    COLUMNS,
    FATES,
    Column,
    Rows,
    empty_rows,
    select_columns,
    select_displayed_columns,
)
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX, COMMIT_KINDS, TEACHER_ARRAY, TOKEN_ARRAYS
from staleflow.stores.trajectories.records import RECORD_CODEC, CommitRecord, RunHeader, chain_hash
from staleflow.stores.trajectories.repository import (
    MAIN,
    branch_names,
    bucket_fails,
    one_line,
    raised_as_store_error,
    repository_at,
    store_error,
)
from staleflow.stores.trajectory import EndedTrajectory, Fate, TrajectoryId

FORMAT = "columns"
"""The layout of stores, in their attributes. A new column does not change it."""
TOKEN_POSITION_COLUMNS = ("offset", "prompt_tokens", "response_tokens")
"""Columns that say where the tokens of a row are."""
ROW_COUNT_ARRAY = "rows/trajectory"
"""The array whose length is the number of rows."""
RowTokens = tuple[dict[str, npt.NDArray[Any]], int, bytes, int]
"""What is read for some rows: tokens by name and where they begin in the store, texts and where they begin."""
RECORDS_AT_ONCE = 256
"""Records of commits read together: some 10 KB each."""
BLOCK_ROWS = 4096
"""Rows read together."""
CONCURRENT_READS = 8
"""Files of tokens that are read at a time."""
RECOMPUTED_LOGPROBS = "tokens/rescored"
"""float32 [T], on branches with logprobs: of each sampled token under another model, nats; 0 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRow:
    """A stored trajectory that cannot be read any more, and why."""

    trajectory: TrajectoryId
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedChunk:
    """A chunk that cannot be read. chunk_elements: number of elements per chunk; 0 if the whole array cannot be
    read."""

    array: str
    chunk_index: int
    chunk_elements: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCommit:
    """A commit as it is stored."""

    record: CommitRecord
    text: bytes
    """The stored JSON text of the record."""
    id_range: tuple[int, int]
    """Smallest and largest id of its trajectories, according to the table of commits; -1 and -1 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """Progress of a run, according to its store."""

    num_steps: int
    num_rows: int
    """Stored trajectories, of any fate."""
    num_tokens: int
    """Stored tokens, prompts included."""
    last_commit: CommitRecord | None
    """The latest commit; None before the first."""
    last_step: CommitRecord | None
    """The latest training step; None before the first."""

    @property
    def has_ended(self) -> bool:
        """Whether the run's end is stored."""
        return self.last_commit is not None and self.last_commit.kind == "end"


class ArrayCache:
    """The arrays of a session by name, each opened once. Raises StoreError if their metadata cannot be read.

    location: the store's path or URL, for messages.
    """

    def __init__(self, session: Any, location: str) -> None:
        self._location = location
        with self._naming_damage("the store"):
            self._group = zarr.open_group(session.store, mode="r")
        self._arrays: dict[str, Any] = {}

    @property
    def store(self) -> Any:
        return self._group.store

    @property
    def attrs(self) -> Any:
        return self._group.attrs

    def __getitem__(self, name: str) -> Any:
        if name not in self._arrays:
            with self._naming_damage(name):
                self._arrays[name] = self._group[name]
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        if name not in self._arrays:
            with self._naming_damage(name):
                try:
                    self._arrays[name] = self._group[name]
                except KeyError:
                    return False
        return True

    @contextlib.contextmanager
    def _naming_damage(self, name: str) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise StoreError(f"{self._location}: {name} is missing") from error
        except Exception as error:  # json, zarr and icechunk each raise their own for damaged metadata
            raise store_error(Path(self._location), f"{name} cannot be read", error) from error


class StoreReader:
    """A store at a snapshot, or a branch of it. Read-only, so threads may share one."""

    def __init__(self, repository: Any, *, at_snapshot: str | None, location: str, branch: str = MAIN) -> None:
        self._repository = repository
        self._at_snapshot = at_snapshot
        self._branch = branch
        self._location = location
        self._root: ArrayCache | None = None
        attributes = dict(self._read_root().attrs)
        self.first_chain_entry = chain_hash(json.dumps(attributes.get("header"), sort_keys=True).encode())
        """The chain entry before the first commit's: the hash of the store's header."""
        check_format(attributes.get("format"), location)
        with raised_as(StoreError, f"{location}: the store's header is corrupt", ValueError):
            self.header = RECORD_CODEC.decode(attributes.get("header"), RunHeader)
        self.lineage: dict[str, Any] = attributes.get("lineage", {})
        """How a branch was made; empty on the branch of the run itself. See stores/trajectories/derived_branches.py."""
        self._errors: dict[str, str] | None = attributes.get("errors")

    @classmethod
    def at(cls, path: Path, snapshot: str) -> Self:
        """Open a store as it was at a snapshot, read-only."""
        return cls(repository_at(path), at_snapshot=snapshot, location=str(path))

    # -- commits -------------------------------------------------------------------------------------------------

    def commits(self, start: int = 0, stop: int | None = None) -> list[CommitRecord]:
        """The commits at start <= number < stop, all by default, oldest first. As in slices, negative numbers count
        from the end. Reads no trajectories."""
        root = self._read_root()
        bounds = slice(start, stop).indices(self._num_commits(root))[:2]
        return [commit.record for commit in self._stored_commits(root, *bounds)]

    def stored_commits(self) -> Iterator[StoredCommit]:
        """All commits, oldest first. Raises StoreError at the first that cannot be read, or whose record differs from
        the table of commits."""
        root = self._read_root()
        count = self._num_commits(root)
        for start in range(0, count, RECORDS_AT_ONCE):
            yield from self._stored_commits(root, start, min(start + RECORDS_AT_ONCE, count))

    def chain_entry(self, step: int) -> str:
        """The entry of a training step in the run's chain (stores/auditing/chain.py). Raises StoreError."""
        root = self._read_root()
        table = self._slice(root, "commits", 0, self._num_commits(root))
        is_step = (table[:, COMMIT_COLUMN_INDEX["kind"]] == COMMIT_KINDS.index("step")) & (
            table[:, COMMIT_COLUMN_INDEX["step"]] == step
        )
        if not is_step.any():
            raise StoreError(f"{self._location}: no commit of step {step}")
        index = int(np.argmax(is_step))
        (commit,) = self._stored_commits(root, index, index + 1)
        return chain_hash(commit.text)

    @property
    def newest_chain_entry(self) -> str:
        """The chain entry of the last commit, as recorded with its snapshot; empty if none was. On a derived branch,
        that of the commit from which it was derived."""
        run_snapshot = self.lineage.get("parent", self.snapshot)
        (commit,) = itertools.islice(self._repository.ancestry(snapshot_id=run_snapshot), 1)
        return str(commit.metadata.get("entry", ""))

    def _stored_commits(self, root: Any, start: int, stop: int) -> Iterator[StoredCommit]:
        for line, text in self._commit_lines(root, start, stop):
            step = line[COMMIT_COLUMN_INDEX["step"]]
            with raised_as(StoreError, f"{self._location}: the record of step {step} is corrupt", ValueError):
                record = RECORD_CODEC.decode(parse_json(text), CommitRecord)
                if layout.record_columns(record) != (*line[:4],) or min(record.num_rows, record.num_tokens) < 0:
                    raise ValueError(f"the table of commits has {line[:4]}, it has {layout.record_columns(record)}")
            yield StoredCommit(record=record, text=text, id_range=(line[4], line[5]))

    def _commit_lines(self, root: Any, start: int, stop: int) -> Iterator[tuple[list[int], bytes]]:
        """(COMMIT_COLUMNS, record as it is stored) of the commits at start <= number < stop."""
        if start >= stop:
            return
        table = self._slice(root, "commits", start, stop).tolist()
        length = int(root["records"].shape[0])
        record_start = min(max(0, min(offset for *_, offset, _ in table)), length)
        end = min(max(record_start, *(offset + size for *_, offset, size in table)), length)
        text = self._slice(root, "records", record_start, end).tobytes()
        for line in table:
            *_, offset, size = line
            yield line, text[max(0, offset - record_start) : offset - record_start + size]

    def _num_commits(self, root: Any) -> int:
        return int(root["commits"].shape[0])

    def summary(self) -> StoreSummary:
        """Progress of the run. Reads a few numbers per commit, and the records of two."""
        root = self._read_root()
        count = self._num_commits(root)
        table = self._slice(root, "commits", 0, count)
        step_indices = np.flatnonzero(table[:, COMMIT_COLUMN_INDEX["kind"]] == COMMIT_KINDS.index("step"))
        indices = {*step_indices[-1:].tolist(), count - 1} - {-1}
        records = {int(i): next(self._stored_commits(root, i, i + 1)).record for i in indices}
        return StoreSummary(
            num_steps=len(step_indices),
            num_rows=num_rows(root),
            num_tokens=int(table[:, COMMIT_COLUMN_INDEX["tokens"]].sum()),
            last_commit=records.get(count - 1),
            last_step=records[int(step_indices[-1])] if len(step_indices) else None,
        )

    # -- trajectories --------------------------------------------------------------------------------------------

    def trajectories(self, step: int | None = None) -> Iterable[EndedTrajectory]:
        """All stored trajectories in stored order, or those that one training step consumed, in its order. Raises
        StoreError at the first that cannot be read."""
        root = self._read_root()
        if step is None:
            positions = np.arange(num_rows(root))
        else:
            outcomes = self._row_columns(root, 0, num_rows(root), ("fate", "step"))
            (positions,) = np.nonzero((outcomes["fate"] == FATES.index(Fate.CONSUMED)) & (outcomes["step"] == step))
        # In blocks: the rows of a block are adjacent in the token arrays.
        for block in (positions[i : i + BLOCK_ROWS] for i in range(0, len(positions), BLOCK_ROWS)):
            block_start = int(block[0])
            yield from self._read_trajectories(
                root, self._row_columns(root, block_start, int(block[-1]) + 1)[block - block_start]
            )

    def trajectories_in_range(self, start: int, stop: int) -> list[EndedTrajectory]:
        """The stored trajectories at positions start <= position < stop."""
        root = self._read_root()
        return list(self._read_trajectories(root, self._row_columns(root, start, stop)))

    def response_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[N] index of the first response token of each row at start <= position < stop."""
        rows = self._row_columns(self._read_root(), start, stop, ("offset", "prompt_tokens"))
        return np.asarray(rows["offset"] + rows["prompt_tokens"], np.int64)

    def trajectories_at(self, positions: Iterable[int]) -> Iterator[EndedTrajectory | UnreadableRow]:
        """The trajectories at these positions, in this order, with an UnreadableRow in place of each that is damaged.
        Ascending ones that are near each other are read together."""
        root = self._read_root()
        block: list[int] = []
        for position in positions:
            if block and not block[-1] < position < block[0] + BLOCK_ROWS:
                yield from self._trajectories_or_errors(root, block)
                block = []
            block.append(position)
        yield from self._trajectories_or_errors(root, block)

    def _trajectories_or_errors(self, root: Any, positions: Sequence[int]) -> Iterator[EndedTrajectory | UnreadableRow]:
        """`trajectories_at` for ascending positions."""
        if not positions:
            return
        first = positions[0]
        rows = self._row_columns(root, first, positions[-1] + 1)[np.asarray(positions) - first]
        try:
            yield from list(self._read_trajectories(root, rows))
            return
        except StoreUnavailable:
            raise
        except StoreError:
            pass
        for i in range(len(rows)):
            try:
                yield from self._read_trajectories(root, rows[i : i + 1])
            except StoreUnavailable:
                raise
            except StoreError as error:
                yield UnreadableRow(trajectory=TrajectoryId(int(rows["trajectory"][i])), error=str(error))

    def damaged_chunks(self) -> Iterator[DamagedChunk]:
        """All chunks that cannot be read. Reads the whole store."""
        root = self._read_root()
        for name in array_names(root):
            try:
                length, size = root[name].shape[0], elements_per_file(root[name])
            except StoreUnavailable:
                raise
            except StoreError as error:
                yield DamagedChunk(array=name, chunk_index=0, chunk_elements=0, error=str(error))
                continue
            for number in range(-(-length // size)):
                try:
                    self._slice(root, name, number * size, min(length, (number + 1) * size))
                except StoreUnavailable:
                    raise
                except StoreError as error:
                    yield DamagedChunk(array=name, chunk_index=number, chunk_elements=size, error=str(error))

    def branches(self) -> set[str]:
        """Names of all branches except the one that the run commits to."""
        return branch_names(self._repository) - {MAIN}

    @property
    def path(self) -> Path:
        """The absolute path of the store."""
        return Path(self._location).resolve()

    @property
    def snapshot(self) -> str:
        """The snapshot id this store reads from."""
        return self._at_snapshot or str(self._repository.lookup_branch(self._branch))

    def is_at_or_after(self, snapshot: str) -> bool:
        """Whether this store reads `snapshot` or a later one on its branch."""
        return any(str(ancestor.id) == snapshot for ancestor in self._repository.ancestry(snapshot_id=self.snapshot))

    def get(self, trajectory: TrajectoryId) -> EndedTrajectory | None:
        root = self._read_root()
        position = self._position(root, trajectory)
        return (
            None
            if position is None
            else next(iter(self._read_trajectories(root, self._row_columns(root, position, position + 1))))
        )

    def _position(self, root: Any, trajectory: TrajectoryId) -> int | None:
        """The position of a trajectory's row."""
        (positions,) = np.nonzero(self._column(root, ROW_COUNT_ARRAY) == trajectory)
        return int(positions[0]) if len(positions) else None

    def row_columns(self, start: int, stop: int, names: Iterable[str] | None = None) -> Rows:
        """The columns with these names, all by default, of the rows at start <= position < stop."""
        return self._row_columns(self._read_root(), start, stop, names)

    def stored_columns(
        self, start: int = 0, stop: int | None = None, names: Iterable[str] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Stored values of columns at start <= position < stop, all by default. names: the columns to read."""
        root = self._read_root()
        bounds = self._clipped_range(root, start, stop)
        return self._stored_columns(root, *bounds, select_columns(names))

    def displayed_columns(
        self, start: int = 0, stop: int | None = None, names: Iterable[str] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Values of columns as `stored_columns`, but for display: words for fate, reason and finish, no positions in
        other arrays, and response_tokens that count sampled tokens only."""
        root = self._read_root()
        bounds = self._clipped_range(root, start, stop)
        columns = select_displayed_columns(names)
        stored = self._stored_columns(
            root, *bounds, select_columns({"given_tokens", *(column.name for column in columns)})
        )
        table: dict[str, npt.NDArray[Any]] = {}
        for column in columns:
            values = stored[column.name]
            if column.name == "response_tokens":
                values = values - stored["given_tokens"]
            table[column.name] = np.asarray([m.value for m in column.members])[values] if column.members else values
        return table

    def _clipped_range(self, root: Any, start: int, stop: int | None) -> tuple[int, int]:
        size = num_rows(root)
        return min(start, size), size if stop is None else min(stop, size)

    def _row_columns(self, root: Any, start: int, stop: int, names: Iterable[str] | None = None) -> Rows:
        columns = select_columns(names)
        rows = empty_rows(stop - start, columns)
        for name, values in self._stored_columns(root, start, stop, columns).items():
            rows[name] = values
        return rows

    def _stored_columns(
        self, root: Any, start: int, stop: int, columns: Iterable[Column]
    ) -> dict[str, npt.NDArray[Any]]:
        """Columns of the rows at start <= position < stop: the fill value of those that the store does not have."""
        columns = list(columns)
        try:
            arrays = read_arrays(root.store, [column.array_name for column in columns], start, stop)
        except Exception:  # noqa: BLE001  a damaged chunk or a short array: read one by one, they are named
            arrays = {
                c.array_name: self._slice(root, c.array_name, start, stop) for c in columns if c.array_name in root
            }
        return {c.name: arrays.get(c.array_name, np.full(stop - start, c.fill, c.dtype)) for c in columns}

    def to_xarray(self) -> Any:
        """An xarray.Dataset over dimensions `trajectory` and `token`; token arrays stay on disk until computed."""
        header = self.header
        attributes: dict[str, str | int] = {"run": header.run, "snapshot": self.snapshot, "eta": header.eta}
        return dataframes.to_xarray(
            self.displayed_columns(), self.stored_columns(names=TOKEN_POSITION_COLUMNS), self._read_root(), attributes
        )

    def recomputed_logprobs(self, trajectory: TrajectoryId) -> npt.NDArray[np.float32] | None:
        """[T] logprobs of a response under another model, nats; None on branches without them (derived_branches.py)."""
        root = self._read_root()
        if RECOMPUTED_LOGPROBS not in root:
            return None
        position = self._position(root, trajectory)
        assert position is not None, "the trajectory is stored"
        row = self._row_columns(root, position, position + 1, TOKEN_POSITION_COLUMNS)[0]
        start = int(row["offset"] + row["prompt_tokens"])
        return self._slice(root, RECOMPUTED_LOGPROBS, start, start + int(row["response_tokens"]))

    def array_lengths(self) -> dict[str, int]:
        """Length of each array by name, which an audit compares with the records."""
        root = self._read_root()
        return {name: int(root[name].shape[0]) for name in array_names(root)}

    def deleted_arrays(self) -> list[str]:
        """Names of the arrays that the store had after its first commit and lacks now. Raises StoreError."""
        with raised_as_store_error(Path(self._location), "its first commit cannot be read"):
            # The oldest two are Icechunk's own, which is empty, and that of the store's creation.
            first = deque(self._repository.ancestry(snapshot_id=self.snapshot), maxlen=3)[0]
            earlier = StoreReader(self._repository, at_snapshot=str(first.id), location=self._location)
        root = self._read_root()
        return [name for name in array_names(earlier._read_root()) if name not in root]

    def read_tokens(self, rows: Rows) -> RowTokens:
        """Read the token arrays from the first to the last of these rows. rows: at least one."""
        return self._read_tokens(self._read_root(), rows)

    def _read_trajectories(self, root: Any, rows: Rows) -> Iterator[EndedTrajectory]:
        """Yield the trajectories of rows. Reads rows of different files separately, because most of a file of a small
        commit is empty, and concurrently, because a bucket answers each request after a while."""
        files = rows["offset"] // elements_per_file(root["tokens/ids"])
        parts = np.split(rows, np.flatnonzero(np.diff(files)) + 1) if len(rows) else []
        with ThreadPoolExecutor(CONCURRENT_READS) as pool:
            for part, tokens in zip(parts, pool.map(lambda part: self._read_tokens(root, part), parts), strict=True):
                yield from self.unpack(part, *tokens)

    def _read_tokens(self, root: Any, rows: Rows) -> RowTokens:
        start = int(rows["offset"].min())
        stop = int((rows["offset"] + rows["prompt_tokens"] + rows["response_tokens"]).max())
        names = ["ids", "logprobs", "versions", *([TEACHER_ARRAY] if f"tokens/{TEACHER_ARRAY}" in root else [])]
        tokens = {name: self._slice(root, f"tokens/{name}", start, stop) for name in names}
        text_start = int(rows["text_offset"].min())
        text_stop = int((rows["text_offset"] + rows["text_bytes"]).max())
        return tokens, start, self._slice(root, "text", text_start, text_stop).tobytes(), text_start

    def fingerprint_rows(self, start: int, stop: int) -> str:
        """Hash the rows of a commit, at start <= position < stop, as they are read now; empty if there are none. Raises
        StoreError."""
        root = self._read_root()
        rows = self._row_columns(root, start, stop)
        if not len(rows):
            return ""
        tokens, token_start, text, _ = self._read_tokens(root, rows)
        mask = self._slice(root, "tokens/mask", token_start, token_start + len(tokens["ids"]))
        return layout.fingerprint_rows({**tokens, "mask": mask}, rows, text)

    def token_masks(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Loss masks of the tokens at start <= token < stop. An audit compares them with the masks of rows."""
        return self._slice(self._read_root(), "tokens/mask", start, stop)

    def unpack(
        self,
        rows: Rows,
        tokens: Mapping[str, npt.NDArray[Any]],
        start: int,
        text: bytes,
        text_start: int,
    ) -> Iterator[EndedTrajectory]:
        """Rebuild trajectories from their rows and the result of `read_tokens`. Raises StoreError if they contradict
        each other."""
        names = rows.dtype.names or ()
        for values in rows.tolist():
            row = layout.unpack(dict(zip(names, values, strict=True)), tokens, start, text, text_start)
            if self._errors is not None:
                error = self._errors.get(str(row.trajectory.id), "")
                row = replace(row, trajectory=replace(row.trajectory, error=error, reward_parts={}))
            yield row

    def _slice(self, root: Any, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        array = root[name]
        if start < 0:  # an array would count it from its end
            raise StoreError(f"{self._location}: a row begins at {start} of {name}: its numbers are corrupt")
        if stop > array.shape[0]:
            raise StoreError(f"{self._location}: {name} has {array.shape[0]} elements, a row needs {stop}: truncated")
        try:
            return np.asarray(array[start:stop])
        except Exception as error:  # zarr, numcodecs and icechunk each raise their own for a damaged chunk
            if bucket_fails(Path(self._location), error):
                raise store_error(Path(self._location), f"{name} cannot be read", error) from error
            size = elements_per_file(array)
            for number in range(start // size, -(-stop // size)):  # find the damaged one
                try:
                    array[number * size : min(stop, (number + 1) * size)]
                except Exception as first_error:  # noqa: BLE001  the same
                    message = f"{self._location}: {name}, chunk {number}, is corrupt: {one_line(first_error)}"
                    raise StoreError(message) from error
            raise StoreError(f"{self._location}: {name} cannot be read: {one_line(error)}") from error

    def _column(self, root: Any, name: str) -> npt.NDArray[Any]:
        return self._slice(root, name, 0, root[name].shape[0])

    def _read_root(self) -> ArrayCache:
        """The arrays as they are now; of a snapshot always the same."""
        try:
            if self._at_snapshot is None:
                return ArrayCache(self._repository.readonly_session(self._branch), self._location)
            if self._root is None:
                session = self._repository.readonly_session(snapshot_id=self._at_snapshot)
                self._root = ArrayCache(session, self._location)
            return self._root
        except icechunk.IcechunkError as error:
            raise store_error(Path(self._location), "the store cannot be read", error) from error


def check_format(format: object, location: str) -> None:
    """Raise ConfigError if the format of a store is not the supported one. format: as in the store's attributes."""
    if format != FORMAT:
        raise ConfigError(f"{location}: store format {format!r}, this version reads {FORMAT!r}")


def num_rows(root: Any) -> int:
    """Number of stored trajectories."""
    return int(root[ROW_COUNT_ARRAY].shape[0])


def array_names(root: Any) -> list[str]:
    """Names of the arrays that a store has or needs. Columns added after it was created, a teacher's logprobs, and
    logprobs under other weights, may be absent."""
    needed_arrays = [*(f"tokens/{name}" for name in TOKEN_ARRAYS), ROW_COUNT_ARRAY, "text", "commits", "records"]
    optional_arrays = (*(column.array_name for column in COLUMNS), f"tokens/{TEACHER_ARRAY}", RECOMPUTED_LOGPROBS)
    return needed_arrays + [name for name in optional_arrays if name in root and name not in needed_arrays]


def elements_per_file(array: Any) -> int:
    """Number of elements along the first dimension of an array that are stored in one file."""
    return int((array.shards or array.chunks)[0])

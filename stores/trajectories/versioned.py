"""The trajectory store on Zarr v3 and Icechunk: each commit is an atomic snapshot, and every earlier step stays
readable.

Layout (one row per trajectory; its prompt and response are adjacent in the flat token arrays):

    tokens/ids        int32   [T]      prompt tokens, then response tokens, row after row
    tokens/logprobs   float32 [T]      behaviour logprob, nats; 0 at prompt tokens and given ones
    tokens/versions   int32   [T]      policy version that sampled the token; -1 at prompt tokens and given ones
    tokens/mask       uint8   [T]      1 where the loss applies
    tokens/teacher    float32 [T]      logprob under the reference model, nats; NaN where no teacher computed one. Only
                                       in stores with such a token
    rows/NAME                 [R]      a column for each name in stores/trajectories/columns.py
    text              uint8   [B]      JSON: spans, reward parts and errors of rows
    commits           int64   [S, 8]   COMMIT_COLUMNS: numbers needed to list and resume a run
    records           uint8   [C]      JSON: step records

Each commit's tokens start at the boundary of a file, so that appending never rewrites a file (docs/store.md has the
sizes and speed). There is one committer, because on a local file system Icechunk is not safe with several.
It finds which trajectories are stored already before each commit, so that none is stored twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from staleflow.stores.errors import ConfigError, StoreError, StoreUnavailable, raised_as
from staleflow.stores.id_sets import IdSet, Ints
from staleflow.stores.trajectories import layout
from staleflow.stores.trajectories.column_chunks import CHUNK_CODEC, append_to_arrays
from staleflow.stores.trajectories.columns import COLUMNS, Column
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX, COMMIT_COLUMNS, TEACHER_ARRAY, TOKEN_ARRAYS
from staleflow.stores.trajectories.reader import FORMAT, ROW_COUNT_ARRAY, StoreReader, elements_per_file, num_rows
from staleflow.stores.trajectories.records import EMPTY_LEDGER, RECORD_CODEC, CommitRecord, RunHeader, chain_hash
from staleflow.stores.trajectories.repository import (
    CREATED,
    MAIN,
    branch_names,
    creating_repository,
    lock_head,
    one_line,
    open_repository,
    raised_as_store_error,
    step_snapshot,
    temporary_branch,
    url_of,
)
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.stores.weights.weight_report import WeightCheck

TOKEN_CHUNK = 131_072
"""Elements compressed together, 512 KiB. Reading a trajectory decompresses at least this."""
TOKEN_FILE = 8 * TOKEN_CHUNK
"""Elements of a token array per file, 4 MiB: a million tokens are three files. The last file of a commit is shorter."""
TEXT_CHUNK = 65_536
"""Bytes of JSON compressed together."""
ROW_CHUNK = 4096
"""Rows of a column compressed together, some kilobytes. A commit of few rows rewrites this much of each column."""
COMMIT_CHUNK = 1024
"""Commits whose numbers are compressed together."""


class VersionedStore(StoreReader):
    """An append-only store. One owner commits, anyone may read. Use `create` or `open` to commit, and `open` with
    `at_step` to read an earlier step."""

    def __init__(self, repository: Any, *, at_snapshot: str | None, location: str, branch: str = MAIN) -> None:
        # The expected head of the next commit: there is one committer, and it knows its last commit.
        self._head = str(repository.lookup_branch(branch)) if at_snapshot is None else at_snapshot
        super().__init__(repository, at_snapshot=at_snapshot, location=location, branch=branch)
        self._ids: StoredIds | None = None
        """Loaded by the first commit, and again after a failed one."""
        self._entry = ""
        """Chain entry of the last commit, loaded with `_ids`."""
        self._has_new_columns = False
        """Whether a commit has created columns that were added after the store was created."""
        self._failed = False
        """Whether the last commit failed; it may have been applied nevertheless."""

    @classmethod
    def create(cls, path: Path, header: RunHeader) -> Self:
        """Create an empty store atomically, in a folder or in the bucket that the header names."""
        if path.exists():
            raise StoreError(f"{path}: the store cannot be created: there is one already")
        with (
            raised_as_store_error(path, "the store cannot be created"),
            creating_repository(path, header.url, header.job) as repository,
        ):
            session = repository.writable_session(MAIN)
            root = zarr.open_group(session.store, mode="w", zarr_format=3)
            create_arrays(root, RECORD_CODEC.encode(header))
            session.commit(CREATED, metadata={"kind": CREATED})
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, at_step: int | None = None, branch: str = MAIN) -> Self:
        """Open a store in its current state; or read-only at the commit of training step `at_step`, or on another
        branch."""
        return cls._open(
            path, branch, lambda repository: None if at_step is None else step_snapshot(repository, at_step, path)
        )

    @classmethod
    def open_pinned(cls, path: Path, branch: str = MAIN) -> Self:
        """Open a branch read-only at its current snapshot; later commits are not seen."""
        return cls._open(path, branch, lambda repository: str(repository.lookup_branch(branch)))

    @classmethod
    def _open(cls, path: Path, branch: str, snapshot: Callable[[Any], str | None]) -> Self:
        if not path.exists():
            raise ConfigError(f"{path}: no store here; `staleflow store ls` lists the runs there are")
        with raised_as_store_error(path, "the store cannot be opened"):
            repository = open_repository(path)
            if branch not in (branches := branch_names(repository)):
                raise ConfigError(f"{path}: no branch {branch!r}; there are {', '.join(sorted(branches))}")
            return cls(repository, at_snapshot=snapshot(repository), location=str(path), branch=branch)

    @classmethod
    def rewind(cls, path: Path, num_steps: int, *, undo_end: bool = False) -> int:
        """Reset the store to its first `num_steps` training steps. Returns the number of undone steps.

        Undone steps stay readable on a branch named after their last commit. Kept are the checks of instances that were
        taken out of service, and of weights of versions 1 to `num_steps`. If it is interrupted, it can be repeated.

        Args:
            path: Path of the store.
            num_steps: Training steps to keep.
            undo_end: Also undo the end of a run that no step followed, with the work that it discarded.

        Raises:
            StoreError: Fewer steps are stored, or the store cannot be read or written.
        """
        num_undone, has_ended = 0, False
        with raised_as_store_error(path, f"cannot be set back to its first {num_steps} steps"):
            repository = open_repository(path)
            with lock_head(path):
                for snapshot in repository.ancestry(branch=MAIN):
                    kind, step = snapshot.metadata.get("kind"), snapshot.metadata.get("step")
                    if kind == CREATED or (kind == "step" and step == num_steps - 1):
                        break
                    num_undone += kind == "step"
                    has_ended |= kind == "end"
                if kind == CREATED and num_steps > num_undone:
                    raise StoreError(f"{path}: cannot be set back to {num_steps} steps: {num_undone} are stored")
                if num_undone or (has_ended and undo_end):
                    head = repository.lookup_branch(MAIN)
                    if f"undone-{head}" not in repository.list_branches():  # an interrupted attempt may have made it
                        repository.create_branch(f"undone-{head}", head)
                    kept_checks = _checks_to_keep(cls.open(path).commits(), num_steps)
                    with temporary_branch(repository, str(snapshot.id)) as branch:
                        if kept_checks:
                            cls(repository, at_snapshot=None, location=str(path), branch=branch)._commit_weight_checks(
                                kept_checks
                            )
                        repository.reset_branch(MAIN, repository.lookup_branch(branch))
        return num_undone

    def _commit_weight_checks(self, weight_checks: tuple[WeightCheck, ...]) -> None:
        """Commit checks of undone steps again."""
        last_records = self.commits(-1)
        ledger = last_records[0].ledger if last_records else EMPTY_LEDGER
        record = CommitRecord(kind="refusal", step=ledger.next_step, ledger=ledger, weight_checks=weight_checks)
        self._append_and_commit(record, [], _digest(record, []))

    # -- writing -------------------------------------------------------------------------------------------------

    def commit(self, record: CommitRecord, rows: Sequence[EndedTrajectory]) -> str:
        """Store a step and the trajectories that ended since the last commit, all or nothing. Returns the snapshot.
        Sets the record's num_rows, num_tokens, rows_fingerprint and previous.

        Raises:
            StoreError: Nothing was stored.
            StoreUnavailable: The bucket failed. The same commit may be repeated, and is applied only once.
        """
        if not self._may_commit:
            raise StoreError(f"{self._location}: {self._branch} was opened read-only")
        ids = [e.trajectory.id for e in rows]
        path, digest = Path(self._location), _digest(record, ids)
        try:
            with lock_head(path):
                if self._failed:  # credentials are read when a repository is opened
                    self._repository = open_repository(path)
                snapshot = self._applied_snapshot(digest) or self._append_and_commit(record, rows, digest)
        except StoreError as error:
            self._failed, self._ids = isinstance(error, StoreUnavailable), None
            raise
        except Exception as error:  # zarr raises errors of its own if Icechunk cannot read
            # The session is dropped: data written before the failure belong to no snapshot.
            self._failed, self._ids = True, None
            problem = f"{path}: {record.kind} {record.step} could not be stored"
            if url := url_of(path):
                raise StoreUnavailable(f"{problem}: {url} does not take it: {one_line(error)}") from error
            raise StoreError(
                f"{problem}: {one_line(error)}; free space or move runs_dir; everything before this commit is stored"
            ) from error
        self._failed = False
        self._head = snapshot
        self._has_new_columns |= bool(ids)
        return snapshot

    def _applied_snapshot(self, digest: str) -> str:
        """The snapshot of the commit if an earlier attempt was applied, which failed here or was made by the trajectory
        server before this one; empty otherwise. Raises StoreError if another process has moved the branch, because
        Icechunk would silently lose one of two commits on a local file system."""
        head = str(self._repository.lookup_branch(MAIN))
        if head == self._head:
            return ""
        newest = next(iter(self._repository.ancestry(snapshot_id=head)))
        if str(newest.parent_id) == self._head and newest.metadata.get("digest") == digest:
            self._ids = None
            return head
        raise StoreError(
            f"{self._location}: another process has committed since ({head}, not {self._head}): the run was "
            "resumed elsewhere, and this is no longer its store"
        )

    def _append_and_commit(self, record: CommitRecord, rows: Sequence[EndedTrajectory], digest: str) -> str:
        """Append the rows and the record, and commit. Returns the snapshot."""
        session = self._repository.writable_session(self._branch)
        root = zarr.open_group(session.store, mode="r+")
        if self._ids is None:
            self._ids, self._entry = self._stored_ids(root), self._last_entry(root)
        duplicates = self._ids.add(np.asarray([e.trajectory.id for e in rows], np.int64))
        if len(duplicates):
            raise StoreError(f"{self._location}: trajectory {duplicates[0]} would be stored twice")
        stored, entry = self._append(root, record, rows)
        numbers = {"kind": record.kind, "step": record.step, "rows": stored.num_rows, "tokens": stored.num_tokens}
        hashes = {"digest": digest, "entry": entry}
        snapshot = str(session.commit(f"{record.kind} {record.step}", metadata=numbers | hashes))
        self._entry = entry
        return snapshot

    @property
    def _may_commit(self) -> bool:
        return self._branch == MAIN and self._at_snapshot is None

    def _stored_ids(self, root: Any) -> StoredIds:
        table = np.asarray(root["commits"][:])
        ends = np.cumsum(table[:, COMMIT_COLUMN_INDEX["rows"]])
        ids = table[:, [COMMIT_COLUMN_INDEX["first_id"], COMMIT_COLUMN_INDEX["last_id"]]]
        row_ranges = np.stack([ends - table[:, COMMIT_COLUMN_INDEX["rows"]], ends], axis=1)

        def read(start: int, stop: int) -> npt.NDArray[np.int64]:
            return self._slice(root, ROW_COUNT_ARRAY, start, stop)

        return StoredIds(np.concatenate([ids, row_ranges], axis=1), read)

    def _last_entry(self, root: Any) -> str:
        count = self._num_commits(root)
        return next(
            (chain_hash(text) for _, text in self._commit_lines(root, max(0, count - 1), count)), self.first_chain_entry
        )

    def _append(self, root: Any, record: CommitRecord, rows: Sequence[EndedTrajectory]) -> tuple[CommitRecord, str]:
        """Append a commit's rows and its record. Returns the record as stored, and its entry in the chain."""
        file_elements = elements_per_file(root["tokens/ids"])
        start = -(-int(root["tokens/ids"].shape[0]) // file_elements) * file_elements
        text_start = int(root["text"].shape[0])
        problem = f"{self._location}: {record.kind} {record.step} has a value that cannot be stored"
        with raised_as(StoreError, problem, ArithmeticError, TypeError, ValueError, describe=one_line):
            arrays = layout.pack(rows, start, text_start)
        end = start + arrays.num_tokens
        new_values: dict[str, npt.NDArray[Any]] = {}
        if arrays.num_tokens:
            if TEACHER_ARRAY in arrays.tokens and f"tokens/{TEACHER_ARRAY}" not in root:
                _create_token_array(root, TEACHER_ARRAY, "float32", fill=np.nan)
            if f"tokens/{TEACHER_ARRAY}" in root:
                root[f"tokens/{TEACHER_ARRAY}"].resize((end,))  # of tokens that are not written it reads NaN
            for name, values in arrays.tokens.items():
                array = root[f"tokens/{name}"]
                array.resize((end,))
                array[start:end] = values
        if len(rows):
            if not self._has_new_columns:
                before = num_rows(root)
                for column in COLUMNS:
                    _ensure_column(root, column, before)
            new_values |= {column.array_name: arrays.rows[column.name] for column in COLUMNS}
        if arrays.text:
            new_values["text"] = np.frombuffer(arrays.text, np.uint8)
        stored = replace(
            record,
            num_rows=len(rows),
            num_tokens=arrays.num_tokens,
            rows_fingerprint=layout.fingerprint_rows(arrays.tokens, arrays.rows, arrays.text) if len(rows) else "",
            previous=self._entry,
        )
        text = json.dumps(RECORD_CODEC.encode(stored), separators=(",", ":")).encode()
        append_to_arrays(root.store, new_values | _pack_record(root, stored, text, arrays.rows["trajectory"]))
        return stored, chain_hash(text)


def _checks_to_keep(records: Sequence[CommitRecord], num_steps: int) -> tuple[WeightCheck, ...]:
    """Checks after the first `num_steps` training steps of weights that may have sampled work which a resumed run
    continues, and of instances taken out of service. Those of the base model are made again at each start."""
    start = next((i + 1 for i, r in enumerate(records) if (r.kind, r.step) == ("step", num_steps - 1)), 0)
    checks = (check for record in records[start:] for check in record.weight_checks)
    return tuple(check for check in checks if check.refused or 0 < check.version <= num_steps)


def _digest(record: CommitRecord, ids: Sequence[int]) -> str:
    """Identify a commit: 32 hex digits of its record and its trajectories."""
    text = json.dumps([RECORD_CODEC.encode(record), list(ids)], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _pack_record(
    root: Any, record: CommitRecord, text: bytes, ids: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[Any]]:
    """The values that a commit appends to `commits` and `records`. text: the encoded record. ids: ids of its
    trajectories."""
    numbers = [*layout.record_columns(record), *layout.id_range(ids), root["records"].shape[0], len(text)]
    return {"records": np.frombuffer(text, np.uint8), "commits": np.asarray([numbers], np.int64)}


def create_arrays(root: Any, header: Any) -> None:
    """Create the arrays of an empty store. header: the encoded header."""
    root.attrs.update({"format": FORMAT, "header": header})
    for name, dtype in TOKEN_ARRAYS.items():
        _create_token_array(root, name, dtype)
    for column in COLUMNS:
        _ensure_column(root, column, 0)
    _create_array(root, "text", (0,), (TEXT_CHUNK,), "uint8")
    _create_array(root, "commits", (0, len(COMMIT_COLUMNS)), (COMMIT_CHUNK, len(COMMIT_COLUMNS)), "int64")
    _create_array(root, "records", (0,), (TEXT_CHUNK,), "uint8")


def _create_token_array(root: Any, name: str, dtype: str, *, fill: float = 0) -> None:
    _create_array(root, f"tokens/{name}", (0,), (TOKEN_CHUNK,), dtype, file_elements=TOKEN_FILE, fill=fill)


def _ensure_column(root: Any, column: Column, count: int) -> None:
    """Create the array of a column that was added after the store was created. count: number of rows in the store."""
    if column.array_name not in root:
        _create_array(root, column.array_name, (count,), (ROW_CHUNK,), column.dtype, fill=column.fill)


def _create_array(
    root: Any,
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str,
    *,
    file_elements: int | None = None,
    fill: int | float | bool = 0,
) -> None:
    """Create an array. file_elements: elements per file, if a file has several chunks. fill: value of elements not
    written."""
    dimensions = (name.replace("/", "_"), "column")[: len(shape)]
    # Both have a checksum, which is verified at every read.
    codecs = [CHUNK_CODEC] if file_elements is None else [BloscCodec(cname="zstd", clevel=1), Crc32cCodec()]
    shards = None if file_elements is None else (file_elements,)
    root.create_array(
        name, shape=shape, chunks=chunks, shards=shards, dtype=dtype, compressors=codecs, fill_value=fill,
        dimension_names=dimensions,
    )  # fmt: skip


class StoredIds:
    """The ids of a store's trajectories. Those of a commit are read once an id in its range is added.

    Args:
        commits: [S, 4] smallest and largest id of each commit, and the half-open range of its rows.
        read: read(start, stop) returns the ids of these rows.
    """

    def __init__(self, commits: Ints, read: Callable[[int, int], Ints]) -> None:
        self._unread_commits = commits[commits[:, 2] < commits[:, 3]]
        self._read_ids = read
        self._ids = IdSet()

    def add(self, ids: Ints) -> Ints:
        """Add the ids of a commit. Returns those that are stored already or occur twice, in ascending order."""
        if not len(ids):
            return ids
        overlap = (self._unread_commits[:, 0] <= ids.max()) & (self._unread_commits[:, 1] >= ids.min())
        for _, _, start, stop in self._unread_commits[overlap].tolist():
            self._ids.add(self._read_ids(start, stop))
        self._unread_commits = self._unread_commits[~overlap]
        return self._ids.add(ids)

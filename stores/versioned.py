"""The trajectory store on Zarr v3 and Icechunk: commits are atomic snapshots, and every earlier step stays readable.

Layout (one row per trajectory; its prompt and response are adjacent in the flat token arrays):

    tokens/ids        int32   [T]      prompt tokens, then response tokens, row after row
    tokens/logprobs   float32 [T]      behaviour logprob, nats; 0 at prompt tokens
    tokens/versions   int32   [T]      policy version that sampled the token; -1 at prompt tokens
    tokens/mask       uint8   [T]      1 where the loss applies
    rows/int          int64   [R, 16]  INT_COLUMNS
    rows/float        float32 [R, 6]   FLOAT_COLUMNS
    text              uint8   [B]      JSON: segments, reward parts and errors of rows, and step records
    steps             int64   [S, 3]   kind and step, offset and length of the record in `text`

Each commit's tokens start at a chunk boundary, so that appending never rewrites a chunk (facts of the layout and its
speed: docs/store.md). There is one committer; with several, Icechunk would not be safe on a local file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec

from stores import frames, layout
from stores.base import CODEC, RunHeader, StepRecord
from stores.errors import ConfigError, StoreError
from stores.files import publish
from stores.layout import AT, FATES, FINISHES, FLOAT_COLUMNS, INT_COLUMNS, REASONS, TOKEN_ARRAYS
from stores.trajectory import Ended, Fate, TrajectoryId

if "ICECHUNK_LOG" not in os.environ:
    # At each opening it warns that several committers on a local disk lose commits; a run has only one.
    icechunk.set_logs_filter("error")

FORMAT = 1
"""Version of the layout, raised whenever code for the old layout would misread the new one."""

MAIN = "main"
"""The branch that a run commits to."""
INCOMPLETE = "part-"
"""Prefix of the names of incomplete branches, which are never listed."""
TOKEN_CHUNK = 65_536
"""Elements per token chunk, 256 KiB: one commit of a small job."""


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


class VersionedStore:
    """See stores/base.py for the contract. Opened with `create`, `open` (the committer) or `open` with `at_step`."""

    def __init__(self, repository: Any, *, at_snapshot: str | None, where: str, branch: str = MAIN) -> None:
        self._repository = repository
        self._at_snapshot = at_snapshot
        self._branch = branch
        self._where = where
        # The snapshot that the next commit must find: there is one committer, and it knows its last commit.
        self._head = str(repository.lookup_branch(branch)) if at_snapshot is None else at_snapshot
        root = self._read_root(self._head)
        attributes = dict(root.attrs)
        if attributes.get("format") != FORMAT:
            raise ConfigError(f"{where}: store format {attributes.get('format')!r}, this version reads {FORMAT}")
        try:
            self.header = CODEC.decode(attributes.get("header"), RunHeader)
        except ValueError as error:
            raise StoreError(f"{where}: the store's header is corrupt: {error}") from error
        self.lineage: dict[str, Any] = attributes.get("lineage", {})
        """How a branch was made; empty on the branch of the run itself. See stores/branches.py."""
        self._errors: dict[str, str] | None = attributes.get("errors")
        # Where the next commit appends; valid because there is one committer.
        self._num_tokens = int(root["tokens/ids"].shape[0])
        # One byte per trajectory id (ids are dense), set once it is stored, to refuse duplicates.
        self._stored = bytearray()
        if self._commits:
            self._mark(self._column(root, "rows/int")[:, AT["trajectory"]].tolist())

    @classmethod
    def create(cls, path: Path, header: RunHeader) -> VersionedStore:
        """Create an empty store, atomically: a kill in between leaves only a folder of another name."""
        if path.exists():
            raise StoreError(f"{path}: the store cannot be created: there is one already")
        part = path.with_name(f".{path.name}.part")
        try:
            if part.exists():
                shutil.rmtree(part)
            repository = icechunk.Repository.create(_storage(part), config=_config())
            session = repository.writable_session("main")
            root = zarr.open_group(session.store, mode="w", zarr_format=3)
            root.attrs.update({"format": FORMAT, "header": CODEC.encode(header)})
            for name, dtype in TOKEN_ARRAYS.items():
                _array(root, f"tokens/{name}", (0,), (TOKEN_CHUNK,), dtype)
            _array(root, "rows/int", (0, len(INT_COLUMNS)), (1024, len(INT_COLUMNS)), "int64")
            _array(root, "rows/float", (0, len(FLOAT_COLUMNS)), (1024, len(FLOAT_COLUMNS)), "float32")
            _array(root, "text", (0,), (TOKEN_CHUNK,), "uint8")
            _array(root, "steps", (0, 3), (1024, 3), "int64")
            session.commit("created", metadata={"kind": "created"})
            publish(part, path)
        except (icechunk.IcechunkError, OSError) as error:
            raise StoreError(f"{path}: the store cannot be created: {_first_line(error)}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, at_step: int | None = None, branch: str = MAIN) -> VersionedStore:
        """Open a store as it is now; read-only, as it was when training step `at_step` was committed, or another
        branch of it."""
        return cls._opened(
            path, branch, lambda repository: None if at_step is None else _snapshot_of(repository, at_step, path)
        )

    @classmethod
    def pinned(cls, path: Path, branch: str = MAIN) -> VersionedStore:
        """Open a branch read-only at its present snapshot, where it stays. Quicker than `open` on a large store, whose
        ids it does not read."""
        return cls._opened(path, branch, lambda repository: str(repository.lookup_branch(branch)))

    @classmethod
    def _opened(cls, path: Path, branch: str, snapshot: Callable[[Any], str | None]) -> VersionedStore:
        if not path.is_dir():
            raise ConfigError(f"{path}: no store here; `staleflow store ls` lists the runs there are")
        try:
            repository = icechunk.Repository.open(_storage(path), config=_config())
            if branch not in (branches := branch_names(repository)):
                raise ConfigError(f"{path}: no branch {branch!r}; there are {', '.join(sorted(branches))}")
            return cls(repository, at_snapshot=snapshot(repository), where=str(path), branch=branch)
        except (icechunk.IcechunkError, OSError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise StoreError(f"{path}: the store cannot be opened: {_first_line(error)}") from error

    @classmethod
    def at(cls, path: Path, snapshot: str) -> VersionedStore:
        """Open a store as it was at a snapshot, read-only."""
        return cls(repository_at(path), at_snapshot=snapshot, where=str(path))

    @classmethod
    def rewind(cls, path: Path, num_steps: int) -> int:
        """Reset the store to its first `num_steps` training steps; returns the number of steps undone. They stay
        readable on a branch named after their last commit."""
        undone = 0
        try:
            repository = icechunk.Repository.open(_storage(path), config=_config())
            with _locked(path):
                for snapshot in repository.ancestry(branch="main"):
                    kind, step = snapshot.metadata.get("kind"), snapshot.metadata.get("step")
                    if kind == "created" or (kind == "step" and step == num_steps - 1):
                        break
                    undone += kind == "step"
                if undone:
                    head = repository.lookup_branch("main")
                    repository.create_branch(f"undone-{head}", head)
                    repository.reset_branch("main", snapshot.id)
        except (icechunk.IcechunkError, OSError) as error:
            raise StoreError(
                f"{path}: cannot be set back to its first {num_steps} steps: {_first_line(error)}"
            ) from error
        return undone

    # -- writing -------------------------------------------------------------------------------------------------

    def commit(self, record: StepRecord, ended: Sequence[Ended]) -> str:
        if not self._commits:
            raise StoreError(f"{self._where}: {self._branch} was opened read-only")
        ids = [e.trajectory.id for e in ended]
        twice = [i for i in ids if i < len(self._stored) and self._stored[i]]
        if twice or len(set(ids)) < len(ids):
            raise StoreError(f"{self._where}: trajectory {(twice or ids)[0]} would be stored twice")
        try:
            with self._exclusive():
                session = self._repository.writable_session(MAIN)
                root = zarr.open_group(session.store, mode="r+")
                num_tokens, end = self._append(root, record, ended)
                kind = {"kind": record.kind, "step": record.step, "rows": len(ended), "tokens": num_tokens}
                snapshot: str = session.commit(f"{record.kind} {record.step}", metadata=kind)
        except StoreError:
            raise
        except (icechunk.IcechunkError, OSError) as error:
            # The session is dropped: what was written before the failure belongs to no snapshot.
            raise StoreError(
                f"{self._where}: {record.kind} {record.step} could not be stored: {_first_line(error)}; "
                "free space or move runs_dir; everything before this commit is stored"
            ) from error
        self._head = snapshot
        self._num_tokens = end
        self._mark(ids)
        return snapshot

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the store for a commit. Raises StoreError if the branch is not where this committer left it: on a local
        file system Icechunk would silently lose one of two commits."""
        with _locked(Path(self._where)):
            head = str(self._repository.lookup_branch(MAIN))
            if head != self._head:
                raise StoreError(
                    f"{self._where}: another process has committed since ({head}, not {self._head}): the run was "
                    "resumed elsewhere, and this is no longer its store"
                )
            yield

    @property
    def _commits(self) -> bool:
        return self._branch == MAIN and self._at_snapshot is None

    def _mark(self, ids: Sequence[int]) -> None:
        self._stored.extend(bytes(max(0, max(ids, default=-1) + 1 - len(self._stored))))
        for i in ids:
            self._stored[i] = 1

    def _append(self, root: Any, record: StepRecord, ended: Sequence[Ended]) -> tuple[int, int]:
        begin = -(-self._num_tokens // TOKEN_CHUNK) * TOKEN_CHUNK
        text_begin = int(root["text"].shape[0])
        packed = layout.pack(ended, begin, text_begin)
        offset = begin + packed.num_tokens
        num_tokens = packed.num_tokens
        if num_tokens:
            for name, values in packed.tokens.items():
                array = root[f"tokens/{name}"]
                array.resize((offset,))
                array[begin:offset] = values
        if len(ended):
            root["rows/int"].append(packed.ints)
            root["rows/float"].append(packed.floats)
        filled = replace(record, num_rows=len(ended), num_tokens=num_tokens)
        document = json.dumps(CODEC.encode(filled), separators=(",", ":")).encode()
        place = np.asarray([[record.step, text_begin + len(packed.text), len(document)]], np.int64)
        root["text"].append(np.frombuffer(packed.text + document, np.uint8))
        root["steps"].append(place)
        return num_tokens, (offset if num_tokens else self._num_tokens)

    # -- reading -------------------------------------------------------------------------------------------------

    def steps(self, first: int = 0) -> list[StepRecord]:
        """All commits, oldest first, but for the `first` ones; these are not read."""
        root = self._read_root()
        places = self._slice(root, "steps", first, root["steps"].shape[0]).tolist()
        if not places:
            return []
        begin = places[0][1]
        text = self._slice(root, "text", begin, root["text"].shape[0]).tobytes()
        records = []
        for step, offset, size in places:
            try:
                records.append(CODEC.decode(json.loads(text[offset - begin : offset - begin + size]), StepRecord))
            except ValueError as error:
                raise StoreError(f"{self._where}: the record of step {step} is corrupt: {error}") from error
        return records

    def ended(self, step: int | None = None) -> Iterable[Ended]:
        root = self._read_root()
        ints = self._column(root, "rows/int")
        at = np.arange(len(ints))
        if step is not None:
            consumed = ints[:, AT["fate"]] == FATES.index(Fate.CONSUMED)
            at = at[consumed & (ints[:, AT["step"]] == step)]
        floats = self._column(root, "rows/float")
        # In blocks: the rows of a block are adjacent in the token arrays.
        for block in (at[i : i + 4096] for i in range(0, len(at), 4096)):
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
        for name in self.array_lengths():
            length, size = root[name].shape[0], root[name].chunks[0]
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
        root = self._read_root()
        size = root["rows/int"].shape[0]
        first, last = min(first, size), size if last is None else min(last, size)
        ints = self._slice(root, "rows/int", first, last)
        floats = self._slice(root, "rows/float", first, last)
        columns: dict[str, npt.NDArray[Any]] = {name: ints[:, i] for i, name in enumerate(INT_COLUMNS)}
        return columns | {name: floats[:, i] for i, name in enumerate(FLOAT_COLUMNS)}

    def columns(self, first: int = 0, last: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """As `table`, for display: fate, reason and finish in words, without the columns of the layout."""
        table = self.table(first, last)
        for name, members in (("fate", FATES), ("reason", REASONS), ("finish", FINISHES)):
            table[name] = np.asarray([m.value for m in members])[table[name]]
        return {name: column for name, column in table.items() if name not in ("offset", "text_offset", "text_bytes")}

    def to_dask(self, block_rows: int = 512) -> Any:
        """A dask.dataframe with one row per trajectory, tokens included, read in blocks on the workers."""
        read = functools.partial(_rows_at, str(self.path), self.snapshot)
        return frames.to_dask(len(self.table()["trajectory"]), block_rows, read)

    def to_xarray(self) -> Any:
        """An xarray.Dataset over dimensions `trajectory` and `token`; token arrays stay on disk until computed."""
        attributes = {"run": self.header.run, "eta": self.header.eta, "snapshot": self.snapshot}
        return frames.to_xarray(self.columns(), self.table()["offset"], self._read_root(), attributes)

    def rescored(self, trajectory: TrajectoryId) -> npt.NDArray[np.float32] | None:
        """[T] logprobs of a response under another model, nats; None on branches without (see stores/branches.py)."""
        root = self._read_root()
        if "tokens/rescored" not in root:
            return None
        ints = self._column(root, "rows/int")
        (at,) = np.nonzero(ints[:, AT["trajectory"]] == trajectory)
        begin = int(ints[at[0], AT["offset"]] + ints[at[0], AT["prompt_tokens"]])
        return self._slice(root, "tokens/rescored", begin, begin + int(ints[at[0], AT["response_tokens"]]))

    def array_lengths(self) -> dict[str, int]:
        """Length of each array, by name; an audit compares them with the records."""
        root = self._read_root()
        names = [*(f"tokens/{n}" for n in TOKEN_ARRAYS), "rows/int", "rows/float", "text", "steps"]
        return {name: int(root[name].shape[0]) for name in names}

    def _block(self, root: Any, ints: npt.NDArray[Any], floats: npt.NDArray[Any]) -> Iterable[Ended]:
        if not len(ints):
            return
        first = int(ints[:, AT["offset"]].min())
        sizes = ints[:, AT["prompt_tokens"]] + ints[:, AT["response_tokens"]]
        last = int((ints[:, AT["offset"]] + sizes).max())
        tokens = {name: self._slice(root, f"tokens/{name}", first, last) for name in ("ids", "logprobs", "versions")}
        text_first = int(ints[:, AT["text_offset"]].min())
        text_last = int((ints[:, AT["text_offset"]] + ints[:, AT["text_bytes"]]).max())
        text = self._slice(root, "text", text_first, text_last).tobytes()
        for row, values in zip(ints.tolist(), floats.tolist(), strict=True):
            ended = layout.unpack(row, values, tokens, first, text, text_first)
            if self._errors is not None:
                error = self._errors.get(str(ended.trajectory.id), "")
                ended = replace(ended, trajectory=replace(ended.trajectory, error=error, reward_parts={}))
            yield ended

    def _slice(self, root: Any, name: str, first: int, last: int) -> npt.NDArray[Any]:
        array = root[name]
        if last > array.shape[0]:
            raise StoreError(f"{self._where}: {name} has {array.shape[0]} elements, a row needs {last}: truncated")
        try:
            return np.asarray(array[first:last])
        except Exception as error:  # zarr, numcodecs and icechunk each raise their own for a damaged chunk
            size = array.chunks[0]
            for number in range(first // size, -(-last // size)):  # find the damaged one
                try:
                    array[number * size : min(last, (number + 1) * size)]
                except Exception as found:  # noqa: BLE001  the same
                    what = f"{self._where}: {name}, chunk {number}, is corrupt: {_first_line(found)}"
                    raise StoreError(what) from error
            raise StoreError(f"{self._where}: {name} cannot be read: {_first_line(error)}") from error

    def _column(self, root: Any, name: str) -> npt.NDArray[Any]:
        return self._slice(root, name, 0, root[name].shape[0])

    def _read_root(self, snapshot: str | None = None) -> Any:
        snapshot = snapshot or self._at_snapshot
        if snapshot is None:
            session = self._repository.readonly_session(self._branch)
        else:
            session = self._repository.readonly_session(snapshot_id=snapshot)
        return zarr.open_group(session.store, mode="r")


def _rows_at(path: str, snapshot: str, first: int, last: int) -> list[Ended]:
    """Rows of a store as it was at a snapshot; a function, so that it can be sent to a worker."""
    return VersionedStore.at(Path(path), snapshot).rows(first, last)


def repository_at(path: Path) -> Any:
    """The Icechunk repository of an existing store. Raises StoreError."""
    try:
        return icechunk.Repository.open(_storage(path), config=_config())
    except (icechunk.IcechunkError, OSError) as error:
        raise StoreError(f"{path}: the store cannot be opened: {_first_line(error)}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time move the head of a store: held for milliseconds; the lock ends with the process."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def branch_names(repository: Any) -> set[str]:
    """The branches that are complete."""
    return {name for name in repository.list_branches() if not name.startswith(INCOMPLETE)}


def _storage(path: Path) -> Any:
    return icechunk.local_filesystem_storage(str(path))


def _config() -> Any:
    """A configuration that splits manifests every 64 chunks: else each commit rewrites one that grows with the run."""
    split = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): 64}}
    )
    return icechunk.RepositoryConfig(manifest=icechunk.ManifestConfig(splitting=split))


def _array(root: Any, name: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> None:
    dimensions = (name.replace("/", "_"), "column")[: len(shape)]
    codec = BloscCodec(cname="zstd", clevel=1)
    root.create_array(
        name, shape=shape, chunks=chunks, dtype=dtype, compressors=[codec], fill_value=0, dimension_names=dimensions
    )


def _snapshot_of(repository: Any, step: int, path: Path) -> str:
    steps = []
    for snapshot in repository.ancestry(branch="main"):
        if snapshot.metadata.get("kind") == "step":
            steps.append(snapshot.metadata.get("step"))
            if steps[-1] == step:
                return str(snapshot.id)
    there = f"steps {steps[-1]} to {steps[0]} are stored" if steps else "none is stored yet"
    raise ConfigError(f"{path}: no commit of step {step}; {there}")


def _first_line(error: BaseException) -> str:
    """The first line of a message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

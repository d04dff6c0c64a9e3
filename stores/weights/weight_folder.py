"""Published weights: one contiguous safetensors file per policy version, in one in-memory folder per host.

A version is published by rename, so a reader sees all of it or nothing. Whether an instance has loaded what was
published is proved by fingerprints (stores/weights/weight_hash.py), not by how the file came to its host.

torch is imported only by functions that use tensors, so a process that only forwards files does not load it.

A file may arrive in pieces, in any order, which are written at their offsets on arrival. Invariants: a piece counts as
missing until all its bytes are written. Only written bytes are read back.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors.numpy
from safetensors import SafetensorError, safe_open

from staleflow.stores.errors import StoreError, raised_as
from staleflow.stores.files import replacing, replacing_folder
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_file
from staleflow.stores.weights.weight_hash import Array, Tensors, TensorStream

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a published file. Raises StoreError."""
    from safetensors.torch import load_file

    with raised_as(StoreError, f"{path}: weights cannot be read", OSError, ValueError, SafetensorError):
        return dict(load_file(path))


def read_arrays(path: Path) -> dict[str, Array]:
    """Read the tensors of a published file as arrays, without torch. Raises StoreError."""
    with raised_as(StoreError, f"{path}: weights cannot be read", OSError, ValueError, SafetensorError):
        return dict(safetensors.numpy.load_file(path))


def shapes(tensors: Tensors) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_shapes(path: Path) -> Shapes:
    """Tensor names and shapes of a published file, without reading the tensors. Raises StoreError."""
    problem = f"{path}: weights cannot be read"
    with raised_as(StoreError, problem, OSError, ValueError, SafetensorError), safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def check_shapes(expected_shapes: Shapes, loaded_shapes: Shapes, path: Path) -> None:
    """Raise StoreError if a loaded tensor is missing, unknown or of another shape. Call before overwriting any
    weights."""
    if expected_shapes.keys() != loaded_shapes.keys():
        names = sorted(expected_shapes.keys() ^ loaded_shapes.keys())
        raise StoreError(f"{path}: {len(names)} tensors differ from the model's, the first is {names[0]}")
    for name, shape in expected_shapes.items():
        if shape != loaded_shapes[name]:
            raise StoreError(f"{path}: {name} has shape {loaded_shapes[name]}, the model's has {shape}")


MAX_SHARD_SIZE = "2GB"
"""Size of a checkpoint's files, at most: no more of a model is copied at once."""

LOCK_FILE = ".owner"
"""An empty file in each folder, on which every process that uses the folder holds a shared lock. The lock is released
however the process ends."""
FOLDER_PREFIX = "staleflow-"
"""Prefix of the folders in shared memory, by which those that a killed run left behind are found and removed."""


def remove_unused_folders(parent: Path) -> list[Path]:
    """Remove the folders below `parent` that no process uses any more, and return them. Safe while other runs start."""
    removed = []
    for path in parent.glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
            removed.append(path.parent)
    return removed


def _create_and_lock(folder: Path) -> int | None:
    """Create a folder and lock it as one in use; returns the lock's file descriptor, or None if a sweep removed the
    folder before it was locked. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock_fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(lock_fd), (folder / LOCK_FILE).stat()):
            return lock_fd
    except FileNotFoundError:
        pass
    except OSError:
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    return None


TRANSFER_PIECE_BYTES = 8 * 2**20
"""Bytes of a piece: large enough that the overhead of a request is small, small enough to hold several in memory."""


class Piece(NamedTuple):
    """A piece of a file: its offset and length in bytes."""

    offset: int
    size: int


def split_into_pieces(num_bytes: int, piece_bytes: int = TRANSFER_PIECE_BYTES) -> list[Piece]:
    """Split a file into pieces, in order. They cover each byte once; only the last may be smaller than the others.

    >>> split_into_pieces(5, 2)
    [Piece(offset=0, size=2), Piece(offset=2, size=2), Piece(offset=4, size=1)]
    """
    return [Piece(start, min(piece_bytes, num_bytes - start)) for start in range(0, num_bytes, piece_bytes)]


class PartialFile:
    """A file of `num_bytes` bytes, received in pieces.

    `write` and `read` may run in threads, one per piece. A thread that outlives its caller does no harm, because each
    call opens the file, and each attempt at a file has a name of its own.
    """

    def __init__(self, path: Path, num_bytes: int, piece_bytes: int = TRANSFER_PIECE_BYTES) -> None:
        self._path = path
        self._num_bytes, self._piece_bytes = num_bytes, piece_bytes
        pieces = split_into_pieces(num_bytes, piece_bytes)
        self.missing_pieces: dict[int, Piece] = {piece.offset: piece for piece in pieces}
        """Pieces that have not arrived, by offset."""

    @property
    def bytes_arrived(self) -> int:
        """Number of bytes received."""
        return self._num_bytes - sum(piece.size for piece in list(self.missing_pieces.values()))

    def write(self, piece: Piece, data: bytes) -> None:
        """Write a received piece. data: all of its bytes. Raises OSError, such as for a full disk; the piece is still
        missing then."""
        with self._path.open("r+b", buffering=0) as file:
            file.seek(piece.offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        self.missing_pieces.pop(piece.offset, None)

    def has(self, offset: int, size: int) -> bool:
        """Whether these bytes have been received."""
        first_offset = offset - offset % self._piece_bytes
        return not any(start in self.missing_pieces for start in range(first_offset, offset + size, self._piece_bytes))

    def read(self, offset: int, size: int) -> bytes:
        """Read received bytes."""
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)


class WeightFolder:
    """The published versions on one host. While this object exists, `remove_unused_folders` does not remove the
    folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with raised_as(
            StoreError, f"{folder}: cannot be created", OSError, remedy="set cluster.shared_memory to another folder"
        ):
            while (lock_fd := _create_and_lock(folder)) is None:
                continue
        # The lock ends with this object or with the process, whichever comes first.
        self._release = weakref.finalize(self, os.close, lock_fd)

    def path(self, version: PolicyVersion) -> Path:
        return self.folder / f"v{version:08d}.safetensors"

    def versions(self) -> list[PolicyVersion]:
        return sorted(PolicyVersion(int(p.stem[1:])) for p in self.folder.glob("v*.safetensors"))

    def publish(self, version: PolicyVersion, weights: Tensors | TensorStream) -> str:
        """Write a version, which becomes visible atomically. Returns its fingerprint. Raises StoreError."""
        with self._replacing(self.path(version)) as tmp_path:
            return weight_file.write(tmp_path, weights)

    @contextlib.contextmanager
    def receive(self, path: Path, num_bytes: int, piece_bytes: int = TRANSFER_PIECE_BYTES) -> Iterator[PartialFile]:
        """Context manager: receive a file of this folder. When the block ends, the file becomes visible if it is
        complete, and is removed otherwise. Raises StoreError."""
        with self._replacing(path) as tmp_path:
            partial_file = PartialFile(tmp_path, num_bytes, piece_bytes)
            yield partial_file
            if partial_file.missing_pieces:
                raise StoreError(f"{path}: {len(partial_file.missing_pieces)} pieces have not arrived")

    def read_piece(self, path: Path, offset: int, size: int) -> bytes:
        """Read `size` bytes of a file of this folder from `offset`; fewer at its end."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def prune(self, used_versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Remove all versions except those in use and the newest. Returns the removed ones. A process that has a
        removed file open can still read it."""
        versions = self.versions()
        keep = {*used_versions, *versions[-1:]}
        removed = [v for v in versions if v not in keep]
        for version in removed:
            self.path(version).unlink(missing_ok=True)
        return removed

    def remove(self) -> None:
        """Delete the folder and free its memory."""
        self._release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _replacing(self, path: Path) -> AbstractContextManager[Path]:
        remedy = "free memory, or set cluster.shared_memory to a larger folder"
        return replacing(path, remedy, error_types=(SafetensorError,), flush=False)


def save_checkpoint(
    model: Any,
    tokenizer: Any,
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Save a model and tokenizer for `from_pretrained`, atomically.

    Replaces a checkpoint of the same step, which exists if a resumed run repeats that step.

    Args:
        model: The model, which may itself hold only shards.
        tokenizer: Its tokenizer.
        folder: The checkpoint's folder.
        weights: The full weights of the model, written in files of at most MAX_SHARD_SIZE.
        write_more: Writes further files into the folder.

    Raises:
        StoreError: The checkpoint cannot be written.
    """
    largest = max(weights.values(), key=lambda tensor: tensor.numel())
    config = copy.deepcopy(model.config)
    config.dtype = str(largest.dtype).removeprefix("torch.")  # buffers may have another, and trained ones are float32
    with replacing_folder(folder, "free space or move runs_dir", error_types=(SafetensorError,)) as tmp_path:
        model.save_pretrained(tmp_path, state_dict=dict(weights), max_shard_size=MAX_SHARD_SIZE)
        config.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        if write_more is not None:
            write_more(tmp_path)

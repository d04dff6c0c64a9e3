"""What changed between two versions' files of weights: the bits of the elements that differ, and where these are.

Two files of one layout (weight_file.py) are compared piece by piece, an element of a tensor's type at a time and bit by
bit: a zero that changes its sign is a change, and so is another payload of a NaN. At usual learning rates few of
the bfloat16 numbers that engines load change in a step, though all of the float32 ones that are trained do.

A delta file is a header and a record for each piece that has changed, in the order of the pieces. A record holds the
changed elements and their places in the smallest of three ways: as gaps between them, as one bit for each element of
the piece, or not at all, with all elements of the piece. Applied to the older file it gives the newer one; whether it
has is proved by the newer one's fingerprint, not here.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import PolicyVersion

Bytes = npt.NDArray[np.uint8]

MAGIC = b"weights\x01"
"""The first bytes of a delta file; the last of them is the number of its format."""
RECORD = struct.Struct("<BBxxxxxxQQQQ")
"""Before a record: (how its places are written, bytes of an element, first byte in the file, elements of the piece,
changed ones, bytes of the places)."""
ALL, BITS = 0, 255
"""Ways in which places are written, besides gaps of 1, 2 or 4 bytes."""
GAPS = (1, 2, 4)


class DeltaFile(NamedTuple):
    """A published delta: of `version` against the one before it."""

    version: PolicyVersion
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A part of one tensor in a file of weights."""

    begin: int
    """Offset of its first byte in the file."""
    num_bytes: int
    itemsize: int
    """Bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTarget:
    """A delta that is to be written to `path`, against version `base`, whose file is `old`."""

    path: Path
    base: PolicyVersion
    old: Path

    def writer(self, header: bytes, pieces: Sequence[TensorPiece]) -> DeltaWriter | None:
        """Start writing the delta.

        Args:
            header: Of the newer version's file.
            pieces: All of the newer version's, in the order of the records.

        Returns:
            None if the older version has other tensors, or if either file cannot be opened.
        """
        try:
            with self.old.open("rb") as file:
                if file.read(len(header)) != header or not pieces:
                    return None
            return DeltaWriter(self, pieces)
        except OSError:
            return None


def places(indices: npt.NDArray[np.int64], width: int) -> Bytes:
    """Encode sorted indices as the gaps between them, each in numbers of `width` bytes.

    The largest such number stands for so many elements that are skipped, and is followed by the rest of the gap.

    >>> places(np.array([0, 1, 5, 300]), 1).tolist()
    [0, 0, 3, 255, 39]
    """
    most = 2 ** (8 * width) - 1
    gaps = np.diff(indices, prepend=-1) - 1
    skips = gaps // most
    coded = np.full(len(gaps) + int(skips.sum()), most, f"<u{width}")
    coded[np.cumsum(skips + 1) - 1] = gaps % most
    return coded.view(np.uint8)


def indices(coded: Bytes, width: int) -> npt.NDArray[np.int64]:
    """Decode the gaps that `places` encodes."""
    numbers = coded.view(f"<u{width}")
    (ends,) = np.nonzero(numbers != 2 ** (8 * width) - 1)
    positions: npt.NDArray[np.int64] = np.cumsum(numbers, dtype=np.int64)[ends] + np.arange(len(ends))
    return positions


def record(piece: TensorPiece, old: Bytes, new: Bytes) -> bytes:
    """Encode a piece's changes as a record; empty if it has not changed. old, new: its bytes."""
    kind = f"<u{piece.itemsize}"
    before, after = old.view(kind), new.view(kind)
    (at,) = np.nonzero(before != after)
    if not len(at):
        return b""
    values = after[at].view(np.uint8)
    gaps = np.diff(at, prepend=-1) - 1
    sizes = {width: width * (len(at) + int((gaps // (2 ** (8 * width) - 1)).sum())) for width in GAPS}
    sizes[BITS] = -(-len(after) // 8)
    way = min(sizes, key=lambda encoding: sizes[encoding])
    if sizes[way] + len(values) >= len(new):
        way, coded, values = ALL, np.empty(0, np.uint8), new
    elif way == BITS:
        coded = np.packbits(before != after)
    else:
        coded = places(at, way)
    return RECORD.pack(way, piece.itemsize, piece.begin, len(after), len(at), len(coded)) + bytes(coded) + bytes(values)


class DeltaWriter:
    """Writes the delta of a version, from pieces that come in any order and from many threads.

    It gives up, and leaves no file, when memory is full or the delta would be as large as the tensors: a delta is
    optional.
    """

    def __init__(self, changes: DeltaTarget, pieces: Sequence[TensorPiece]) -> None:
        """pieces: all of the newer version's, in the order of the records. Raises OSError."""
        with changes.old.open("rb") as file:
            self._old = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self._path = changes.path
        self._pieces = pieces
        self._numbers = {piece.begin: number for number, piece in enumerate(pieces)}
        self._waiting: dict[int, bytes] = {}
        """Records whose turn has not come."""
        self._next = 0
        self._bytes_left = sum(piece.num_bytes for piece in pieces)
        self._lock = threading.Lock()
        self._given_up = False
        header = json.dumps({"base": changes.base}).encode()
        self._file = changes.path.open("wb", buffering=0)
        self._file.write(MAGIC + struct.pack("<Q", len(header)) + header)

    def add(self, begin: int, data: memoryview) -> None:
        """Add the newer version's bytes of the piece that begins at an offset."""
        if self._given_up:
            return
        number = self._numbers[begin]
        piece = self._pieces[number]
        delta_record = record(piece, self._old[begin : begin + piece.num_bytes], np.frombuffer(data, np.uint8))
        with self._lock:
            self._waiting[number] = delta_record
            while self._next in self._waiting:
                self._write(self._waiting.pop(self._next))
                self._next += 1

    def finish(self) -> None:
        """Close the file, or remove it if it is not whole."""
        self._file.close()
        if self._given_up or self._next < len(self._pieces):
            self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        self._given_up |= self._bytes_left <= 0
        view = memoryview(data)
        while view and not self._given_up:
            try:
                view = view[self._file.write(view) :]
            except OSError:
                self._given_up = True


def apply(path: Path, delta: Path, base: PolicyVersion) -> None:
    """Change a file of weights in place from version `base` to the one after it. Raises StoreError if the delta is
    damaged or has another base; the file is then unusable."""
    try:
        with path.open("r+b") as file, delta.open("rb") as changes:
            target = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
            records = np.frombuffer(mmap.mmap(changes.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            for fields in _records(records, base):
                _change(target, *fields)
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise StoreError(f"{delta}: no changes against version {base}: {error}") from error


def _records(delta: Bytes, base: PolicyVersion) -> Iterator[tuple[Any, ...]]:
    """The records of a delta file: the fields of RECORD, the places and the values."""
    begin = len(MAGIC) + 8
    if bytes(delta[: len(MAGIC)]) != MAGIC:
        raise ValueError("unknown format")
    (size,) = struct.unpack("<Q", bytes(delta[len(MAGIC) : begin]))
    header = json.loads(bytes(delta[begin : begin + size]))
    of = header.get("base") if isinstance(header, dict) else None
    if of != base:
        raise ValueError(f"they are against version {of}")
    at = begin + size
    while at < len(delta):
        fields = RECORD.unpack(bytes(delta[at : at + RECORD.size]))
        way, itemsize, _, num_elements, num_changed, num_coded = fields
        at += RECORD.size
        if way not in (ALL, BITS, *GAPS) or itemsize not in (1, 2, 4, 8):
            raise ValueError("a record is none")
        num_values = itemsize * (num_elements if way == ALL else num_changed)
        if at + num_coded + num_values > len(delta):
            raise ValueError("it is cut off")
        coded, values = delta[at : at + num_coded], delta[at + num_coded : at + num_coded + num_values]
        at += num_coded + num_values
        yield *fields, coded, values


def _change(
    target: Bytes, way: int, itemsize: int, begin: int, num_elements: int, num_changed: int, _: int, coded: Bytes,
    values: Bytes,
) -> None:  # fmt: skip
    """Apply one record to the weights."""
    kind = f"<u{itemsize}"
    piece = target[begin : begin + num_elements * itemsize]
    if len(piece) != num_elements * itemsize:
        raise ValueError("it is of a larger file")
    if way == ALL:
        piece[:] = values
    elif way == BITS:
        piece.view(kind)[np.flatnonzero(np.unpackbits(coded, count=num_elements))] = values.view(kind)
    else:
        piece.view(kind)[indices(coded.copy(), way)] = values.copy().view(kind)

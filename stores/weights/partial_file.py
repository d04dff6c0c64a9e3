"""A file that arrives in pieces, in any order. Pieces are written at their offsets on arrival, never held in memory.

Invariants: a piece counts as missing until all its bytes are written. Only written bytes are read back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 8 * 2**20
"""Bytes of a piece: large enough that the overhead of a request is small, small enough to hold several in memory."""


class Piece(NamedTuple):
    """A piece of a file: its offset and length in bytes."""

    offset: int
    size: int


def pieces(num_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Split a file into pieces, in order. They cover each byte once; only the last may be smaller than the others.

    >>> pieces(5, 2)
    [Piece(offset=0, size=2), Piece(offset=2, size=2), Piece(offset=4, size=1)]
    """
    return [Piece(start, min(piece_bytes, num_bytes - start)) for start in range(0, num_bytes, piece_bytes)]


class PartialFile:
    """A file of `num_bytes` bytes, received in pieces.

    `write` and `read` may run in threads, one per piece. A thread that outlives its caller does no harm, because each
    call opens the file, and each attempt at a file has a name of its own.
    """

    def __init__(self, path: Path, num_bytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._path = path
        self._num_bytes, self._piece_bytes = num_bytes, piece_bytes
        self.missing: dict[int, Piece] = {piece.offset: piece for piece in pieces(num_bytes, piece_bytes)}
        """Pieces that have not arrived, by offset."""

    @property
    def bytes_arrived(self) -> int:
        """Number of bytes received."""
        return self._num_bytes - sum(piece.size for piece in list(self.missing.values()))

    def write(self, piece: Piece, data: bytes) -> None:
        """Write a received piece. Raises OSError, such as for a full disk; the piece then counts as missing."""
        with self._path.open("r+b", buffering=0) as file:
            file.seek(piece.offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        self.missing.pop(piece.offset, None)

    def has(self, offset: int, size: int) -> bool:
        """Whether these bytes have been received."""
        first_offset = offset - offset % self._piece_bytes
        return not any(start in self.missing for start in range(first_offset, offset + size, self._piece_bytes))

    def read(self, offset: int, size: int) -> bytes:
        """Read received bytes."""
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)

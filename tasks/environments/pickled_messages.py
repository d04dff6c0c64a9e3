"""Messages between a process and its child: pickled values, each after its length."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("<I")
"""Before each message: its length in bytes."""


def encode_message(value: Any) -> bytes:
    """Encode a value as a message."""
    data = pickle.dumps(value)
    return HEADER.pack(len(data)) + data


def read_message(read: Callable[[int], bytes]) -> Any:
    """Read the next message. Raises EOFError at the end, and what `read` raises. read: returns up to a number of bytes;
    none at the end of the stream."""
    (size,) = HEADER.unpack(read_exactly(read, HEADER.size))
    return pickle.loads(read_exactly(read, size))


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if the stream ends before that."""
    data = b""
    while len(data) < size:
        chunk = read(size - len(data))
        if not chunk:
            raise EOFError("end of stream")
        data += chunk
    return data

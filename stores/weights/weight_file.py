"""A version's file, in the safetensors format: written piece by piece, and hashed at the same time.

Tensors may be anywhere, and come one by one; no more of them than a piece a thread is copied to this process' memory at
a time.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from staleflow.stores.errors import StoreError
from staleflow.stores.weights import weight_hash
from staleflow.stores.weights.weight_delta import DeltaTarget, TensorPiece
from staleflow.stores.weights.weight_hash import Array, StoredTensor, Tensors, TensorStream, fingerprint

if TYPE_CHECKING:
    import torch

TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float64": "F64",
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of torch's types in the format."""
ALIGNED = 8
"""Tensors begin at multiples of their element's size: the header's size is a multiple of this, and larger elements come
first."""


def write(path: Path, weights: Tensors | TensorStream, changes: DeltaTarget | None = None) -> str:
    """Write weights to a file, and return their fingerprint. changes: what is written besides, if it can be. Raises
    OSError; StoreError for a type that the format does not have."""
    described = weights.described if isinstance(weights, TensorStream) else weights
    header, begins = layout(described)
    delta = None if changes is None else changes.writer(header, _pieces(described, begins))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(fd, header, 0)

        def write_piece(name: str, offset: int, data: memoryview) -> None:
            _write_all(fd, data, begins[name] + offset)
            if delta is not None:
                delta.add(begins[name] + offset, data)

        return fingerprint(weights, also=write_piece)
    finally:
        os.close(fd)
        if delta is not None:
            delta.finish()


def stored(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a file, whose bytes are read when they are needed. Raises StoreError."""
    names = {kind: name for name, kind in TYPES.items()}
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(size))
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[8 + size :]
        return {
            name: StoredTensor(
                f"torch.{names[entry['dtype']]}", tuple(entry["shape"]), data[slice(*entry["data_offsets"])]
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreError(f"{path}: weights cannot be read: {error}") from error


def layout(tensors: Tensors) -> tuple[bytes, dict[str, int]]:
    """Read a file's header, and where in the file each tensor begins."""
    entries: dict[str, object] = {}
    begins, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].itemsize, n)):
        tensor = tensors[name]
        begins[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _type(name, tensor), "shape": list(tensor.shape), "data_offsets": [begins[name], end],
        }  # fmt: skip
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNED)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _pieces(tensors: Tensors, begins: dict[str, int]) -> list[TensorPiece]:
    """The pieces in which tensors come, in their order."""
    return [
        TensorPiece(
            begin=begins[name] + offset,
            num_bytes=min(weight_hash.PIECE_BYTES, tensors[name].nbytes - offset),
            itemsize=tensors[name].itemsize,
        )
        for name in sorted(tensors)
        for offset in range(0, tensors[name].nbytes, weight_hash.PIECE_BYTES)
    ]


def _type(name: str, tensor: torch.Tensor | Array) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in TYPES:
        raise StoreError(f"{name}: tensors of type {kind} cannot be published; types are {', '.join(TYPES)}")
    return TYPES[kind]


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written

"""Writes the weights of a policy version to a safetensors file while hashing them.

Tensors may be on any device, and may be computed one after another (TensorStream). Each thread copies one piece at a
time to this process' memory.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.stores.errors import StoreError
from staleflow.stores.weights.weight_hash import Array, Tensors, TensorStream, fingerprint

if TYPE_CHECKING:
    import torch

TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float64": "F64",
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of torch types in the safetensors format."""
ALIGNMENT_BYTES = 8
"""Alignment in bytes. The header's size is a multiple of it, and tensors with larger elements are written first, so
each tensor begins at a multiple of its element size."""


def write(path: Path, weights: Tensors | TensorStream) -> str:
    """Write weights to a file, and return their fingerprint. Raises OSError, and StoreError for a dtype that the format
    lacks."""
    header, offsets = build_header(weights.meta_tensors if isinstance(weights, TensorStream) else weights)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(fd, header, 0)

        def write_piece(name: str, offset: int, data: memoryview) -> None:
            _write_all(fd, data, offsets[name] + offset)

        return fingerprint(weights, on_piece=write_piece)
    finally:
        os.close(fd)


def build_header(tensors: Tensors) -> tuple[bytes, dict[str, int]]:
    """Build the header of a file with these tensors. Returns it with the offset of each tensor by name."""
    entries: dict[str, object] = {}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].itemsize, n)):
        tensor = tensors[name]
        offsets[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _safetensors_type(name, tensor), "shape": list(tensor.shape), "data_offsets": [offsets[name], end],
        }  # fmt: skip
    header_json = json.dumps(entries).encode()
    header_json += b" " * (-len(header_json) % ALIGNMENT_BYTES)
    header = struct.pack("<Q", len(header_json)) + header_json
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def _safetensors_type(name: str, tensor: torch.Tensor | Array) -> str:
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    if dtype_name not in TYPES:
        raise StoreError(f"{name}: tensors of type {dtype_name} cannot be published; types are {', '.join(TYPES)}")
    return TYPES[dtype_name]


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written

"""Fingerprints of weights. Equal fingerprints mean equal names, shapes, types and bytes, however weights were
transferred.

A fingerprint is the name of its scheme, `sha256-tree:`, and 64 hex digits. Each tensor's bytes are cut into pieces of
16 MiB, which threads hash side by side; a tensor's digest is that of its name, shape, type and pieces; the fingerprint
is that of all tensors in name order.

numpy arrays have the same fingerprint as equal torch tensors. torch is imported only for torch tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


Tensors: TypeAlias = "Mapping[str, torch.Tensor] | Mapping[str, Array]"
AnyTensor: TypeAlias = "torch.Tensor | Array"

SCHEME = "sha256-tree"
"""The scheme of fingerprints."""
HASH_PIECE_BYTES = 16 * 2**20
"""Bytes hashed at once by a thread. Part of the scheme: another size gives other fingerprints."""
MAX_THREADS = 8
"""Maximum number of threads for one fingerprint. More are hardly faster, as reading memory limits them, and other
engines on the host hash at the same time."""


QUEUED_PIECES_PER_THREAD = 4
"""The next tensor waits while more pieces than this are queued for each thread. This limits the memory that a
TensorStream needs."""


@dataclass(frozen=True, slots=True)
class TensorStream:
    """Tensors computed one after another, in the order of their names, so that they need not be in memory all at
    once."""

    meta_tensors: Tensors
    """Tensors on the meta device with the types and shapes of all tensors, by name."""
    tensors: Iterator[tuple[str, torch.Tensor]]
    """All tensors with their names. Can be read once."""


Weights: TypeAlias = "Tensors | TensorStream"


def sorted_tensors(weights: Weights) -> Iterator[tuple[str, AnyTensor]]:
    """Yield tensors in the order of their names. A TensorStream is consumed."""
    if isinstance(weights, TensorStream):
        yield from weights.tensors
    else:
        for name in sorted(weights):
            yield name, weights[name]


def fingerprint(
    weights: Weights, num_threads: int | None = None, on_piece: Callable[[str, int, memoryview], object] | None = None
) -> str:
    """Compute the fingerprint of weights on any device.

    Args:
        weights: Tensors by name, or a TensorStream, which is consumed.
        num_threads: Number of threads, by default one for each processor, up to MAX_THREADS. Each copies one piece at a
            time to this process' memory.
        on_piece: Called in these threads with the tensor's name, the offset of the piece in the tensor in bytes, and
            the bytes of the piece.
    """

    def digest(item: tuple[str, int, torch.Tensor | Array]) -> bytes:
        name, offset, piece = item
        data = _data(piece)
        if on_piece is not None:
            on_piece(name, offset, data)
        return hashlib.sha256(data).digest()  # hashlib lets other threads run meanwhile

    if num_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = min(MAX_THREADS, cores)
    weights_hash = hashlib.sha256()
    pending_tensors: deque[tuple[bytes, list[Future[bytes]]]] = deque()
    num_pending_pieces = 0

    def add_tensor(header: bytes, digests: list[Future[bytes]]) -> int:
        weights_hash.update(hashlib.sha256(header + b"".join(digest.result() for digest in digests)).digest())
        return len(digests)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="hash") as pool:
        for name, tensor in sorted_tensors(weights):
            digests = [pool.submit(digest, (name, *piece)) for piece in _pieces(tensor)]
            pending_tensors.append((_header(name, tensor), digests))
            num_pending_pieces += len(digests)
            while num_pending_pieces > QUEUED_PIECES_PER_THREAD * num_threads:
                num_pending_pieces -= add_tensor(*pending_tensors.popleft())
        for header, digests in pending_tensors:
            add_tensor(header, digests)
    return f"{SCHEME}:{weights_hash.hexdigest()}"


def _header(name: str, tensor: AnyTensor) -> bytes:
    dtype = f"torch.{tensor.dtype}" if isinstance(tensor, np.ndarray) else tensor.dtype
    return f"{name}:{tuple(tensor.shape)}:{dtype};".encode()


def _pieces(tensor: AnyTensor) -> Iterator[tuple[int, torch.Tensor | Array]]:
    """Split a tensor's bytes into views of HASH_PIECE_BYTES; yields each with its offset. The last may be shorter."""
    flat: torch.Tensor | Array
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        return ((start, flat[start : start + HASH_PIECE_BYTES]) for start in range(0, len(flat), HASH_PIECE_BYTES))
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return ((start, flat[start : start + HASH_PIECE_BYTES]) for start in range(0, len(flat), HASH_PIECE_BYTES))


def _data(piece: torch.Tensor | Array) -> memoryview:
    """Return the bytes of a piece in this process' memory."""
    array: Array = piece if isinstance(piece, np.ndarray) else piece.cpu().numpy()
    return array.data

"""Fingerprints of weights: equal ones mean equal names, shapes, types and bytes, however the weights were transferred.

A fingerprint is the name of its scheme, `sha256-tree:`, and 64 hex digits. Each tensor's bytes are cut into pieces of
16 MiB, which threads hash side by side; a tensor's digest is that of its name, shape, type and pieces; the fingerprint
is that of all tensors in name order.

torch is loaded only where there are tensors of its: arrays of numpy's have the fingerprint of equal tensors.
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
PIECE_BYTES = 16 * 2**20
"""Bytes hashed at once by a thread. Part of the scheme: other pieces give other fingerprints."""
MAX_THREADS = 8
"""Threads that hash at once, at most: about as fast as memory is read, and a host's other instances hash too."""


AHEAD = 4
"""Pieces that wait for each thread, at most: tensors that come one by one are not kept for longer."""


@dataclass(frozen=True, slots=True)
class TensorStream:
    """Tensors that are produced one by one in the order of their names, so that never all are in memory."""

    described: Tensors
    """Tensors of their types and shapes without a content."""
    come: Iterator[tuple[str, torch.Tensor]]
    """All of them, once."""


Weights: TypeAlias = "Tensors | TensorStream"


def in_order(weights: Weights) -> Iterator[tuple[str, AnyTensor]]:
    """Yield tensors in the order of their names. A TensorStream is consumed."""
    if isinstance(weights, TensorStream):
        yield from weights.come
    else:
        for name in sorted(weights):
            yield name, weights[name]


def fingerprint(
    weights: Weights, threads: int | None = None, also: Callable[[str, int, memoryview], object] | None = None
) -> str:
    """Compute the fingerprint of weights, wherever they are.

    Args:
        weights: Tensors by name.
        threads: How many hash at once, by default one for each processor, up to MAX_THREADS. Each copies a piece at a
            time.
        also: Called in these threads with each piece, its tensor's name and its first byte's position in the tensor.
    """

    def digest(item: tuple[str, int, torch.Tensor | Array]) -> bytes:
        name, offset, piece = item
        data = _data(piece)
        if also is not None:
            also(name, offset, data)
        return hashlib.sha256(data).digest()  # hashlib lets other threads run meanwhile

    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = min(MAX_THREADS, cores)
    checkpoint_hash = hashlib.sha256()
    waiting: deque[tuple[bytes, list[Future[bytes]]]] = deque()
    num_waiting = 0

    def add(header: bytes, digests: list[Future[bytes]]) -> int:
        checkpoint_hash.update(hashlib.sha256(header + b"".join(digest.result() for digest in digests)).digest())
        return len(digests)

    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        for name, tensor in in_order(weights):
            digests = [pool.submit(digest, (name, *piece)) for piece in _pieces(tensor)]
            waiting.append((_header(name, tensor), digests))
            num_waiting += len(digests)
            while num_waiting > AHEAD * threads:
                num_waiting -= add(*waiting.popleft())
        for header, digests in waiting:
            add(header, digests)
    return f"{SCHEME}:{checkpoint_hash.hexdigest()}"


def _header(name: str, tensor: AnyTensor) -> bytes:
    kind = f"torch.{tensor.dtype}" if isinstance(tensor, np.ndarray) else tensor.dtype
    return f"{name}:{tuple(tensor.shape)}:{kind};".encode()


def _pieces(tensor: AnyTensor) -> Iterator[tuple[int, torch.Tensor | Array]]:
    """Views of a tensor's bytes with their place in it, PIECE_BYTES each and the rest."""
    flat: torch.Tensor | Array
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        return ((start, flat[start : start + PIECE_BYTES]) for start in range(0, len(flat), PIECE_BYTES))
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return ((start, flat[start : start + PIECE_BYTES]) for start in range(0, len(flat), PIECE_BYTES))


def _data(piece: torch.Tensor | Array) -> memoryview:
    """The bytes of a piece, in this process' memory."""
    array: Array = piece if isinstance(piece, np.ndarray) else piece.cpu().numpy()
    return array.data

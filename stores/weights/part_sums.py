"""Order-free sums of tensors: those of the parts add up to that of the whole, however it is cut and wherever they are.

The sum of a tensor is the sum, modulo 2**64, of one integer for each element, made of its bits and of its position in
the whole tensor. It is computed on the tensor's device in a few passes; nothing but the sum has to leave it, and the
sums of shards on several devices can be added by an all-reduce.

What equal sums mean. A change of one element always changes the sum, because an element's integer is a bijection of its
bits. Two other tensors of one type and shape, chosen without a look at the constants below, have equal sums with a
probability of about 2**-64 if these integers are as good as random ones. That is not proved; tests look for
coincidences down to 2**-35. Whoever wants equal sums can construct them: against intent, and for files, there is
SHA-256 (stores/weights/weight_hash.py). Types and shapes are not part of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from staleflow.stores.weights.weight_comparison import integer_view

if TYPE_CHECKING:
    import torch

START = 0xBF58476D1CE4E5B9 - 2**64
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTOR = 0xD6E8FEB86659FD93 - 2**64
"""As int64. An element's integer is `mix(mix(mix((START + position * STEP) ^ bits) * FACTOR) * FACTOR)` modulo 2**64.
There `mix(z)` is `z ^ (z >> 32)`, and bits are those of a signed integer of the element's size. It is a generator of
random numbers (splitmix64, with another finalizer of the same kind) whose counter is changed by the element. Each
operation is a bijection, as the factors are odd."""
LOW = 2**32 - 1
CPU_BLOCK = 2**16
"""Elements computed at once on a CPU, whose eight bytes each stay in a core's cache. The sum is the same for any."""
DEVICE_BLOCK = 2**24
"""The same on other devices, where each operation has to be large: 128 MiB, and as much again while it is computed."""


def part_sum(
    part: torch.Tensor,
    full_shape: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """Compute the sum of a part of a tensor, on the part's device. Does not copy the part.

    The sum of the whole is that of its parts, if each element is in one of them. A shard of the flattened tensor has
    `full_shape = (number of elements,)`.

    Args:
        part: The part, of any strides and any type of at most eight bytes.
        full_shape: Shape of the whole tensor; by default the part is all of it.
        start: Where the part's first element is in the whole.
        block: Elements computed at once.

    Returns:
        An int64 without dimensions, which wraps when sums are added.

    Raises:
        ValueError: The part does not lie in the whole.
    """
    import torch

    full_shape = tuple(part.shape if full_shape is None else full_shape)
    start = (0,) * len(full_shape) if start is None else tuple(start)
    sizes = zip(start, part.shape, full_shape, strict=False)
    if not len(start) == part.ndim == len(full_shape) or any(
        not 0 <= b <= b + size <= limit for b, size, limit in sizes
    ):
        raise ValueError(
            f"a part of shape {tuple(part.shape)} at {start} does not lie in a tensor of shape {full_shape}"
        )
    strides = tuple(math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape)))
    offset = sum(b * stride for b, stride in zip(start, strides, strict=True))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if block is None:
        block = CPU_BLOCK if part.device.type == "cpu" else DEVICE_BLOCK
    for piece, position in _blocks(integer_view(part.detach()), offset, strides, block):
        total += _sum(piece, position, strides)
    return total


def _blocks(
    part: torch.Tensor, offset: int, strides: tuple[int, ...], max_elements: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Split a part into views of at most `max_elements` elements, each with the position of its first element."""
    if part.numel() <= max_elements:
        yield part, offset
        return
    dim = max(range(part.ndim), key=lambda d: part.shape[d])
    half = part.shape[dim] // 2
    yield from _blocks(part.narrow(dim, 0, half), offset, strides, max_elements)
    rest = part.narrow(dim, half, part.shape[dim] - half)
    yield from _blocks(rest, offset + half * strides[dim], strides, max_elements)


def _sum(bits: torch.Tensor, offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    import torch

    mixed = torch.full((), _wrapped(START + offset * STEP), dtype=torch.int64, device=bits.device)
    for size, stride in zip(bits.shape, strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=bits.device).mul_(_wrapped(stride * STEP))
        mixed = mixed.unsqueeze(-1) + steps  # sums and products wrap
    _mix(mixed.bitwise_xor_(bits))
    _mix(mixed.mul_(FACTOR))
    _mix(mixed.mul_(FACTOR))
    return mixed.sum()


def _mix(values: torch.Tensor) -> None:
    """Replace values by `z ^ (z >> 32)`, with zeros shifted in."""
    values.bitwise_xor_((values >> 32).bitwise_and_(LOW))


def _wrapped(number: int) -> int:
    """The int64 that is congruent to a number modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63

"""Sums of tensors: equal for any way to cut them and any order, different for each small change that was tried."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.weights.part_sums import FACTOR, START, STEP, part_sum

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAP = 2**64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values > 0 if dtype is torch.bool else values.mul_(50).to(dtype)


def plain_sum(tensor: torch.Tensor) -> int:
    """The definition, by Python's integers."""
    total = 0
    whole = WORDS[tensor.dtype.itemsize]
    for position, bits in enumerate(tensor.contiguous().view(whole).flatten().tolist()):
        value = (START + position * STEP ^ bits) % WRAP
        for _ in range(2):
            value = (value ^ (value >> 32)) * FACTOR % WRAP
        total += value ^ (value >> 32)
    total %= WRAP
    return total - WRAP if total >= WRAP // 2 else total


def cut(
    tensor: torch.Tensor, begin: tuple[int, ...], cuts: list[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Parts of a tensor and where each begins. cuts: dimension and place, of all parts that are left."""
    if not cuts or not tensor.ndim:
        yield tensor, begin
        return
    (dim, at), *rest = cuts
    dim %= tensor.ndim
    at = min(at, tensor.shape[dim])
    yield from cut(tensor.narrow(dim, 0, at), begin, rest)
    after = tuple(b + at * (d == dim) for d, b in enumerate(begin))
    yield from cut(tensor.narrow(dim, at, tensor.shape[dim] - at), after, rest)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=3),
    order=st.randoms(),
    dtype=st.sampled_from(TYPES),
    block=st.integers(1, 40),
)
def test_parts_add_up_to_the_whole_however_it_is_cut(
    shape: tuple[int, ...], cuts: list[tuple[int, int]], order: random.Random, dtype: torch.dtype, block: int
) -> None:
    tensor = drawn(shape, dtype=dtype)
    parts = list(cut(tensor, (0,) * len(shape), cuts))
    order.shuffle(parts)
    total = sum((part_sum(part, shape, begin, block) for part, begin in parts), start=torch.tensor(0))
    assert total.item() == part_sum(tensor).item() == plain_sum(tensor)


@settings(max_examples=25)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), size=st.integers(1, 30))
def test_flat_shards_add_up_to_the_whole(shape: tuple[int, ...], size: int) -> None:
    """As FSDP's first form had them."""
    tensor = drawn(shape)
    flat = tensor.flatten()
    shards = [(flat[at : at + size], at) for at in range(0, len(flat), size)]
    total = sum(part_sum(shard, (len(flat),), (at,)).item() for shard, at in reversed(shards)) % WRAP
    assert total == part_sum(tensor).item() % WRAP


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_device_change_nothing(device: str) -> None:
    tensor = drawn((33, 17))
    assert part_sum(tensor.t().contiguous().t().to(device)).item() == plain_sum(tensor)
    assert part_sum(tensor.repeat_interleave(2, 1).to(device)[:, ::2]).item() == plain_sum(tensor)


@pytest.mark.parametrize("num_flips", [150, pytest.param(1700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", TYPES[:-1], ids=str)
def test_each_flipped_bit_gives_another_sum(dtype: torch.dtype, num_flips: int) -> None:
    """All of them differ; the slow ones are 10,200 of six types."""
    tensor = drawn((5, 43), dtype=dtype)
    words = WORDS[dtype.itemsize]
    bits, width = tensor.view(words).flatten(), 8 * dtype.itemsize
    places = torch.randperm(bits.numel() * width, generator=torch.Generator().manual_seed(1))[:num_flips].tolist()
    sums = {part_sum(tensor).item()}
    for place in places:
        changed = bits.clone()
        changed[place // width] ^= torch.tensor(1).bitwise_left_shift(place % width).to(words)
        sums.add(part_sum(changed.view(tensor.shape)).item())
    assert len(sums) == 1 + num_flips


@pytest.mark.parametrize("words", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_what_a_flipped_bit_adds_to_a_sum_is_another_number_for_each_element(words: torch.dtype) -> None:
    """Otherwise two flips would often cancel each other, as two flipped signs did when there was one product less. Of
    200,000 numbers and their negatives no two are equal, by chance in one of ten million tries."""
    count, width = 100_000, 8 * words.itemsize
    bits = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1) - 1, (count,), dtype=words)
    positions = torch.arange(count) * STEP + START
    for bit in (0, width // 2, width - 1):
        flip = torch.tensor(1).bitwise_left_shift(bit).to(words)
        added = finished(positions ^ (bits ^ flip)) - finished(positions ^ bits)
        assert len(torch.cat((added, -added)).unique()) == 2 * count, bit


def finished(values: torch.Tensor) -> torch.Tensor:
    """What becomes of an element's bits and position."""
    for _ in range(2):
        values = (values ^ (values >> 32 & 2**32 - 1)) * FACTOR
    return values ^ (values >> 32 & 2**32 - 1)


@settings(max_examples=30)
@given(first=st.integers(0, 99), second=st.integers(0, 99), dtype=st.sampled_from(TYPES[:-1]))
def test_two_swapped_elements_give_another_sum(first: int, second: int, dtype: torch.dtype) -> None:
    words = WORDS[dtype.itemsize]
    bits = drawn((100,), dtype=dtype).view(words)
    swapped = bits.clone()
    swapped[first], swapped[second] = bits[second], bits[first]
    assert (part_sum(swapped).item() == part_sum(bits).item()) == bool(torch.equal(swapped, bits))


@pytest.mark.parametrize("shift", [1, 2, 7, 64, 4096])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_shifted_tensor_gives_another_sum(shift: int, dim: int) -> None:
    tensor = drawn((67, 129), dtype=torch.bfloat16)
    assert part_sum(tensor.roll(shift, dim)).item() != part_sum(tensor).item()


def test_nan_payloads_signed_zeros_and_zeros_at_the_end_count() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    zeros = torch.tensor([0.0, -0.0])
    values = [*nans, *zeros]
    assert len({part_sum(value.reshape(1)).item() for value in values}) == len(values)
    assert len({part_sum(torch.zeros(size)).item() for size in range(50)}) == 50


def test_a_missing_shard_one_counted_twice_and_one_at_another_place_give_another_sum() -> None:
    tensor = drawn((8, 6))
    shards = [part_sum(tensor[row : row + 2], (8, 6), (row, 0)).item() for row in range(0, 8, 2)]
    misplaced = part_sum(tensor[:2], (8, 6), (2, 0)).item() + part_sum(tensor[2:4], (8, 6), (0, 0)).item()
    whole = part_sum(tensor).item() % WRAP
    assert sum(shards) % WRAP == whole
    assert len({whole, sum(shards[1:]) % WRAP, sum([*shards, shards[0]]) % WRAP}) == 3
    assert (misplaced + sum(shards[2:])) % WRAP != whole


def test_a_part_outside_the_whole_is_refused() -> None:
    for begin, whole in (((1, 0), (2, 3)), ((-1, 0), (2, 3)), ((0,), (6,)), ((0, 0), (6,))):
        with pytest.raises(ValueError, match="does not lie in a tensor of shape"):
            part_sum(torch.zeros(2, 3), whole, begin)
    assert part_sum(torch.tensor(1.0)).item() == plain_sum(torch.tensor(1.0))
    assert part_sum(torch.zeros(0, 3)).item() == 0

"""Keys and values of a batch whose rows, one context each, have any lengths. Pure torch.

Rows of similar length lie side by side: the capacity of a row is a power of two of pages, and all rows of one capacity
share one tensor per layer, their bucket. So a step reads them as views, pads a row to less than twice its length, and
writes only new tokens. A row moves to the next bucket when its capacity is used up: amortized constant cost per token.

Invariants: the rows of a bucket are in the slots 0, 1, 2, ... without gaps, the same ones in each layer; token i of a
row is at position i of its slot. What lies beyond a row's length is finite, and is overwritten before it counts: so to
take tokens back is to make the length smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Of a row in a layer: [heads, tokens, size] each."""
INITIAL_SLOTS = 4
"""Slots that a bucket's tensors have at first."""


@dataclass(eq=False, slots=True)
class BatchRow:
    """A row of the engine's batch. length: computed tokens. capacity: tokens that fit without a move; 0: in no bucket.
    slot: its index in the bucket. states: of layers without keys and values, while the row is not in a pass
    (row_cache.py)."""

    length: int = 0
    capacity: int = 0
    slot: int = 0
    states: list[Any] | None = None


@dataclass(slots=True)
class LayerStorage:
    """Keys and values of a layer, by capacity: [slots, heads, capacity, size]."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(self, capacity: int, slots: int, indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new tokens into a bucket of `slots` slots. keys, values: [tokens, heads, size]. indices: [tokens *
        heads], of each token's heads, counted over slots, heads and positions."""
        for buckets, new in ((self.keys, keys), (self.values, values)):
            bucket = _grown(buckets, capacity, slots, new)
            bucket.view(-1, new.shape[-1]).index_copy_(0, indices, new.reshape(-1, new.shape[-1]))

    def copy(self, from_room: int, from_slot: int, to_room: int, to_slot: int, length: int) -> None:
        """Copy a row from slot to slot."""
        for buckets in (self.keys, self.values):
            if from_room in buckets:
                source = buckets[from_room][from_slot, :, :length]
                _grown(buckets, to_room, to_slot + 1, source.transpose(0, 1))[to_slot, :, :length] = source

    def free(self, capacity: int) -> None:
        """Free a bucket's memory."""
        self.keys.pop(capacity, None)
        self.values.pop(capacity, None)

    def read(self, row: BatchRow) -> KeysAndValues:
        """A copy of a row's keys and values."""
        keys, values = (
            buckets[row.capacity][row.slot, :, : row.length].clone() for buckets in (self.keys, self.values)
        )
        return keys, values

    def insert(self, row: BatchRow, saved: KeysAndValues) -> None:
        """Write a row that was read."""
        for buckets, tensor in zip((self.keys, self.values), saved, strict=True):
            bucket = _grown(buckets, row.capacity, row.slot + 1, tensor.transpose(0, 1))
            bucket[row.slot, :, : tensor.shape[1]] = tensor


class Buckets:
    """The buckets of all layers. page: tokens of a page."""

    def __init__(self, layers: Iterable[LayerStorage], page: int) -> None:
        self._layers = list(layers)
        self._page = page
        self._rows: dict[int, list[BatchRow]] = {}

    def rows(self, capacity: int) -> int:
        """Number of rows in a bucket."""
        return len(self._rows[capacity])

    def reserve(self, row: BatchRow, tokens: int) -> None:
        """Give a row capacity for `tokens` tokens; its contents stay."""
        if row.capacity >= tokens:
            return
        capacity, old = max(row.capacity, self._page), (row.capacity, row.slot)
        while capacity < tokens:
            capacity *= 2
        bucket = self._rows.setdefault(capacity, [])
        if row.capacity:
            for layer in self._layers:
                layer.copy(*old, capacity, len(bucket), row.length)
            self.remove(row)
        row.capacity, row.slot = capacity, len(bucket)
        bucket.append(row)

    def remove(self, row: BatchRow) -> None:
        """Remove a row; the last one of its bucket takes its slot."""
        if not row.capacity:
            return
        bucket = self._rows[row.capacity]
        last = bucket.pop()
        if last is not row:
            for layer in self._layers:
                layer.copy(last.capacity, last.slot, row.capacity, row.slot, last.length)
            last.slot = row.slot
            bucket[row.slot] = last
        if not bucket:
            for layer in self._layers:
                layer.free(row.capacity)
        row.capacity = 0

    def save(self, row: BatchRow) -> list[KeysAndValues]:
        """A copy of what a row has computed, by layer."""
        return [layer.read(row) for layer in self._layers]

    def restore(self, row: BatchRow, saved: list[KeysAndValues], length: int) -> None:
        """Give a row without a capacity a copy of what was computed, so many tokens."""
        self.reserve(row, length)
        for layer, tensors in zip(self._layers, saved, strict=True):
            layer.insert(row, tensors)
        row.length = length


def _grown(buckets: dict[int, torch.Tensor], capacity: int, slots: int, new: torch.Tensor) -> torch.Tensor:
    """The bucket's tensor with so many slots at least. new: [tokens, heads, size], for its shape and type."""
    bucket = buckets.get(capacity)
    if bucket is not None and bucket.shape[0] >= slots:
        return bucket
    count = INITIAL_SLOTS if bucket is None else 2 * bucket.shape[0]
    # Zeros, as what was never written may be no number, and would remain so under any mask.
    grown = new.new_zeros(max(count, slots), new.shape[1], capacity, new.shape[2])
    if bucket is not None:
        grown[: bucket.shape[0]] = bucket
    buckets[capacity] = grown
    return grown

"""Storage for the keys and values of a batch whose rows have different lengths. Pure torch.

The capacity of a row is a power of two times the page size. All rows of one capacity share one tensor per layer, their
bucket. So a pass reads the rows of a bucket as views, pads a row to less than twice its length, and writes only new
tokens. A row moves to the next bucket when its capacity is used up, at amortized constant cost per token. A bucket has
at most twice as many slots as rows, so all buckets together have room for less than four times the tokens of their
rows, counted in pages. Plans assume less, KV_STORAGE_FACTOR in pipeline/sizing/memory.py, from measurements.

Invariants: the rows of a bucket use the slots 0, 1, 2, ... without gaps, the same slots in each layer; token i of a row
is at position i of its slot. Values after a row's length are finite and are overwritten before they are used, so the
last tokens of a row can be removed by making its length smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a row in one layer: [heads, tokens, size] each."""


def _num_slots(rows: int) -> int:
    """Slots that the tensors of a bucket of so many rows get, when they get others."""
    return rows * 5 // 4


@dataclass(eq=False, slots=True)
class BatchRow:
    """A row of the engine's batch, with one context.

    length: number of computed tokens. capacity: number of tokens that fit into its bucket; 0: it is in no bucket. slot:
    index in the bucket. state_layers: for each recurrent layer, a copy of its cache with the states of this
    row, valid while they are not in the layers themselves (row_cache.py)."""

    length: int = 0
    capacity: int = 0
    slot: int = 0
    state_layers: list[Any] | None = None


@dataclass(slots=True)
class LayerStorage:
    """Keys and values of a layer, by capacity: [slots, heads, capacity, size]."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(
        self, capacity: int, bucket_rows: int, indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write new tokens into a bucket, enlarged to at least `bucket_rows` slots. keys, values: [tokens, heads,
        size]. indices: [tokens * heads], index of each head of each token in the bucket flattened to [slots * heads *
        capacity, size]."""
        for buckets, tensor in ((self.keys, keys), (self.values, values)):
            bucket = _ensure_slots(buckets, capacity, bucket_rows, tensor)
            bucket.view(-1, tensor.shape[-1]).index_copy_(0, indices, tensor.reshape(-1, tensor.shape[-1]))

    def copy(self, from_capacity: int, from_slot: int, to_capacity: int, to_slot: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another slot."""
        for buckets in (self.keys, self.values):
            if from_capacity in buckets:
                source = buckets[from_capacity][from_slot, :, :length]
                _ensure_slots(buckets, to_capacity, to_slot + 1, source.transpose(0, 1))[to_slot, :, :length] = source

    def shrink(self, capacity: int, rows: int) -> None:
        """Free the slots of a bucket that has `rows` rows left, if it needs less than half of them."""
        for buckets in (self.keys, self.values):
            if capacity in buckets and buckets[capacity].shape[0] > 2 * rows:
                bucket = buckets.pop(capacity)
                if rows:
                    buckets[capacity] = bucket[: _num_slots(rows)].clone()

    def read(self, row: BatchRow) -> KeysAndValues:
        """Return a copy of a row's keys and values."""
        keys, values = (
            buckets[row.capacity][row.slot, :, : row.length].clone() for buckets in (self.keys, self.values)
        )
        return keys, values

    def insert(self, row: BatchRow, saved: KeysAndValues) -> None:
        """Write keys and values that `read` returned into a row's slot."""
        for buckets, tensor in zip((self.keys, self.values), saved, strict=True):
            bucket = _ensure_slots(buckets, row.capacity, row.slot + 1, tensor.transpose(0, 1))
            bucket[row.slot, :, : tensor.shape[1]] = tensor


class Buckets:
    """The buckets of all layers. page_tokens: smallest capacity of a row, in tokens."""

    def __init__(self, layers: Iterable[LayerStorage], page_tokens: int) -> None:
        self._layers = list(layers)
        self._page_tokens = page_tokens
        self._rows: dict[int, list[BatchRow]] = {}

    def num_rows(self, capacity: int) -> int:
        """Number of rows in a bucket."""
        return len(self._rows[capacity])

    def reserve(self, row: BatchRow, tokens: int) -> None:
        """Make a row's capacity at least `tokens`, with the same contents."""
        if row.capacity >= tokens:
            return
        capacity, old_place = max(row.capacity, self._page_tokens), (row.capacity, row.slot)
        while capacity < tokens:
            capacity *= 2
        bucket = self._rows.setdefault(capacity, [])
        if row.capacity:
            for layer in self._layers:
                layer.copy(*old_place, capacity, len(bucket), row.length)
            self.remove(row)
        row.capacity, row.slot = capacity, len(bucket)
        bucket.append(row)

    def remove(self, row: BatchRow) -> None:
        """Remove a row; the last one of its bucket takes its slot."""
        if not row.capacity:
            return
        bucket = self._rows[row.capacity]
        last_row = bucket.pop()
        if last_row is not row:
            for layer in self._layers:
                layer.copy(last_row.capacity, last_row.slot, row.capacity, row.slot, last_row.length)
            last_row.slot = row.slot
            bucket[row.slot] = last_row
        for layer in self._layers:
            layer.shrink(row.capacity, len(bucket))
        row.capacity = 0

    def save(self, row: BatchRow) -> list[KeysAndValues]:
        """Return a copy of a row's keys and values, by layer."""
        return [layer.read(row) for layer in self._layers]

    def restore(self, row: BatchRow, saved: list[KeysAndValues], length: int) -> None:
        """Set a row that is in no bucket to keys and values that `save` returned, `length` tokens."""
        self.reserve(row, length)
        for layer, tensors in zip(self._layers, saved, strict=True):
            layer.insert(row, tensors)
        row.length = length


def _ensure_slots(buckets: dict[int, torch.Tensor], capacity: int, slots: int, like: torch.Tensor) -> torch.Tensor:
    """Return the bucket's tensor, enlarged if it has fewer than `slots` slots. like: [tokens, heads, size], has the
    tensor's number of heads, size and type."""
    bucket = buckets.get(capacity)
    if bucket is not None and bucket.shape[0] >= slots:
        return bucket
    # Zeros: memory that was never written may have NaN, which no mask removes.
    new_bucket = like.new_zeros(_num_slots(slots), like.shape[1], capacity, like.shape[2])
    if bucket is not None:
        new_bucket[: bucket.shape[0]] = bucket
    buckets[capacity] = new_bucket
    return new_bucket

"""Keys and values of a batch whose rows, one context each, have any lengths. Pure torch.

Rows of similar length lie side by side: each row has room for a power of two of pages, and all rows with the same room
share one tensor per layer, their bucket. So a step reads them as views, pads a row to less than twice its length, and
writes only what is new: a row moves to the next bucket when its room is used up, which costs a token a constant.

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
    """A context that is computed beside others. length: tokens of it that are computed. room: tokens that it has room
    for, 0 if it is in no bucket. slot: its place in the bucket. states: what layers without keys and values hold of
    it, while it is not among the rows that they compute (row_cache.py)."""

    length: int = 0
    room: int = 0
    slot: int = 0
    states: list[Any] | None = None


@dataclass(slots=True)
class LayerStorage:
    """Keys and values of a layer, by room: [slots, heads, room, size]."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(self, room: int, slots: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new tokens into a bucket of so many slots. keys, values: [tokens, heads, size]. places: of each token's
        heads [tokens * heads], counted over slots, heads and positions."""
        for buckets, new in ((self.keys, keys), (self.values, values)):
            bucket = _grown(buckets, room, slots, new)
            bucket.view(-1, new.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))

    def copy(self, from_room: int, from_slot: int, to_room: int, to_slot: int, length: int) -> None:
        """Copy a row from slot to slot."""
        for buckets in (self.keys, self.values):
            if from_room in buckets:
                source = buckets[from_room][from_slot, :, :length]
                _grown(buckets, to_room, to_slot + 1, source.transpose(0, 1))[to_slot, :, :length] = source

    def free(self, room: int) -> None:
        """Free a bucket's memory."""
        self.keys.pop(room, None)
        self.values.pop(room, None)

    def read(self, row: BatchRow) -> KeysAndValues:
        """A copy of a row's keys and values."""
        keys, values = (buckets[row.room][row.slot, :, : row.length].clone() for buckets in (self.keys, self.values))
        return keys, values

    def insert(self, row: BatchRow, saved: KeysAndValues) -> None:
        """Write a row that was read."""
        for buckets, tensor in zip((self.keys, self.values), saved, strict=True):
            bucket = _grown(buckets, row.room, row.slot + 1, tensor.transpose(0, 1))
            bucket[row.slot, :, : tensor.shape[1]] = tensor


class Buckets:
    """The buckets of all layers. page: tokens of a page."""

    def __init__(self, layers: Iterable[LayerStorage], page: int) -> None:
        self._layers = list(layers)
        self._page = page
        self._rows: dict[int, list[BatchRow]] = {}

    def rows(self, room: int) -> int:
        """Number of rows in a bucket."""
        return len(self._rows[room])

    def reserve(self, row: BatchRow, tokens: int) -> None:
        """Have room for so many tokens of a row, which keeps what it has."""
        if row.room >= tokens:
            return
        room, old = max(row.room, self._page), (row.room, row.slot)
        while room < tokens:
            room *= 2
        bucket = self._rows.setdefault(room, [])
        if row.room:
            for layer in self._layers:
                layer.copy(*old, room, len(bucket), row.length)
            self.remove(row)
        row.room, row.slot = room, len(bucket)
        bucket.append(row)

    def remove(self, row: BatchRow) -> None:
        """Remove a row; the last one of its bucket takes its slot."""
        if not row.room:
            return
        bucket = self._rows[row.room]
        last = bucket.pop()
        if last is not row:
            for layer in self._layers:
                layer.copy(last.room, last.slot, row.room, row.slot, last.length)
            last.slot = row.slot
            bucket[row.slot] = last
        if not bucket:
            for layer in self._layers:
                layer.free(row.room)
        row.room = 0

    def save(self, row: BatchRow) -> list[KeysAndValues]:
        """A copy of what a row has computed, by layer."""
        return [layer.read(row) for layer in self._layers]

    def restore(self, row: BatchRow, saved: list[KeysAndValues], length: int) -> None:
        """Give a row without a room a copy of what was computed, so many tokens."""
        self.reserve(row, length)
        for layer, tensors in zip(self._layers, saved, strict=True):
            layer.insert(row, tensors)
        row.length = length


def _grown(buckets: dict[int, torch.Tensor], room: int, slots: int, new: torch.Tensor) -> torch.Tensor:
    """The bucket's tensor with so many slots at least. new: [tokens, heads, size], for its shape and type."""
    bucket = buckets.get(room)
    if bucket is not None and bucket.shape[0] >= slots:
        return bucket
    count = INITIAL_SLOTS if bucket is None else 2 * bucket.shape[0]
    # Zeros, as what was never written may be no number, and would remain so under any mask.
    grown = new.new_zeros(max(count, slots), new.shape[1], room, new.shape[2])
    if bucket is not None:
        grown[: bucket.shape[0]] = bucket
    buckets[room] = grown
    return grown

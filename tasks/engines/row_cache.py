"""The cache that a model computes with: of each row, keys and values where a layer attends, and else its state.

A layer that attends writes into its storage (row_storage.py) in place. A layer of another kind (Mamba, gated delta net,
short convolution) has one state for each row, of constant size: transformers' own layer holds those of the rows of one
pass after another. While it is the same rows that are computed nothing is copied; else states are put together anew.

Invariant: a state is that after all of its row's computed tokens, so rows of a model that has states cannot be cut
(`can_crop`), and all rows of a pass compute as many new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.row_attention import RowPass, current
from staleflow.tasks.engines.row_storage import BatchRow, Buckets, KeysAndValues, LayerStorage


class AttentionRows(CacheLayerMixin):
    """A layer that attends."""

    def __init__(self, index: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._index = index
        self.storage = LayerStorage()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: its storage grows as it is written."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return current.get().update(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # RowPass knows the sizes

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class AttentionAndStateRows(LinearAttentionLayer, AttentionRows):
    """A layer that attends and has a state (Falcon-H1)."""

    def __init__(self, index: int, number_of_states: int) -> None:
        AttentionRows.__init__(self, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A copy of what a row has computed: `length` tokens."""

    length: int
    attention: list[KeysAndValues]
    states: list[Any]


class RowCache(Cache):
    """The cache of a batch. config: the model's. page: tokens; see Buckets. Raises ConfigError for a model whose layers
    are of other kinds."""

    def __init__(self, config: Any, page: int) -> None:
        layers = [_layer(index, layer) for index, layer in enumerate(DynamicCache(config=config).layers)]
        super().__init__(layers=layers)
        self._storages = {i: layer.storage for i, layer in enumerate(layers) if isinstance(layer, AttentionRows)}
        self._buckets = Buckets(self._storages.values(), page)
        self._stateful = [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.continues = True
        """Whether states go on from several new tokens at once."""
        self._present: list[BatchRow] = []
        """The rows whose states the layers hold, in this order."""

    @property
    def can_crop(self) -> bool:
        """Whether computed tokens can be taken back, by making a row's length smaller."""
        return not self._stateful

    def begin_pass(self, counts: Sequence[tuple[BatchRow, int]], expanding: set[int], device: torch.device) -> RowPass:
        """Make room for a pass over these rows, so many new tokens each. expanding: see RowPass."""
        for row, count in counts:
            self._buckets.reserve(row, row.length + count)
        row_pass = RowPass(counts, self._buckets, self._storages, expanding, device)
        if self._stateful:
            self._select([counts[i][0] for i in row_pass.order])
        return row_pass

    def remove(self, row: BatchRow) -> None:
        """Forget a row."""
        self._buckets.remove(row)
        self._put_down([row])
        row.states, row.length = None, 0

    def save(self, row: BatchRow) -> SavedRow:
        """A copy of what a row has computed."""
        self._put_down([row])
        return SavedRow(row.length, self._buckets.save(row), row.states or [])

    def restore(self, row: BatchRow, saved: SavedRow) -> None:
        """Have a row that has computed nothing go on from a copy."""
        self._buckets.restore(row, saved.attention, saved.length)
        row.states = saved.states or None

    def _put_down(self, rows: Sequence[BatchRow]) -> None:
        """Have rows hold their states themselves, and the layers none."""
        if any(row in self._present for row in rows):
            self._select([])

    def _select(self, rows: list[BatchRow]) -> None:
        """Have the layers hold the states of these rows: of all that go on, or of new ones."""
        if rows == self._present:
            return
        for index, row in enumerate(self._present):
            row.states = [_states_of(self.layers[i], slice(index, index + 1)) for i in self._stateful]
        for number, i in enumerate(self._stateful):
            if rows and rows[0].states is not None:
                self.layers[i] = _joined([row.states[number] for row in rows if row.states is not None])
            else:
                self.layers[i] = _without_states(self.layers[i])
        self._present = rows


def _layer(index: int, layer: Any) -> Any:
    """Our layer in place of a DynamicCache's. What a window hides is kept: the mask hides it, and tokens can be taken
    back."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        attends = isinstance(layer, DynamicLayer)
        return AttentionAndStateRows(index, layer.number_of_states) if attends else layer
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return AttentionRows(index)
    if not isinstance(layer, CacheLayerMixin):  # it holds nothing
        return layer
    raise ConfigError(f"the model has layers with a {type(layer).__name__}, which the transformers engine cannot batch")


def _without_states(layer: Any) -> Any:
    """A layer with no states that writes into the same storage."""
    clone = copy.copy(layer)
    LinearAttentionLayer.__init__(clone, number_of_states=layer.number_of_states)
    return clone


def _states_of(layer: Any, rows: slice) -> Any:
    """The layer with the states of some of its rows, as views."""
    return _with_states(layer, lambda states: states[rows], layer)


def _joined(layers: list[Any]) -> Any:
    """A layer with the states of all rows of these, copied."""
    return _with_states(layers[0], lambda *states: torch.cat(states), *layers)


def _with_states(like: Any, make: Any, *layers: Any) -> Any:
    clone = copy.copy(like)
    for kind in ("conv_states", "recurrent_states"):
        of_each = [getattr(layer, kind) for layer in layers]
        states = {key: None if state is None else make(*(states_of_layer[key] for states_of_layer in of_each))
                  for key, state in of_each[0].items()}  # fmt: skip
        setattr(clone, kind, states)
    return clone

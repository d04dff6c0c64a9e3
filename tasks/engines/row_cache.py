"""The cache of a batch in a transformers model: keys and values of attention layers, and states of recurrent layers.

An attention layer writes keys and values into its storage (row_storage.py) in place. A recurrent layer (Mamba, gated
delta net, short convolution) has one state of constant size for each row. The transformers class of the layer stores
the states of the rows of one pass in one tensor. If the next pass has the same rows, nothing is copied; otherwise the
states are saved in their rows, and the states of the new rows are concatenated.

Invariant: a state includes all computed tokens of its row. So a model with recurrent layers cannot remove tokens from a
row (`can_crop`), and all rows of a pass must have the same number of new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
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
from staleflow.tasks.engines.row_attention import RowPass, current_row_pass
from staleflow.tasks.engines.row_storage import BatchRow, Buckets, KeysAndValues, LayerStorage


class AttentionLayerCache(CacheLayerMixin):
    """The cache of an attention layer."""

    def __init__(self, index: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._index = index
        self.storage = LayerStorage()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the storage is allocated when it is written."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return current_row_pass.get().update(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # RowPass knows the sizes

    def get_seq_length(self) -> int:
        return 0  # RowPass knows the lengths

    def get_max_length(self) -> int:
        return -1


class AttentionStateLayerCache(LinearAttentionLayer, AttentionLayerCache):
    """The cache of a layer that has both attention and a recurrent state (Falcon-H1)."""

    def __init__(self, index: int, number_of_states: int) -> None:
        AttentionLayerCache.__init__(self, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A copy of a row's cache after `length` tokens. keys_and_values: by attention layer. state_layers:
    for each recurrent layer, a copy of its cache with the states of this row."""

    length: int
    keys_and_values: list[KeysAndValues]
    state_layers: list[Any]


class RowCache(Cache):
    """The cache of a batch of rows.

    Args:
        config: Configuration of the model. Raises ConfigError if it has layers of other kinds.
        page_tokens: See Buckets.
    """

    def __init__(self, config: Any, page_tokens: int) -> None:
        layers = [_layer_cache(index, layer) for index, layer in enumerate(DynamicCache(config=config).layers)]
        super().__init__(layers=layers)
        self._storages = {i: layer.storage for i, layer in enumerate(layers) if isinstance(layer, AttentionLayerCache)}
        self._buckets = Buckets(self._storages.values(), page_tokens)
        self._recurrent_layers = [
            i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        self.can_split_input = True
        """Whether recurrent layers compute several new tokens correctly from a state that is not empty. RowModel sets
        it."""
        self.has_latents = False
        """Whether some layers cache latents, and compute keys and values from those of all rows in each pass. RowModel
        sets it."""
        self._loaded_rows: list[BatchRow] = []
        """The rows whose states are in the layers, in this order."""

    @property
    def can_crop(self) -> bool:
        """Whether the last tokens of a row can be removed by making its length smaller."""
        return not self._recurrent_layers

    def begin_pass(
        self, rows: Sequence[tuple[BatchRow, int]], latent_layers: set[int], device: torch.device
    ) -> RowPass:
        """Allocate the storage for a pass. rows: its rows, each with the number of its new tokens.
        latent_layers: see RowPass."""
        for row, count in rows:
            self._buckets.reserve(row, row.length + count)
        row_pass = RowPass(rows, self._buckets, self._storages, latent_layers, device)
        if self._recurrent_layers:
            self._load_states([rows[i][0] for i in row_pass.order])
        return row_pass

    def remove(self, row: BatchRow) -> None:
        """Remove a row and all that it has computed."""
        self._buckets.remove(row)
        self._move_states_to_rows([row])
        row.state_layers, row.length = None, 0

    def save(self, row: BatchRow) -> SavedRow:
        """Return a copy of a row's cache."""
        self._move_states_to_rows([row])
        # Cloned: a row's states are views of a tensor with those of the other rows of its last pass.
        state_layers = [_map_states(torch.clone, layer) for layer in row.state_layers or []]
        return SavedRow(row.length, self._buckets.save(row), state_layers)

    def restore(self, row: BatchRow, saved: SavedRow) -> None:
        """Fill an empty row from a saved copy."""
        self._buckets.restore(row, saved.keys_and_values, saved.length)
        row.state_layers = saved.state_layers or None

    def _move_states_to_rows(self, rows: Sequence[BatchRow]) -> None:
        """If one of these rows has its state in the layers, move the states of all rows from there to the rows."""
        if any(row in self._loaded_rows for row in rows):
            self._load_states([])

    def _load_states(self, rows: list[BatchRow]) -> None:
        """Put the states of these rows into the layers; those that were there are saved in their rows. Either all of
        these rows have a state, or all of them are new."""
        if rows == self._loaded_rows:
            return
        for index, row in enumerate(self._loaded_rows):
            rows_slice = slice(index, index + 1)
            row.state_layers = [_map_states(itemgetter(rows_slice), self.layers[i]) for i in self._recurrent_layers]
        for number, i in enumerate(self._recurrent_layers):
            if rows and rows[0].state_layers is not None:
                layers_to_join = (row.state_layers[number] for row in rows if row.state_layers is not None)
                self.layers[i] = _map_states(lambda *states: torch.cat(states), *layers_to_join)
            else:
                self.layers[i] = _clear_states(self.layers[i])
        self._loaded_rows = rows


def _layer_cache(index: int, layer: Any) -> Any:
    """The cache to use instead of `layer`, which is that of a DynamicCache. Sliding windows are applied by the mask:
    tokens outside of the window are stored, too, so the last tokens of a row can be removed."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        attends = isinstance(layer, DynamicLayer)
        return AttentionStateLayerCache(index, layer.number_of_states) if attends else layer
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return AttentionLayerCache(index)
    if not isinstance(layer, CacheLayerMixin):  # a layer without a cache
        return layer
    raise ConfigError(f"the model has layers with a {type(layer).__name__}, which the transformers engine cannot batch")


def _clear_states(layer: Any) -> Any:
    """A copy of a layer from which the states are left out; it shares the layer's storage."""
    clone = copy.copy(layer)
    LinearAttentionLayer.__init__(clone, number_of_states=layer.number_of_states)
    return clone


def _map_states(function: Callable[..., torch.Tensor], *layers: Any) -> Any:
    """A copy of the first layer whose states are `function` of the states of all layers, each [rows, ...]."""
    clone = copy.copy(layers[0])
    for kind in ("conv_states", "recurrent_states"):
        layer_states = [getattr(layer, kind) for layer in layers]
        states = {key: None if state is None else function(*(states[key] for states in layer_states))
                  for key, state in layer_states[0].items()}  # fmt: skip
        setattr(clone, kind, states)
    return clone

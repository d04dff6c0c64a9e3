"""Attention of a batch in which each row attends to its own context, for all transformers models.

A pass computes new tokens of several rows; they are packed into one sequence, row after row. Rows of the same bucket
with similar numbers of new tokens are computed together, padded to the longest of them. The module is registered by
transformers' public AttentionInterface and AttentionMaskInterface: the model passes its mask (causal, sliding window,
chunked) as a function of two positions, and scale, soft cap and sinks.

Most models attend to the cached keys and values themselves, which are read in place. Some cache a smaller tensor and
compute keys and values from it in each pass (latent attention, arXiv 2405.04434). Such a latent layer gets the cached
tensors of all contexts, and passes the keys and values that it computes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from staleflow.tasks.engines.row_storage import BatchRow, Buckets, LayerStorage

ATTENTION_NAME = "staleflow_batch"
"""Name of this attention for the argument attn_implementation of a model."""


@dataclass(frozen=True, slots=True)
class PassPart:
    """R rows of a bucket that are computed together in a pass. Q: largest number of new tokens of a row. K: largest
    context length."""

    capacity: int
    slots: slice | torch.Tensor
    """[R] slots of the rows in the bucket."""
    pass_indices: slice | torch.Tensor
    """[R * Q] indices of the new tokens in the pass. For padding it is the row's first new token."""
    unpadded: torch.Tensor | None
    """Which of these R * Q tokens are not padding; None if there is no padding."""
    output_indices: slice | torch.Tensor
    """Indices of the tokens without padding in the pass."""
    positions: torch.Tensor
    """[R, 1, Q, 1] positions of the new tokens in their contexts."""
    num_keys: int
    """K."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of a bucket's rows. bucket_rows: number of rows in the bucket, with and without new tokens.
    pass_slice: their range in the pass. slots, positions: [tokens] slot in the bucket and position in the context of
    each token."""

    capacity: int
    bucket_rows: int
    pass_slice: slice
    slots: torch.Tensor
    positions: torch.Tensor


class RowPass:
    """State of one forward pass, shared by the attention of all layers.

    Args:
        rows: Rows with the number of their new tokens; the rows must have capacity for them. `order` has the indices of
            the rows in the order of the pass.
        buckets: The buckets of these rows.
        layers: Storage of each layer, by index.
        latent_layers: Indices of the layers known to be latent. A pass over empty rows without padding, in which
            both kinds get the same keys, adds those that it detects.
        device: The device of the storage.
    """

    def __init__(
        self,
        rows: Sequence[tuple[BatchRow, int]],
        buckets: Buckets,
        layers: dict[int, LayerStorage],
        latent_layers: set[int],
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._latent_layers = latent_layers
        self._layers_by_keys: dict[int, tuple[int, torch.Tensor]] = {}
        """The layer of each keys tensor that `update` has returned unexpanded, by the tensor's id; the tensor is kept
        so that its id stays unique."""
        self.order = sorted(range(len(rows)), key=lambda i: (rows[i][0].capacity, rows[i][0].slot))
        self._parts: list[PassPart] = []
        self._new_tokens: list[NewTokens] = []
        self._masks_by_heads: dict[tuple[int, int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """Masks, and the same repeated for all heads of a group, by the id of the masks, the number of heads and the
        dtype; the masks are kept so that their id stays unique."""
        self._storage_indices: dict[int, list[torch.Tensor]] = {}
        """The argument `indices` of `LayerStorage.write` for each bucket, by the number of heads."""
        self._device = device
        rows_by_capacity: dict[int, list[tuple[BatchRow, int, int]]] = {}
        start = 0
        for row, count in (rows[i] for i in self.order):
            rows_by_capacity.setdefault(row.capacity, []).append((row, count, start))
            start += count
        for capacity, members in rows_by_capacity.items():
            self._new_tokens.append(_new_tokens(capacity, members, buckets.num_rows(capacity), device))
            rows_by_width: dict[int, list[tuple[BatchRow, int, int]]] = {}
            for member in members:
                rows_by_width.setdefault((member[1] - 1).bit_length(), []).append(member)
            self._parts += [_pass_part(capacity, similar_rows, device) for similar_rows in rows_by_width.values()]

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the new tokens, [B, heads, tokens, size] each, into a layer's storage. Returns the
        same tensors; for a latent layer the cached tensors of all contexts, [1, heads, sum of R * K of all parts,
        size]."""
        flat_keys, flat_values = _flat(keys), _flat(values)
        heads = keys.shape[1]
        if heads not in self._storage_indices:
            head_offsets = torch.arange(heads, device=self._device)
            self._storage_indices[heads] = [
                (
                    (new_tokens.slots[:, None] * heads + head_offsets) * new_tokens.capacity
                    + new_tokens.positions[:, None]
                ).ravel()
                for new_tokens in self._new_tokens
            ]
        for new_tokens, indices in zip(self._new_tokens, self._storage_indices[heads], strict=True):
            keys_and_values = flat_keys[new_tokens.pass_slice], flat_values[new_tokens.pass_slice]
            self._layers[layer].write(new_tokens.capacity, new_tokens.bucket_rows, indices, *keys_and_values)
        if layer in self._latent_layers:
            return self._contexts(self._layers[layer].keys), self._contexts(self._layers[layer].values)
        self._layers_by_keys[id(keys)] = layer, keys
        return keys, values

    def masks(self, may_attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Return the mask of each part, [R, 1, Q, K]: 0 where a token may attend to a position, else -inf. may_attend:
        the model's mask function."""
        zero = torch.zeros((), dtype=torch.long, device=self._device)
        outputs = []
        for part in self._parts:
            key_positions = torch.arange(part.num_keys, device=self._device)[None, None, None, :]
            is_visible = may_attend(zero, zero, part.positions, key_positions)
            outputs.append(torch.zeros(is_visible.shape, device=self._device).masked_fill_(~is_visible, -torch.inf))
        return outputs

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        masks: list[torch.Tensor],
        scale: float | None,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of each new token, [B, tokens, heads, size]. query: [B, heads, tokens, size]. key,
        value: tensors that `update` has returned; of a latent layer, those computed from them."""
        batch, heads, tokens, size = query.shape
        flat_query = _flat(query)
        output: torch.Tensor | None = None
        for number, (part, keys, values) in enumerate(self._read(layer, key, value)):
            rows, groups = keys.shape[:2]
            heads_per_group, width = heads // groups, part.positions.shape[2]
            mask = self._repeat_masks(masks, heads_per_group, query.dtype)[number]
            # Heads that share keys become more queries of one head, so that keys are not copied.
            queries = flat_query[part.pass_indices].view(rows, width, groups, heads_per_group, size)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(rows, groups, heads_per_group * width, size)
            if cap is None and sinks is None:
                attention_output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            else:
                attention_output = _attend(queries, keys, values, mask, scale, cap, sinks)
            attention_output = (
                attention_output.view(rows, groups, heads_per_group, width, -1)
                .permute(0, 3, 1, 2, 4)
                .reshape(rows * width, heads, -1)
            )
            if part.unpadded is not None:
                attention_output = attention_output[part.unpadded]
            if len(self._parts) == 1 and isinstance(part.output_indices, slice):
                output = attention_output
                break
            if output is None:
                output = attention_output.new_empty(batch * tokens, heads, attention_output.shape[-1])
            output[part.output_indices] = attention_output
        assert output is not None
        return output.view(batch, tokens, heads, -1)

    def _read(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[PassPart, torch.Tensor, torch.Tensor]]:
        """Yield each part with the keys and values of its contexts, [R, heads, K, size] each."""
        if id(key) in self._layers_by_keys:
            storage = self._layers[
                self._layers_by_keys[id(key)][0]
            ]  # a layer that shares keys with another one reads that one's storage
            for part in self._parts:
                index = part.slots, slice(None), slice(part.num_keys)
                yield part, storage.keys[part.capacity][index], storage.values[part.capacity][index]
            return
        self._latent_layers.add(layer)
        start = 0
        for part in self._parts:
            shape = len(part.positions), part.num_keys
            token_range = slice(start, start + shape[0] * shape[1])
            keys, values = (tensor[0, :, token_range].unflatten(1, shape).transpose(0, 1) for tensor in (key, value))
            yield part, keys, values
            start = token_range.stop

    def _repeat_masks(self, masks: list[torch.Tensor], heads_per_group: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Repeat masks for all heads of a group of `heads_per_group`."""
        key = id(masks), heads_per_group, dtype
        if key not in self._masks_by_heads:
            self._masks_by_heads[key] = masks, [mask.to(dtype).repeat(1, 1, heads_per_group, 1) for mask in masks]
        return self._masks_by_heads[key][1]

    def _contexts(self, buckets: dict[int, torch.Tensor]) -> torch.Tensor:
        parts = [
            buckets[part.capacity][part.slots, :, : part.num_keys].transpose(0, 1).flatten(1, 2) for part in self._parts
        ]
        return torch.cat(parts, 1)[None]


current_row_pass: ContextVar[RowPass] = ContextVar("current_row_pass")
"""The pass that the current thread computes."""


def _new_tokens(
    capacity: int, rows: list[tuple[BatchRow, int, int]], bucket_rows: int, device: torch.device
) -> NewTokens:
    slots = [row.slot for row, count, _ in rows for _ in range(count)]
    positions = [row.length + i for row, count, _ in rows for i in range(count)]
    first = rows[0][2]
    indices = torch.tensor([slots, positions], device=device)
    return NewTokens(capacity, bucket_rows, slice(first, first + len(slots)), indices[0], indices[1])


def _pass_part(capacity: int, rows: list[tuple[BatchRow, int, int]], device: torch.device) -> PassPart:
    width = max(count for _, count, _ in rows)
    unpadded = [number * width + i for number, (_, count, _) in enumerate(rows) for i in range(count)]
    pass_indices = [first + (i if i < count else 0) for _, count, first in rows for i in range(width)]
    positions = [row.length + (i if i < count else 0) for row, count, _ in rows for i in range(width)]
    return PassPart(
        capacity=capacity,
        slots=_indices([row.slot for row, _, _ in rows], device),
        pass_indices=_indices(pass_indices, device),
        unpadded=None if len(unpadded) == len(pass_indices) else torch.tensor(unpadded, device=device),
        output_indices=_indices([pass_indices[index] for index in unpadded], device),
        positions=torch.tensor(positions, device=device).view(len(rows), 1, width, 1),
        num_keys=max(row.length + count for row, count, _ in rows),
    )


def _indices(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """Return indices as a slice if they are consecutive, which reads without copying; else as a tensor."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, device=device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape [B, heads, tokens, size] to [B * tokens, heads, size]."""
    batch, heads, tokens, size = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * tokens, heads, size)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap on its scores (Gemma 2, arXiv 2408.00118) or with a sink for each head, an additional
    score without a value (gpt-oss, arXiv 2508.10925). sinks: [heads]."""
    scores = (query @ keys.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1) @ values
    groups, queries = scores.shape[1:3]
    query_sinks = sinks.to(scores.dtype).view(groups, -1).repeat_interleave(queries // (sinks.numel() // groups), 1)
    scores = torch.cat([scores, query_sinks[None, :, :, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ values


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that a model calls in each layer, after it has updated its cache with key and value."""
    layer: Any = module.layer_idx
    return current_row_pass.get().attend(layer, query, key, value, attention_mask, scaling, softcap, s_aux), None


def masks(*args: Any, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    """Mask function that a model calls for each of its kinds of attention. The model passes the result to
    `attention`."""
    return current_row_pass.get().masks(mask_function)


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, masks)

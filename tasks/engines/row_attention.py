"""Attention of a pass over rows of a batch, each to its own context, in any model of transformers.

A pass computes some new tokens of some rows, one row's after the other's. Rows in the same bucket that compute about as
many tokens are computed side by side, padded to the longest of them. It reaches the model by transformers' public
AttentionInterface and AttentionMaskInterface: the model says what may be attended to (everything before, a window, a
chunk) as a function of two positions, and how (scale, soft cap, sinks).

Most models attend to what they have cached, which is then read where it lies. Some cache less, and expand it in each
pass (latent attention, arXiv 2405.04434): their layers are handed all that is cached of the contexts, and attend to
what they make of it.
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

NAME = "staleflow_batch"
"""Of this attention, as a model's attn_implementation."""


@dataclass(frozen=True, slots=True)
class Part:
    """R rows of a bucket that are computed side by side, Q new tokens each at most, over K positions."""

    capacity: int
    slots: slice | torch.Tensor
    """Of the rows in the bucket."""
    tokens: slice | torch.Tensor
    """[R * Q] places of their new tokens in the pass; of padding, the row's first."""
    token_indices: torch.Tensor | None
    """Which of these R * Q are no padding; None if all."""
    to: slice | torch.Tensor
    """Their places in the pass."""
    positions: torch.Tensor
    """[R, 1, Q, 1] of the new tokens in their contexts."""
    keys: int
    """K."""


@dataclass(frozen=True, slots=True)
class Written:
    """The new tokens of a bucket's rows: where they are in the pass, and [tokens] their slots and positions."""

    capacity: int
    rows: int
    tokens: slice
    slots: torch.Tensor
    positions: torch.Tensor


class RowPass:
    """Attention state of one forward pass, shared by all layers.

    counts: (row, number of its new tokens); rows must have capacity for them. `order`: of the rows in the pass. layers:
    by index. expanding: layers that expand their cached keys and values, as far as known; others are added in a pass
    over rows without any cached token, in which there is no difference.
    """

    def __init__(
        self,
        counts: Sequence[tuple[BatchRow, int]],
        buckets: Buckets,
        layers: dict[int, LayerStorage],
        expanding: set[int],
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._expanding = expanding
        self._returned: dict[int, tuple[int, torch.Tensor]] = {}
        """By the id of the keys that `update` has returned: the layer that attends to what it has cached."""
        self.order = sorted(range(len(counts)), key=lambda i: (counts[i][0].capacity, counts[i][0].slot))
        self._parts: list[Part] = []
        self._written: list[Written] = []
        self._shared: dict[tuple[int, int], list[torch.Tensor]] = {}
        """By the id of masks and the heads that share keys: the masks of all of their queries."""
        self._places: dict[int, list[torch.Tensor]] = {}
        self._device = device
        by_room: dict[int, list[tuple[BatchRow, int, int]]] = {}
        start = 0
        for row, count in (counts[i] for i in self.order):
            by_room.setdefault(row.capacity, []).append((row, count, start))
            start += count
        for capacity, rows in by_room.items():
            self._written.append(_written(capacity, rows, buckets.rows(capacity), device))
            alike: dict[int, list[tuple[BatchRow, int, int]]] = {}
            for member in rows:
                alike.setdefault((member[1] - 1).bit_length(), []).append(member)
            self._parts += [_part(capacity, members, device) for members in alike.values()]

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' keys and values, [B, heads, tokens, size] each, into a layer's storage. Returns them,
        or all that is cached of the contexts, [1, heads, R * K of each part, size], if the layer expands that."""
        flat_keys, flat_values = _flat(keys), _flat(values)
        heads = keys.shape[1]
        if heads not in self._places:
            of_head = torch.arange(heads, device=self._device)
            self._places[heads] = [
                ((written.slots[:, None] * heads + of_head) * written.capacity + written.positions[:, None]).ravel()
                for written in self._written
            ]
        for written, slots in zip(self._written, self._places[heads], strict=True):
            new = flat_keys[written.tokens], flat_values[written.tokens]
            self._layers[layer].write(written.capacity, written.rows, slots, *new)
        if layer in self._expanding:
            return self._contexts(self._layers[layer].keys), self._contexts(self._layers[layer].values)
        self._returned[id(keys)] = layer, keys
        return keys, values

    def masks(self, allowed: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """[R, 1, Q, K] for each part: 0 where a token may attend to a position, else -inf."""
        zero = torch.zeros((), dtype=torch.long, device=self._device)
        outputs = []
        for part in self._parts:
            key_positions = torch.arange(part.keys, device=self._device)[None, None, None, :]
            visible_mask = allowed(zero, zero, part.positions, key_positions)
            outputs.append(torch.zeros(visible_mask.shape, device=self._device).masked_fill_(~visible_mask, -torch.inf))
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
        """[B, tokens, heads, size] what each new token attends to. query: [B, heads, tokens, size]. key, value: what
        `update` has returned, or what the layer has expanded that to."""
        batch, heads, tokens, size = query.shape
        flat = _flat(query)
        output: torch.Tensor | None = None
        for number, (part, keys, values) in enumerate(self._read(layer, key, value)):
            rows, groups = keys.shape[:2]
            each, width = heads // groups, part.positions.shape[2]
            mask = self._of_all(masks, each, query.dtype)[number]
            # Heads that share keys are queries side by side: no key is copied for each of them.
            queries = flat[part.tokens].view(rows, width, groups, each, size)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(rows, groups, each * width, size)
            if cap is None and sinks is None:
                attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            else:
                attended = _attend(queries, keys, values, mask, scale, cap, sinks)
            attended = (
                attended.view(rows, groups, each, width, -1).permute(0, 3, 1, 2, 4).reshape(rows * width, heads, -1)
            )
            if part.token_indices is not None:
                attended = attended[part.token_indices]
            if len(self._parts) == 1 and isinstance(part.to, slice):
                output = attended
                break
            if output is None:
                output = attended.new_empty(batch * tokens, heads, attended.shape[-1])
            output[part.to] = attended
        assert output is not None
        return output.view(batch, tokens, heads, -1)

    def _read(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor]]:
        """[R, heads, K, size] keys and values of each part's contexts."""
        if id(key) in self._returned:
            storage = self._layers[self._returned[id(key)][0]]  # of another layer, if it shares its keys
            for part in self._parts:
                of_part = part.slots, slice(None), slice(part.keys)
                yield part, storage.keys[part.capacity][of_part], storage.values[part.capacity][of_part]
            return
        self._expanding.add(layer)
        start = 0
        for part in self._parts:
            shape = len(part.positions), part.keys
            token_range = slice(start, start + shape[0] * shape[1])
            keys, values = (of_all[0, :, token_range].unflatten(1, shape).transpose(0, 1) for of_all in (key, value))
            yield part, keys, values
            start = token_range.stop

    def _of_all(self, masks: list[torch.Tensor], each: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Masks of all queries of so many heads that share keys."""
        if (id(masks), each) not in self._shared:
            self._shared[id(masks), each] = [mask.to(dtype).repeat(1, 1, each, 1) for mask in masks]
        return self._shared[id(masks), each]

    def _contexts(self, buckets: dict[int, torch.Tensor]) -> torch.Tensor:
        parts = [
            buckets[part.capacity][part.slots, :, : part.keys].transpose(0, 1).flatten(1, 2) for part in self._parts
        ]
        return torch.cat(parts, 1)[None]


current: ContextVar[RowPass] = ContextVar("current")
"""The pass that this thread computes."""


def _written(capacity: int, rows: list[tuple[BatchRow, int, int]], slots_used: int, device: torch.device) -> Written:
    slots = [row.slot for row, count, _ in rows for _ in range(count)]
    positions = [row.length + i for row, count, _ in rows for i in range(count)]
    first = rows[0][2]
    indices = torch.tensor([slots, positions], device=device)
    return Written(capacity, slots_used, slice(first, first + len(slots)), indices[0], indices[1])


def _part(capacity: int, rows: list[tuple[BatchRow, int, int]], device: torch.device) -> Part:
    width = max(count for _, count, _ in rows)
    token_indices = [number * width + i for number, (_, count, _) in enumerate(rows) for i in range(count)]
    tokens = [first + (i if i < count else 0) for _, count, first in rows for i in range(width)]
    positions = [row.length + (i if i < count else 0) for row, count, _ in rows for i in range(width)]
    return Part(
        capacity=capacity,
        slots=_places([row.slot for row, _, _ in rows], device),
        tokens=_places(tokens, device),
        token_indices=None if len(token_indices) == len(tokens) else torch.tensor(token_indices, device=device),
        to=_places([tokens[index] for index in token_indices], device),
        positions=torch.tensor(positions, device=device).view(len(rows), 1, width, 1),
        keys=max(row.length + count for row, count, _ in rows),
    )


def _places(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """As a slice if they follow one another, so that they are read without copying."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, device=device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[B, heads, tokens, size] as [B * tokens, heads, size]."""
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
    """Attention whose scores have a soft cap (Gemma 2, arXiv 2408.00118), or that may attend to nothing, as far as a
    head's sink says (gpt-oss, arXiv 2508.10925). sinks: [heads]."""
    scores = (query @ keys.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1) @ values
    groups, queries = scores.shape[1:3]
    of_query = sinks.to(scores.dtype).view(groups, -1).repeat_interleave(queries // (sinks.numel() // groups), 1)
    scores = torch.cat([scores, of_query[None, :, :, None].expand(*scores.shape[:3], 1)], -1)
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
    """What a model calls for attention of this name, after its cache was updated with key and value."""
    layer: Any = module.layer_idx
    return current.get().attend(layer, query, key, value, attention_mask, scaling, softcap, s_aux), None


def masks(*args: Any, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    """What a model calls for the mask of each of its kinds of attention, and hands to `attention` in its layers."""
    return current.get().masks(mask_function)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masks)

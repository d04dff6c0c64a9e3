"""Attention of transformers' continuous batching, each request over its own context.

Without flash attention the library computes a step's attention as that of one sequence: each query over the contexts of
all requests, under a mask that leaves it its own: work for requests times the tokens of all contexts, and a list of as
many places in the cache as these, made in Python. Here requests of few new tokens, which are those that decode, are
computed side by side, padded to the longest context among those of like length, and those of many, which prefill, one
by one.

Only for models all of whose layers attend to everything before. It builds on what is beneath transformers' public
manager, in the versions that pyproject.toml allows, and runs in the manager's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

Places = np.ndarray[Any, np.dtype[np.int64]]

SHORT = 8
"""Most new tokens of a request that is computed beside others: one, and what is drafted."""


class NewTokens(NamedTuple):
    """A request's part of a step. first: the place of its first new token among the step's. new: how many it has.
    past: tokens of its context that the cache holds. pages: the cache's pages that hold its context."""

    first: int
    new: int
    past: int
    pages: Sequence[int]


class Alone(NamedTuple):
    """A request that is computed alone. context: the places of its context among what is read from the cache."""

    first: int
    new: int
    context: slice


@dataclass(frozen=True, slots=True)
class Beside:
    """R requests that are computed side by side, with Q new tokens at most and contexts padded to K."""

    read: int
    """Where their contexts begin among what is read from the cache, one after another, K places each."""
    queries: torch.Tensor | None
    """[R * Q] places of their new tokens, long; of padding, the request's first. None if these are all of the step's
    new tokens, in order."""
    own: torch.Tensor | None
    """[R * Q] whether it is no padding; None if nothing is."""
    mask: torch.Tensor
    """[R, 1, H * Q, K] 0 where each may attend to, else -inf; once for each of the H heads that share keys."""


@dataclass(frozen=True, slots=True)
class StepRequests:
    """A step's requests. read_index: [contexts] places in the cache of what they attend to, long."""

    read_index: torch.Tensor
    beside: tuple[Beside, ...]
    alone: tuple[Alone, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the cache: page_tokens of a page, and stride places from a page to the next. Of the model: heads that share
    keys, and the type that it computes in."""

    page_tokens: int
    stride: int
    sharing: int
    dtype: torch.dtype


def step_requests(requests: Sequence[NewTokens], shape: Shape, device: torch.device) -> StepRequests:
    """A step's requests, in its order."""
    # Side by side are those whose contexts are of like length, so that less than half of what is read is padding.
    alike: dict[int, list[NewTokens]] = {}
    places: list[Places] = []
    beside, alone, read = [], [], 0
    for row in requests:
        length = row.past + row.new
        if row.new <= SHORT:
            alike.setdefault((-(-length // shape.page_tokens)).bit_length(), []).append(row)
        else:
            places.append(_places([row], length, shape).ravel())
            alone.append(Alone(row.first, row.new, slice(read, read + length)))
            read += length
    for rows in alike.values():
        keys = max(row.past + row.new for row in rows)
        places.append(_places(rows, keys, shape).ravel())
        beside.append(_beside(rows, keys, read, shape, device, all_of_them=len(rows) == len(requests)))
        read += len(rows) * keys
    return StepRequests(torch.from_numpy(np.concatenate(places)).to(device), tuple(beside), tuple(alone))


def _beside(
    rows: Sequence[NewTokens], keys: int, read: int, shape: Shape, device: torch.device, *, all_of_them: bool
) -> Beside:
    first, new, past = (np.array([row[i] for row in rows], np.int64)[:, None] for i in range(3))
    of_row = np.arange(new.max())[None, :]
    own = of_row < new
    hidden = np.arange(keys)[None, None, :] > (past + of_row)[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    queries = None if all_of_them and own.all() else torch.from_numpy(np.where(own, first + of_row, first).ravel())
    return Beside(
        read=read,
        queries=None if queries is None else queries.to(device),
        own=None if own.all() else torch.from_numpy(own.ravel()).to(device),
        mask=mask[:, None].repeat(1, 1, shape.sharing, 1).to(device),
    )


def _places(rows: Sequence[NewTokens], keys: int, shape: Shape) -> Places:
    """[rows, keys] places of their contexts in the cache. Beyond a context its first place is repeated: what lies in
    pages that nothing was written to may be no number, and would remain so under any mask."""
    page_tokens = shape.page_tokens
    pages = np.zeros((len(rows), -(-keys // page_tokens)), np.int64)
    for number, row in enumerate(rows):
        held = row.pages[: -(-(row.past + row.new) // page_tokens)]
        pages[number, : len(held)] = held
    places = pages[:, :, None] * shape.stride + np.arange(page_tokens)
    places = places.reshape(len(rows), pages.shape[1] * page_tokens)[:, :keys]
    lengths = np.array([row.past + row.new for row in rows], np.int64)[:, None]
    return np.where(np.arange(keys)[None, :] < lengths, places, places[:, :1])


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: StepRequests, scale: float | None
) -> torch.Tensor:
    """[tokens, heads, size] what each new token attends to. query: [heads, tokens, size]; key, value: [groups of heads,
    len(rows.read_index), size]."""
    heads, tokens, size = query.shape
    groups = key.shape[0]
    each = heads // groups
    found = query.new_empty(tokens, heads, size)
    for some in rows.beside:
        count, _, rest, keys = some.mask.shape
        width, held = rest // each, slice(some.read, some.read + count * keys)
        # Heads that share keys are queries side by side: no key is copied for each of them.
        asked = query if some.queries is None else query[:, some.queries]
        told = scaled_dot_product_attention(
            asked.reshape(groups, each, count, width, size).permute(2, 0, 1, 3, 4).reshape(count, groups, rest, size),
            key[:, held].view(groups, count, keys, size).transpose(0, 1),
            value[:, held].view(groups, count, keys, size).transpose(0, 1),
            attn_mask=some.mask,
            scale=scale,
        )
        told = told.view(count, groups, each, width, size).permute(0, 3, 1, 2, 4).reshape(count * width, heads, size)
        if some.queries is None:
            return told
        if some.own is None:
            found[some.queries] = told
        else:
            found[some.queries[some.own]] = told[some.own]
    for one in rows.alone:
        new, length = slice(one.first, one.first + one.new), one.context.stop - one.context.start
        mask = torch.ones(one.new, length, dtype=torch.bool, device=query.device).tril(length - one.new)
        told = scaled_dot_product_attention(
            query[None, :, new],
            key[None, :, one.context].repeat_interleave(each, 1),
            value[None, :, one.context].repeat_interleave(each, 1),
            attn_mask=mask,
            scale=scale,
        )
        found[new] = told[0].transpose(0, 1)
    return found


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention named sdpa: its own, but for steps whose arguments have `rows`."""
    rows = kwargs.get("rows")
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    layer: Any = module.layer_idx
    key, value = kwargs["cache"].update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
    return attend(query[0], key[0], value[0], rows, kwargs.get("scaling"))[None], None


class RequestAttention:
    """Has a batch processor, which nothing was given yet, compute attention so."""

    def __init__(self, processor: Any) -> None:
        self._inputs = inputs = processor.inputs_and_outputs
        (self._allocator,) = processor.cache.cache_allocators.values()
        config = inputs.config.get_text_config(decoder=True)
        self._shape = Shape(
            page_tokens=self._allocator.tokens_per_page,
            stride=self._allocator.block_physical_stride,
            sharing=config.num_attention_heads // self._allocator.num_key_value_heads,
            dtype=inputs.model_dtype,
        )
        self._rows: StepRequests | None = None
        # In place of the library's mask, and of its list of what is read from the cache.
        self._none = torch.zeros(1, 1, 1, 1, device=inputs.device)
        inputs.attention_mask = None
        written = processor.cache.extend_read_and_write_indices

        def extend(key: str, past: int, count: int, read_index: object, write_index: Any) -> None:
            written(key, past, count, None, write_index)

        processor.cache.extend_read_and_write_indices = extend
        self._prepare, self._arguments = inputs.prepare_batch_tensors, inputs.get_model_kwargs
        inputs.prepare_batch_tensors = self._prepare_batch_tensors
        inputs.get_model_kwargs = self._get_model_kwargs

    @staticmethod
    def fits(processor: Any) -> bool:
        """Whether the library would compute a step as one sequence, in layers that all attend to everything before."""
        of_all = list(processor.cache.cache_allocators) == ["full_attention"]
        return of_all and processor.inputs_and_outputs.attention_mask is not None

    def _prepare_batch_tensors(self, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        tables, requests, first = self._allocator.block_table, [], 0
        for future in requests_in_batch:
            state, count = future.state, future.query_length
            requests.append(NewTokens(first, count, state.position_offset, tables[state.request_id]))
            first += count
        self._prepare(requests_in_batch, *args, **kwargs)
        self._rows = step_requests(requests, self._shape, self._inputs.device)

    def _get_model_kwargs(self, use_padding: bool = False) -> Any:
        assert self._rows is not None
        arguments = self._arguments(use_padding=use_padding)
        arguments["rows"], arguments["read_index"] = self._rows, [self._rows.read_index]
        arguments["attention_mask"], arguments["is_causal"] = self._none, False
        return arguments


AttentionInterface.register("sdpa", attention)

"""Attention for rows that are packed into one sequence without padding.

All other operations of a model work on single tokens, so only attention must know where a row ends. Rows with the same
prompt share one copy of it in the sequence (tasks/training/shared_prompts.py), and each attends to it. On a GPU, in
bfloat16, one kernel computes all rows (`torch.nn.attention.varlen`); elsewhere each row takes a call of its own.

Invariants:
- A token attends only to earlier tokens of its own row; in a layer with a sliding window, to the last of them. A model
  with another kind of attention, such as chunks, raises PackingUnsupported, however short the rows are.
- Rows are packed only for a model that computed the same logits for packed rows as for each row alone, in a trial as
  long as its longest sequence (scales that depend on the position may begin at thousands of tokens). Any other model
  gets padded rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from staleflow.tasks.training.blocks import one_block_per_kind
from staleflow.tasks.training.shared_prompts import PromptBlock

ATTENTION_NAME = "staleflow_rows"
"""Name of this attention in transformers."""
IGNORED_ARGUMENTS = {"position_ids", "use_cache", "past_key_values", "cache_position", "is_causal", "output_attentions",
         "output_router_logits"}  # fmt: skip
"""Arguments of the attention that have no effect here. Any other argument with a value, such as a soft cap, raises
PackingUnsupported."""
COMPARED_BLOCKS = (PromptBlock(0, (3, 2)), PromptBlock(2, (1, 3)))
"""The rows of a trial whose logits are compared with those of each row alone: two without a shared prompt, two with
one. They are at the beginning and at the end of the trial's sequence."""
FILLER_TOKENS = 64
"""Length of the rows between the compared ones. Short, because the time of attention grows with its square."""
MAX_MASKED_TOKENS = 256
"""Maximum number of tokens after a prompt, if the prompt is not longer, for which attention on a CPU uses a mask. For
more tokens, and on a GPU, where kernels with a mask are slower, a causal kernel computes the prompt's attention again,
because it skips masked blocks of about this length."""

MIN_VARLEN_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability of the kernel for all rows."""
MAX_VARLEN_HEAD_SIZE = 256
"""Maximum head size of that kernel."""

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PackingUnsupported(Exception):
    """The model's attention cannot separate the rows of a sequence; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedRowLengths:
    """Lengths of the rows in a sequence."""

    blocks: tuple[PromptBlock, ...]

    @property
    def has_one_row(self) -> bool:
        """Whether there is only one row, for which the model's own attention is used."""
        return len(self.blocks) == 1 and len(self.blocks[0].suffix_lengths) == 1

    def positions(self, device: str) -> torch.Tensor:
        """Position of each token in its row, [1, T].

        >>> PackedRowLengths((PromptBlock(0, (3, 2)),)).positions("cpu")
        tensor([[0, 1, 2, 0, 1]])
        """
        positions = torch.from_numpy(np.concatenate([block.positions for block in self.blocks]))
        return positions[None].to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LocalMask:
    """Mask of layers with local attention over `size` tokens, a window or a chunk. Some models create one that no layer
    uses."""

    size: int


def _make_mask(*, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> LocalMask | None:
    """Mask function for transformers, which calls it for each kind of layer. Returns None for causal attention within
    rows. local_size: tokens of a window or a chunk. use_vmap: whether the model changes the mask by its own function,
    which raises PackingUnsupported."""
    if use_vmap:
        raise PackingUnsupported("the model's attention has a mask of its own")
    return None if local_size is None else LocalMask(local_size)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LocalMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    row_lengths: PackedRowLengths | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: [1, T, heads, D] from query, key and value of [1, heads, T, D]. row_lengths:
    None for a single row. Raises PackingUnsupported."""
    window: int | None = None
    if isinstance(attention_mask, LocalMask):
        if sliding_window != attention_mask.size:  # a chunk, say
            raise PackingUnsupported(f"layers attend to no more than {attention_mask.size} tokens")
        attention_mask, window = None, sliding_window
    if window is None and (row_lengths is None or row_lengths.has_one_row) and query.device.type == "cpu":
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return output
    if attention_mask is not None:
        raise PackingUnsupported(f"{type(module).__name__} has a mask of its own")
    unsupported_names = [name for name, value in kwargs.items() if name not in IGNORED_ARGUMENTS and value is not None]
    unsupported_names += ["dropout"] if dropout else []
    unsupported_names += ["sliding_window"] if sliding_window != window else []
    unsupported_names += [] if getattr(module, "is_causal", True) else ["is_causal = False"]
    if unsupported_names:
        raise PackingUnsupported(f"{type(module).__name__} has {', '.join(unsupported_names)}")
    blocks = (PromptBlock(0, (query.shape[2],)),) if row_lengths is None else row_lengths.blocks
    if _has_varlen_kernel(query):
        return _varlen_attention(query, key, value, blocks, window=window, scale=scaling), None
    attention = functools.partial(_causal, window=window, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    parts = iter(zip(*(sequence.split(_part_lengths(blocks), 2) for sequence in (query, key, value)), strict=True))
    outputs = [output.transpose(1, 2) for block in blocks for output in _block_attention(block, parts, attention)]
    return torch.cat(outputs, 1), None


def _part_lengths(blocks: tuple[PromptBlock, ...]) -> list[int]:
    """Lengths of the parts of a sequence: for each block its shared prompt, if any, and the rest of each row."""
    return [size for block in blocks for size in (block.prefix_length, *block.suffix_lengths) if size]


def _has_varlen_kernel(query: torch.Tensor) -> bool:
    """Whether one kernel can compute the attention of all rows: in half precision, on a GPU since Ampere."""
    return (
        query.is_cuda
        and len(query) == 1
        and _attention_dtype(query) in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= MAX_VARLEN_HEAD_SIZE
        and torch.cuda.get_device_capability(query.device) >= MIN_VARLEN_CAPABILITY
    )


def _attention_dtype(query: torch.Tensor) -> torch.dtype:
    """The type in which attention is computed: autocast's, or that of the queries."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: tuple[PromptBlock, ...],
    *,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of all rows in one kernel, [1, T, heads, D]. The queries of each part of the sequence attend to the
    keys of the shared prompt, if its row has such a prompt, and to the keys of the part."""
    dtype = _attention_dtype(query)
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    query_starts, key_starts, max_queries, max_keys = _varlen_starts(blocks, query.device)
    output: torch.Tensor = _varlen_kernel()(
        query,
        _with_prompts(key, blocks),
        _with_prompts(value, blocks),
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return _with_repeatable_gradient(output)[None]


def _with_repeatable_gradient(output: torch.Tensor) -> torch.Tensor:
    """Let the gradient of an attention kernel's output be computed equally each time. By default a GPU's kernels add up
    the gradients of queries in any order, so that no step would repeat bit for bit. docs/gpu.md says for which rows it
    was shown. Returns the output."""
    node = output.grad_fn
    # Attention by matrix products is repeatable, and these refuse the setting unless cuBLAS has it as well.
    if output.is_cuda and node is not None and "att" in node.name().lower():
        node.register_prehook(lambda gradients: torch.use_deterministic_algorithms(True))
        node.register_hook(lambda inputs, outputs: torch.use_deterministic_algorithms(False))
    return output


@functools.cache
def _varlen_kernel() -> Callable[..., torch.Tensor]:
    """The kernel for all rows, with fewer key than query heads. Imported at its first use, because that takes
    seconds."""
    from torch.nn.attention.varlen import varlen_attn

    # Before PyTorch 2.12 any number of heads is accepted, without the option.
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if has_option else varlen_attn


@functools.lru_cache(maxsize=2)
def _varlen_starts(
    blocks: tuple[PromptBlock, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Where the queries and the keys of each part begin, each [parts + 1] int32 with the end, and the most of each that
    a part has. Computed once for all layers."""
    num_queries = _part_lengths(blocks)
    num_keys = [
        length
        for block in blocks
        for length in ([block.prefix_length] if block.prefix_length else [])
        + [block.prefix_length + suffix for suffix in block.suffix_lengths]
    ]
    starts = [
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device, non_blocking=True)
        for lengths in (num_queries, num_keys)
    ]
    return starts[0], starts[1], max(num_queries), max(num_keys)


def _with_prompts(tensor: torch.Tensor, blocks: tuple[PromptBlock, ...]) -> torch.Tensor:
    """Keys or values with each shared prompt repeated before the rest of each of its rows. tensor: [T, heads, D]."""
    if not any(block.prefix_length for block in blocks):
        return tensor
    parts = iter(tensor.split(_part_lengths(blocks)))
    repeated_parts = list[torch.Tensor]()
    for block in blocks:
        prompt = [next(parts)] if block.prefix_length else []
        repeated_parts += prompt
        for _ in block.suffix_lengths:
            repeated_parts += [*prompt, next(parts)]
    return torch.cat(repeated_parts)


def _block_attention(
    block: PromptBlock, parts: Iterator[QueryKeyValue], attention: Callable[..., torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the attention of each part of a block, [1, heads, T, D]. Takes the block's parts from `parts`."""
    if not block.prefix_length:
        for _ in block.suffix_lengths:
            yield attention(*next(parts))
        return
    prompt = next(parts)
    yield attention(*prompt)
    for rest in block.suffix_lengths:
        query, *rest_keys_values = next(parts)
        key, value = (torch.cat(pair, 2) for pair in zip(prompt[1:], rest_keys_values, strict=True))
        if query.device.type == "cpu" and rest <= max(MAX_MASKED_TOKENS, block.prefix_length):
            yield attention(query, key, value)
        else:
            queries = torch.cat([prompt[0], query], 2)
            yield attention(queries, key, value)[:, :, block.prefix_length :]


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int | None, **options: Any
) -> torch.Tensor:
    """Causal attention of the last tokens of a row. query: of these tokens; key, value: of the whole row."""
    num_queries, length = query.shape[2], key.shape[2]
    if num_queries == length and (window is None or length <= window):
        return _with_repeatable_gradient(scaled_dot_product_attention(query, key, value, is_causal=True, **options))
    mask = torch.ones(num_queries, length, dtype=torch.bool, device=query.device).tril(length - num_queries)
    if window is not None:
        mask = mask.triu(length - num_queries - window + 1)
    return _with_repeatable_gradient(scaled_dot_product_attention(query, key, value, attn_mask=mask, **options))


def exclude_attention_from_compilation() -> None:
    """Let compiled models call this attention uncompiled. It depends on the lengths of rows, so that it would be
    compiled again for each micro-batch."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))


def enable_packing(model: Any, device: str, max_tokens: int) -> str:
    """Switch a model to packed rows, which it then computes from `row_lengths` and `position_ids`. Returns an empty
    string, or the reason why the model must compute padded rows. Calls without these arguments work as before.

    Args:
        max_tokens: Maximum length of a sequence with more than one row.
    """
    parameters = inspect.signature(model.forward).parameters
    accepts_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not (accepts_kwargs and "position_ids" in parameters and model._can_set_attn_implementation()):
        return f"{type(model).__name__} does not pass position_ids and row lengths on to its attention"
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _make_mask)
    original_attention = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        _try_packed(model, device, 0)
        with one_block_per_kind(model):
            _try_packed(model, device, max_tokens)
    except PackingUnsupported as error:
        model.set_attn_implementation(original_attention)
        return str(error)
    return ""


def _uses_tf32(device: torch.device) -> bool:
    """Whether products of float32 matrices are computed with fewer bits on a device."""
    return device.type == "cuda" and bool(torch.get_float32_matmul_precision() != "highest")


def _try_packed(model: Any, device: str, num_tokens: int) -> None:
    """Compare rows in a sequence with the same rows alone. Raises PackingUnsupported if they differ.

    Args:
        num_tokens: Length of the sequence; at least that of the compared rows.
    """
    size = sum(block.num_tokens for block in COMPARED_BLOCKS)
    num_fillers, remainder = divmod(max(0, num_tokens - 2 * size), FILLER_TOKENS)
    filler = [PromptBlock(0, (count,)) for count in [*[FILLER_TOKENS] * num_fillers, remainder] if count]
    rows = PackedRowLengths((*COMPARED_BLOCKS, *filler, *COMPARED_BLOCKS))
    tokens = torch.arange(size, device=device) % 5
    expected_parts, start = list[torch.Tensor](), 0
    total = sum(block.num_tokens for block in rows.blocks)
    kept_positions = torch.cat([torch.arange(size), torch.arange(total - size, total)]).to(device)
    sequence = torch.cat([tokens, torch.arange(total - 2 * size, device=device) % 5, tokens])
    with torch.no_grad():
        for block in COMPARED_BLOCKS:
            prompt, *rests = tokens[start : start + block.num_tokens].split(
                [block.prefix_length, *block.suffix_lengths]
            )
            alone = [model(input_ids=torch.cat([prompt, rest])[None], use_cache=False).logits[0] for rest in rests]
            expected_parts += [alone[0][: block.prefix_length], *(logits[block.prefix_length :] for logits in alone)]
            start += block.num_tokens
        inputs = {"input_ids": sequence[None], "position_ids": rows.positions(device), "row_lengths": rows}
        logits = model(**inputs, use_cache=False, logits_to_keep=kept_positions).logits[0]
    expected_logits = torch.cat([*expected_parts, *expected_parts])
    difference = float((logits - expected_logits).abs().max() / logits.abs().max())
    exact = logits.dtype in (torch.float32, torch.float64) and not _uses_tf32(logits.device)
    tolerance = 1e-4 if exact else 2e-2
    if not difference <= tolerance:
        raise PackingUnsupported(
            f"in a sequence of {total} tokens the logits of a row differ from those of the row alone, by "
            f"{difference:.1g} of the largest"
        )

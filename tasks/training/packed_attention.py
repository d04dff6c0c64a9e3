"""Attention of rows that stand one after another in a single sequence, without padding between them.

What a model does token by token then costs nothing for padding; only attention has to know where a row ends. Rows that
share their prompt have it in the sequence once (tasks/training/shared_prompts.py), and each attends to it.

Invariants:
- A token attends to those before it in its own row, and to no others.
- A model is given rows this way only if it was found, by trying, to compute for each what it does for that row alone:
  one whose other parts mix tokens, or whose attention is not this one's, gets padded rows as ever.
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
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from staleflow.tasks.training.shared_prompts import PromptBlock

NAME = "staleflow_rows"
"""As transformers knows this attention."""
KNOWN = {"position_ids", "use_cache", "past_key_values", "cache_position", "is_causal", "output_attentions"}
"""Further arguments of an attention that change nothing here. One with a value that is not among them, such as a
window or a cap, does."""
TRIED = (PromptBlock(0, (3, 2)), PromptBlock(2, (1, 3)))
"""What is tried: rows alone, and two that share their prompt."""
MASKED = 256
"""Tokens after a prompt, or as many as it has, of which attention is computed on a processor with a mask that lets the
first see all of the prompt. That leaves no pair out, as a causal kernel does, which works on blocks about this long. Of
longer ones, and on a GPU, where kernels that take a mask are slower ones, it is computed of the prompt as well."""

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class RowLengths:
    """Rows in a sequence, by their lengths. apart: whether every attention that was told of them keeps them apart."""

    blocks: tuple[PromptBlock, ...]
    apart: bool = True

    def positions(self, device: str) -> torch.Tensor:
        """[1, T] the place of each token in its row.

        >>> RowLengths((PromptBlock(0, (3, 2)),)).positions("cpu")
        tensor([[0, 1, 2, 0, 1]])
        """
        return torch.from_numpy(np.concatenate([block.positions for block in self.blocks]))[None].to(device)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    row_lengths: RowLengths | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D] from [1, heads, T, D]; without rows, of a single one."""
    plain = attention_mask is None and not dropout and getattr(module, "is_causal", True)
    plain = plain and all(value is None for name, value in others.items() if name not in KNOWN)
    if row_lengths is None or not plain:
        if row_lengths is not None:
            row_lengths.apart = False
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
        return found
    attention = functools.partial(
        scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    sizes = [size for block in row_lengths.blocks for size in (block.prompt, *block.rests) if size]
    parts = iter(zip(*(whole.split(sizes, 2) for whole in (query, key, value)), strict=True))
    attended = [output.transpose(1, 2) for block in row_lengths.blocks for output in _of_block(block, parts, attention)]
    return torch.cat(attended, 1), None


def _of_block(
    block: PromptBlock, parts: Iterator[QueryKeyValue], attention: Callable[..., torch.Tensor]
) -> Iterator[torch.Tensor]:
    """[1, heads, T, D] of each part of a block, from as many of the parts."""
    if not block.prompt:
        for _ in block.rests:
            yield attention(*next(parts), is_causal=True)
        return
    prompt = next(parts)
    yield attention(*prompt, is_causal=True)
    for rest in block.rests:
        query, *own = next(parts)
        key, value = (torch.cat(both, 2) for both in zip(prompt[1:], own, strict=True))
        if query.device.type == "cpu" and rest <= max(MASKED, block.prompt):
            seen = torch.ones(rest, block.prompt + rest, dtype=torch.bool).tril(block.prompt)
            yield attention(query, key, value, attn_mask=seen)
        else:
            whole = torch.cat([prompt[0], query], 2)
            yield attention(whole, key, value, is_causal=True)[:, :, block.prompt :]


def takes_rows(model: Any, device: str) -> bool:
    """Whether the model computes rows without padding, given `row_lengths` and `position_ids`. Its attention is changed
    if so; a single row without them it computes as ever."""
    taken = inspect.signature(model.forward).parameters
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    if not (passes_on and "position_ids" in taken and model._can_set_attn_implementation()):
        return False
    AttentionInterface.register(NAME, _attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if _same(model, device):
        return True
    model.set_attn_implementation(before)
    return False


def _same(model: Any, device: str) -> bool:
    """Whether rows one after another give what each gives alone."""
    rows = RowLengths(TRIED)
    tokens = torch.arange(sum(block.size for block in TRIED), device=device) % 5
    wanted, begin = list[torch.Tensor](), 0
    with torch.no_grad():
        for block in TRIED:
            prompt, *rests = tokens[begin : begin + block.size].split([block.prompt, *block.rests])
            alone = [model(input_ids=torch.cat([prompt, rest])[None], use_cache=False).logits[0] for rest in rests]
            wanted += [alone[0][: block.prompt], *(logits[block.prompt :] for logits in alone)]
            begin += block.size
        inputs = {"input_ids": tokens[None], "position_ids": rows.positions(device), "row_lengths": rows}
        found = model(**inputs, use_cache=False).logits[0]
    difference = (found - torch.cat(wanted)).abs().max()
    rounding = 1e-4 if found.dtype in (torch.float32, torch.float64) else 2e-2
    return rows.apart and bool(difference <= rounding * found.abs().max())

"""Attention of rows that stand one after another in a single sequence, without padding between them.

What a model does token by token then costs nothing for padding; only attention has to know where a row ends.

Invariants:
- A token attends to those before it in its own row, and to no others.
- A model is given rows this way only if it was found, by trying, to compute for each what it does for that row alone:
  one whose other parts mix tokens, or whose attention is not this one's, gets padded rows as ever.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "staleflow_rows"
"""As transformers knows this attention."""
KNOWN = {"position_ids", "use_cache", "past_key_values", "cache_position", "is_causal", "output_attentions"}
"""Further arguments of an attention that change nothing here. One with a value that is not among them, such as a
window or a cap, does."""
TRIED = (3, 2)
"""Lengths of the rows that are tried."""


@dataclass(slots=True)
class RowLengths:
    """Rows in a sequence, by their lengths. apart: whether every attention that was told of them keeps them apart."""

    lengths: tuple[int, ...]
    apart: bool = True

    def positions(self, device: str) -> torch.Tensor:
        """[1, T] the place of each token in its row.

        >>> RowLengths((3, 2)).positions("cpu")
        tensor([[0, 1, 2, 0, 1]])
        """
        return torch.cat([torch.arange(length) for length in self.lengths])[None].to(device)


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
    grouped = query.shape[1] != key.shape[1]
    parts = zip(*(whole.split(row_lengths.lengths, 2) for whole in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in parts
    ]
    return torch.cat(attended, 1), None


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
    tokens, rows = torch.arange(sum(TRIED), device=device), RowLengths(TRIED)
    with torch.no_grad():
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(TRIED)]
        inputs = {"input_ids": tokens[None], "position_ids": rows.positions(device), "row_lengths": rows}
        found = model(**inputs, use_cache=False).logits[0]
    wanted = torch.cat(alone)
    rounding = 1e-4 if found.dtype in (torch.float32, torch.float64) else 2e-2
    return rows.apart and bool((found - wanted).abs().max() <= rounding * wanted.abs().max())

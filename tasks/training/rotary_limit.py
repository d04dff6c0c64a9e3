"""The row length above which a model's rotary embedding depends on the other rows of the micro-batch.

Some rotary embeddings (longrope, dynamic NTK) choose the frequencies of all positions by the largest position of a
forward pass. Beyond their limit a row's logprobs depend on its micro-batch. The limit is found by calling the model's
own modules.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

NUM_COMPARED = 8
"""Positions whose rotation is compared."""
SEARCH_FACTOR = 4
"""The limit is searched up to this multiple of the model's stated context length."""


def max_row_length(model: Any, device: str) -> int | None:
    """Largest length of a row whose positions are rotated equally in any micro-batch; None without a limit. Restores
    the model's embeddings to those of short rows."""
    limits = [limit for module in model.modules() if _is_rotary(module) and (limit := _limit(module, device))]
    return min(limits, default=None)


def _is_rotary(module: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies may change; those of type "default" never do."""
    kind = getattr(module, "rope_type", "default")
    return (
        isinstance(kind, str) and kind != "default" and "position_ids" in inspect.signature(module.forward).parameters
    )


def _limit(module: Any, device: str) -> int | None:
    """Sequence length up to which the first positions are rotated equally; None without a limit."""
    expected = _rotation(module, NUM_COMPARED, device)

    def is_equal(tokens: int) -> bool:
        _rotation(module, NUM_COMPARED, device)  # resets the frequencies, which change back only in a short pass
        return bool(torch.equal(_rotation(module, tokens - 1, device), expected))

    low, high = NUM_COMPARED + 1, SEARCH_FACTOR * int(module.config.max_position_embeddings)
    limit = None
    if not is_equal(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_equal(middle) else (low, middle)
        limit = low
    _rotation(module, NUM_COMPARED, device)
    return limit


def _rotation(module: Any, last: int, device: str) -> torch.Tensor:
    """[1, NUM_COMPARED, D] rotation of the first positions in a pass whose last position is `last`."""
    positions = torch.tensor([[*range(NUM_COMPARED), last]], device=device)
    with torch.no_grad():
        output = module(torch.zeros(1, device=device), positions)
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first[:, :NUM_COMPARED]

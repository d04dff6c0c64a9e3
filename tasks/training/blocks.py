"""The blocks of a language model: the layers, one after the other, that its memory is divided by."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def blocks(model: Any) -> list[Any]:
    """The blocks of a Hugging Face model, as it names them itself; empty if it names none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute(model: Any) -> None:
    """Have each block keep only what comes into it and compute the rest again for its gradient. Where there is no
    gradient nothing changes. To be called before the model is divided into shards."""
    for block in blocks(model):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Any) -> Any:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No random numbers to restore: a trained model is in eval mode, without dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed

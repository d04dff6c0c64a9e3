"""The blocks of a language model: the layers, one after the other, that its memory is divided by."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def blocks(model: Any) -> list[Any]:
    """The blocks of a Hugging Face model, as it names them itself; empty if it names none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def one_layer_of_each_kind(model: Any) -> Iterator[None]:
    """While this lasts, the model computes one of its blocks of each kind, and passes over the others: what a kind of
    layer does with a sequence takes little time to find out. Blocks are of a kind if their modules are of the same
    classes and have the same settings."""
    kinds, returns_tuple = set[Hashable](), False

    def passes_over(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if returns_tuple else hidden

    def computes(forward: Any) -> Any:
        def computed(*args: Any, **kwargs: Any) -> Any:
            nonlocal returns_tuple
            output = forward(*args, **kwargs)
            returns_tuple = isinstance(output, tuple)
            return output

        return computed

    changed = [(block, vars(block).get("forward")) for block in blocks(model)]
    for block, _ in changed:
        kind = _kind(block)
        block.forward = passes_over if kind in kinds else computes(block.forward)
        kinds.add(kind)
    try:
        yield
    finally:
        for block, forward in changed:
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _kind(block: Any) -> Hashable:
    """The classes of a block's modules, and their settings but for the block's number."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, value) for key, value in sorted(vars(module).items()) if _is_setting(key, value)),
        )
        for name, module in block.named_modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    return name != "layer_idx" and isinstance(value, bool | int | float | str)


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

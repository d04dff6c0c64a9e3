"""The blocks of a language model: its layers, which are the units of sharding and of activation recomputation."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def blocks(model: Any) -> list[Any]:
    """The blocks of a Hugging Face model, by its `_no_split_modules`; empty if it declares none."""
    names = set(model._no_split_modules or ())
    # Sharding replaces a block's class with a subclass of another name.
    return [module for module in model.modules() if any(cls.__name__ in names for cls in type(module).__mro__)]


@contextmanager
def one_block_per_kind(model: Any) -> Iterator[None]:
    """Context manager: the model runs only the first block of each kind and skips the others, so that a property of all
    kinds of layers can be tested in little time. Blocks are of one kind if their modules have the same classes and
    settings."""
    kinds, returns_tuple = set[Hashable](), False

    def skip_block(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if returns_tuple else hidden

    def with_output_type(forward: Any) -> Any:
        def run_block(*args: Any, **kwargs: Any) -> Any:
            nonlocal returns_tuple
            output = forward(*args, **kwargs)
            returns_tuple = isinstance(output, tuple)
            return output

        return run_block

    original_forwards = [(block, vars(block).get("forward")) for block in blocks(model)]
    for block, _ in original_forwards:
        kind = _kind(block)
        block.forward = skip_block if kind in kinds else with_output_type(block.forward)
        kinds.add(kind)
    try:
        yield
    finally:
        for block, forward in original_forwards:
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _kind(block: Any) -> Hashable:
    """The classes of a block's modules and their settings, except for the block's index."""
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


def compile_blocks(model: Any) -> None:
    """Compile each block with torch.compile at its first call, for sequences of any length. Call before
    `enable_recomputation`."""
    for block in blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def enable_recomputation(model: Any) -> None:
    """Enable activation recomputation: each block stores only its input, and runs again in the backward pass. Without
    gradients nothing changes."""
    for block in blocks(model):
        block.forward = _with_recomputation(block.forward)


def _with_recomputation(forward: Any) -> Any:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No random numbers to restore: a trained model is in eval mode, without dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed

"""Recovery of a checkpoint's tensors from an engine that has fused some of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tensors = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def unfused(held: Tensors, shapes: Shapes, packed: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    """The checkpoint's tensors as views of the held ones: rows of a fused tensor, its parts in the order of `packed`,
    and the first rows of a padded one. None if one is missing or of another shape."""
    fused_of = {part: (whole, tuple(parts)) for whole, parts in packed.items() for part in parts}
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        tensor, first = held.get(name), 0
        if tensor is None:
            *front, module, leaf = name.split(".")
            whole, parts = fused_of.get(module, (module, ()))
            tensor = held.get(".".join([*front, whole, leaf]))
            for part in parts[: parts.index(module)] if module in parts else ():
                sibling = shapes.get(".".join([*front, part, leaf]))
                if sibling is None:
                    return None
                first += sibling[0]
        if tensor is None or tensor.ndim != len(shape):
            return None
        rows = tensor[first : first + shape[0]]
        if tuple(rows.shape) != shape:
            return None
        found[name] = rows
    return found

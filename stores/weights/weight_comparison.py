"""Compares weights part by part and bit for bit. Parts are tensors, arrays, or pieces of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from staleflow.stores.weights.weight_report import MAX_NAMES, WeightReport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """A part of an engine's weights, and the values it should be equal to."""

    name: str
    """The published tensor's name, with the piece of it where it is not all."""
    loaded: Any = None
    """The tensor or array that the engine computes with."""
    published: Any = None
    """The same part of the published weights."""
    incomparable_reason: str = ""
    """Why the two cannot be compared, if they cannot."""


def compare_parts(parts: Iterable[WeightPart]) -> WeightReport:
    """Compare parts with the values they should be equal to."""
    num_verified, incomparable_reasons, differing_names = 0, Counter[str](), list[str]()
    for part in parts:
        if part.incomparable_reason:
            incomparable_reasons[part.incomparable_reason] += 1
        elif have_equal_bits(part.loaded, part.published):
            num_verified += 1
        else:
            differing_names.append(part.name)
    return WeightReport(
        verified=num_verified,
        not_verified=dict(incomparable_reasons),
        contradicted=len(differing_names),
        names=tuple(differing_names[:MAX_NAMES]),
    )


def compare_by_name(loaded: Mapping[str, Any], published: Mapping[str, Any]) -> WeightReport:
    """Compare the weights of an engine that has them under the published names and shapes."""
    return compare_parts(
        WeightPart(
            name=name,
            loaded=loaded.get(name),
            published=published.get(name),
            incomparable_reason=""
            if name in loaded and name in published
            else "not in both the model and what is published",
        )
        for name in sorted({*loaded, *published})
    )


def have_equal_bits(left: Any, right: Any) -> bool:
    """Whether two tensors or arrays have equal types, shapes and bits. NaN equals itself, and -0 does not equal 0."""
    if left.dtype != right.dtype or tuple(left.shape) != tuple(right.shape):
        return False
    if isinstance(left, np.ndarray):
        return bool(left.tobytes() == right.tobytes())
    import torch

    return bool(torch.equal(integer_view(left.detach()), integer_view(right.detach().to(left.device))))


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as signed integers with the same bits. Raises KeyError for elements of more than eight
    bytes."""
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])

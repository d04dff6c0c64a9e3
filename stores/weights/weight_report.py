"""What is known of the weights that an engine has after a load.

Weights are compared part by part with what was published. A part is a published tensor, or the piece of one that a
worker of the engine has: rows of a fused tensor, an expert, a shard. Each part has one of three outcomes.

- Verified: it is equal bit for bit.
- Not verified: it could not be compared, for a reason that is given.
- Contradicted: it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from staleflow.stores.trajectory import InstanceId, PolicyVersion

MOST_NAMES = 8
"""Contradicted parts that a report names; all are counted."""
NO_PARTS = "the engine compares nothing"
"""Reason of a report that has no parts at all: nothing does not pass as verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of an engine's weights and what it should be equal to."""

    name: str
    """The published tensor's name, with the piece of it where it is not all."""
    held: Any = None
    """The tensor or array that the engine computes with."""
    published: Any = None
    """The same part of the published weights."""
    unknown: str = ""
    """Why the two cannot be compared, if they cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """The outcome of comparing an engine's weights with the published ones."""

    verified: int = 0
    """Parts that are equal, bit for bit."""
    not_verified: dict[str, int] = field(default_factory=dict)
    """Parts that could not be compared, by reason."""
    contradicted: int = 0
    """Parts that differ."""
    names: tuple[str, ...] = ()
    """Names of the first contradicted parts."""

    @property
    def outcome(self) -> str:
        """ "contradicted" if any part is; "verified" only if every part is and there are some; else "not verified"."""
        if self.contradicted:
            return "contradicted"
        return "verified" if self.verified and not self.not_verified else "not verified"

    @property
    def line(self) -> str:
        """The counts and reasons, for people.

        >>> WeightReport(verified=3, not_verified={"packed": 1}, contradicted=1, names=("norm.weight",)).line
        '3 parts verified, 1 not verified (packed), 1 contradicted (norm.weight)'
        """
        reasons = "; ".join(self.not_verified) or ("" if self.verified or self.contradicted else NO_PARTS)
        names = ", ".join(self.names) + (", ..." if self.contradicted > len(self.names) else "")
        return (
            f"{self.verified} parts verified, {sum(self.not_verified.values())} not verified"
            f"{f' ({reasons})' if reasons else ''}, {self.contradicted} contradicted{f' ({names})' if names else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """What an instance's pull of a version showed, as it is stored with the next commit."""

    instance: InstanceId
    version: PolicyVersion
    fingerprint: str
    """Fingerprint of the published weights that its own were compared with."""
    weights: WeightReport
    drift: float
    """Mean |logprob of the probe - the trainer's|, nats; 0 without a probe."""
    limit: float
    """The most that `drift` may be."""
    refused: str = ""
    """Why the instance was taken out of service before its next token; empty if it serves the version."""

    @property
    def outcome(self) -> str:
        """The weights' outcome; "contradicted" of an instance that was taken out of service."""
        return "contradicted" if self.refused else self.weights.outcome


def compared(parts: Iterable[Part]) -> WeightReport:
    """Compare parts with what they should be equal to."""
    verified, unknown, differing = 0, Counter[str](), list[str]()
    for part in parts:
        if part.unknown:
            unknown[part.unknown] += 1
        elif equal_bits(part.held, part.published):
            verified += 1
        else:
            differing.append(part.name)
    return WeightReport(
        verified=verified,
        not_verified=dict(unknown),
        contradicted=len(differing),
        names=tuple(differing[:MOST_NAMES]),
    )


def compared_by_name(held: Mapping[str, Any], published: Mapping[str, Any]) -> WeightReport:
    """Compare the weights of an engine that has them under the names and in the shapes they are published in."""
    return compared(
        Part(
            name=name,
            held=held.get(name),
            published=published.get(name),
            unknown="" if name in held and name in published else "not in both the model and what is published",
        )
        for name in sorted({*held, *published})
    )


def total(reports: Iterable[WeightReport]) -> WeightReport:
    """The report of all workers of an engine together."""
    reports = tuple(reports)
    unknown = Counter[str]()
    for report in reports:
        unknown.update(report.not_verified)
    return WeightReport(
        verified=sum(report.verified for report in reports),
        not_verified=dict(unknown),
        contradicted=sum(report.contradicted for report in reports),
        names=tuple(name for report in reports for name in report.names)[:MOST_NAMES],
    )


def equal_bits(one: Any, other: Any) -> bool:
    """Whether two tensors, or two arrays, are of one type and shape and equal bit for bit: NaN is equal to itself, and
    -0 is not equal to 0."""
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return bool(torch.equal(one.detach().view(whole), other.detach().to(one.device).view(whole)))

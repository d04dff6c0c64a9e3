"""Segments and deliveries for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.tasks.engines.base import SampledTokens


def sampled_segment(tokens: Any, logprobs: Any = 0.0, *, version: int = 0, instance: str = "a") -> Segment:
    """Return a segment of token ids. logprobs: one per token, or one for all."""
    ids = np.asarray(tokens, np.int32)
    values = np.full(len(ids), logprobs, np.float32)
    return Segment(version=PolicyVersion(version), instance=InstanceId(instance), tokens=ids, logprobs=values)


def delivery(
    trajectory: int, *segments: Segment, route_number: int = 1, start: int = 0, finish: FinishReason = FinishReason.STOP
) -> SampledTokens:
    """Return a delivery of segments, which end the turn of a trajectory unless `finish` says otherwise."""
    return SampledTokens(
        trajectory=TrajectoryId(trajectory), route_number=route_number, start=start, segments=segments, finish=finish
    )

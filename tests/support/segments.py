"""Segments and deliveries, as tests write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.tasks.engines.base import SampledTokens


def sampled_segment(tokens: Any, logprobs: Any = 0.0, *, version: int = 0, instance: str = "a") -> Segment:
    """A segment of some token ids. logprobs: of each of them, or one for all."""
    ids = np.asarray(tokens, np.int32)
    values = np.full(len(ids), logprobs, np.float32)
    return Segment(version=PolicyVersion(version), instance=InstanceId(instance), tokens=ids, logprobs=values)


def delivery(
    trajectory: int, *segments: Segment, route_number: int = 1, start: int = 0, finish: FinishReason = FinishReason.STOP
) -> SampledTokens:
    """A delivery of segments, which end a trajectory's turn unless `finish` says otherwise."""
    return SampledTokens(
        trajectory=TrajectoryId(trajectory), route_number=route_number, start=start, segments=segments, finish=finish
    )

"""A trajectory with context branches whose token ids equal their positions."""

from __future__ import annotations

import numpy as np

from staleflow.stores.trajectory import (
    EndedTrajectory,
    EnvSpan,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Segment,
    Trajectory,
    TrajectoryId,
)
from tests.support.segments import sampled_segment


def branching_row(version: int = 0) -> EndedTrajectory:
    """Return a row with a prompt of 3 tokens, three turns and three branches: from the start, after the first turn, and
    after the observation that follows it."""

    def sampled(first: int, last: int) -> Segment:
        tokens = np.arange(first, last, dtype=np.int32)
        return sampled_segment(tokens, -tokens / 100, version=version)

    def reply(first: int, last: int, after: int | None = None) -> EnvSpan:
        return EnvSpan(role="user", tokens=np.arange(first, last, dtype=np.int32), parent_end=after)

    spans = (
        sampled(3, 5), reply(5, 7), sampled(7, 9), reply(9, 10, 0), sampled(10, 12), reply(12, 13, 5), sampled(13, 15),
        reply(15, 16, 7), sampled(16, 18),
    )  # fmt: skip
    t = Trajectory(
        id=TrajectoryId(0), group=GroupId(0), prompt_tokens=np.arange(3, dtype=np.int32), spans=spans,
        v_traj=PolicyVersion(version), finish=FinishReason.STOP,
    )  # fmt: skip
    return EndedTrajectory(trajectory=t, fate=Fate.CONSUMED, step=version, advantage=1.0)

"""The words of the system as values: versions, segments, trajectories, groups. Pure: numpy and the standard library.

A group is the set of trajectories sampled for one prompt. Ids are dense integers, so that "nothing was lost" can be
checked by counting: group `g` owns the trajectories `g * members_started ... (g + 1) * members_started - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

TrajectoryId = NewType("TrajectoryId", int)
GroupId = NewType("GroupId", int)
PolicyVersion = NewType("PolicyVersion", int)
"""Optimizer steps finished. Step b starts from version b and publishes version b + 1."""
InstanceId = NewType("InstanceId", str)

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class FinishReason(Enum):
    """Why sampling ended."""

    STOP = "stop"
    LENGTH = "length"
    UNFINISHED = "unfinished"


class Fate(Enum):
    """How a trajectory's life ended. Every trajectory that was started has exactly one, or is still live."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    ABORTED = "aborted"


class AbortReason(Enum):
    """Why a trajectory was given up. The store keeps it with the row."""

    NONE = "none"
    SURPLUS_GROUP = "surplus_group"
    """No legal step is left for its version: finished work of others fills them all."""
    SURPLUS_MEMBER = "surplus_member"
    """Its group is complete without it."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed on it more often than it may be retried."""
    GROUP_FAILED = "group_failed"
    """A sibling failed for good and the group can no longer be completed."""
    NO_SIGNAL = "no_signal"
    """Filtered: all rewards of its group are equal, so no advantage can be learned from it."""
    RUN_ENDED = "run_ended"
    """The run stopped while it was in flight."""
    TOO_STALE = "too_stale"
    """The last step that may train it has begun without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens sampled in one go under one policy version on one instance."""

    version: PolicyVersion
    instance: InstanceId
    tokens: IntArray  # [T] token ids
    logprobs: FloatArray  # [T] log-probability under the sampling policy, nats

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.logprobs.shape, "one logprob a token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds since the run's start; 0 where it has not happened."""

    arrived_s: float = 0.0
    routed_s: float = 0.0
    sampled_s: float = 0.0
    rewarded_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response, from prompt to reward. `v_traj` is the oldest version any of its tokens may stem from."""

    id: TrajectoryId
    group: GroupId
    prompt_tokens: IntArray  # [P] token ids
    v_traj: PolicyVersion = PolicyVersion(-1)
    segments: tuple[Segment, ...] = ()
    finish: FinishReason = FinishReason.UNFINISHED
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """What the reward function did wrong, empty if nothing. Such a trajectory carries no gradient."""
    timings: Timings = Timings()

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, the prompt not counted."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def response_tokens(self) -> IntArray:
        """[T] token ids of the response, all segments in order."""
        return np.concatenate([s.tokens for s in self.segments]) if self.segments else np.zeros(0, np.int32)

    @property
    def logprobs(self) -> FloatArray:
        """[T] behaviour logprobs: each token's under the policy that sampled it, nats."""
        return np.concatenate([s.logprobs for s in self.segments]) if self.segments else np.zeros(0, np.float32)

    @property
    def versions(self) -> IntArray:
        """[T] policy version that sampled each token."""
        if not self.segments:
            return np.zeros(0, np.int32)
        return np.concatenate([np.full(len(s.tokens), s.version, np.int32) for s in self.segments])

    def with_segment(self, segment: Segment) -> Trajectory:
        """This trajectory continued by `segment`. An empty segment changes nothing."""
        return replace(self, segments=(*self.segments, segment)) if len(segment.tokens) else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A trajectory whose life is over, as the store remembers it."""

    trajectory: Trajectory
    fate: Fate
    reason: AbortReason = AbortReason.NONE
    step: int = -1
    """The training step that consumed it; for other fates the step that was next when it ended."""
    advantage: float = 0.0
    loss_mask: bool = True
    """Whether its tokens carried gradient."""

    @property
    def staleness(self) -> int:
        """v_train - v_traj for consumed trajectories, else -1."""
        return self.step - self.trajectory.v_traj if self.fate is Fate.CONSUMED else -1

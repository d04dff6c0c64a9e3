"""The system's value types: versions, segments, trajectories, groups. Pure: numpy and the standard library.

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
    """How a trajectory ended. Every trajectory that was started has exactly one fate, or is still live."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    ABORTED = "aborted"


class AbortReason(Enum):
    """Why a trajectory was aborted or filtered; stored with its row."""

    NONE = "none"
    SURPLUS_GROUP = "surplus_group"
    """No legal step is left for its version: other groups' finished work fills them all."""
    SURPLUS_MEMBER = "surplus_member"
    """Its group is complete without it."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed on it more often than retries are allowed."""
    GROUP_FAILED = "group_failed"
    """A sibling failed permanently, so the group can no longer be completed."""
    NO_SIGNAL = "no_signal"
    """Filtered: all rewards of its group are equal, so no advantage can be learned from it."""
    RUN_ENDED = "run_ended"
    """The run stopped while it was in flight."""
    TOO_STALE = "too_stale"
    """The last step that could have trained on it began without it."""


def ended_as(fate: Fate, reason: AbortReason) -> str:
    """How a trajectory ended, as stored ledgers and counts name it.

    >>> ended_as(Fate.ABORTED, AbortReason.RUN_ENDED)
    'aborted:run_ended'
    """
    return f"{fate.value}:{reason.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens sampled without interruption under one policy version on one instance."""

    version: PolicyVersion
    instance: InstanceId
    tokens: IntArray  # [T] token ids
    logprobs: FloatArray  # [T] log-probability under the sampling policy, nats

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.logprobs.shape, "one logprob per token"

    def without(self, first: int) -> Segment:
        """This segment without its first tokens."""
        return replace(self, tokens=self.tokens[first:], logprobs=self.logprobs[first:]) if first else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When a trajectory reached each stage, in seconds since the run's start; 0 if it has not."""

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
    """The reward function's error, empty if none. A trajectory with an error carries no gradient."""
    timings: Timings = Timings()

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, without the prompt."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def response_tokens(self) -> IntArray:
        """[T] token ids of the response, all segments in order."""
        return np.concatenate([s.tokens for s in self.segments]) if self.segments else np.zeros(0, np.int32)

    @property
    def logprobs(self) -> FloatArray:
        """[T] behaviour logprobs: of each token under the policy that sampled it, nats."""
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
    """An ended trajectory, as it is stored."""

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

"""Value types: versions, segments, trajectories, groups. Pure: numpy and the standard library.

A group is the set of trajectories sampled for one prompt. Ids are dense integers, so that "nothing was lost" can be
checked by counting: with `n` members started per group, group `g` has the trajectories `g * n ... (g + 1) * n - 1`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

from staleflow.stores.context_branches import ContextBranch, context_positions

TrajectoryId = NewType("TrajectoryId", int)
GroupId = NewType("GroupId", int)
PolicyVersion = NewType("PolicyVersion", int)
"""Optimizer steps finished. Step b starts from version b and publishes version b + 1."""
InstanceId = NewType("InstanceId", str)


def is_evaluation(number: int) -> bool:
    """Whether a trajectory or group belongs to an evaluation. Their ids are negative, and they are never in a ledger, a
    batch or a store."""
    return number < 0


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class FinishReason(Enum):
    """The reason why sampling ended. Stores keep the position of a member, so new ones go to the end; the same holds
    for Fate and AbortReason."""

    STOP = "stop"
    LENGTH = "length"
    UNFINISHED = "unfinished"


class Fate(Enum):
    """The outcome of a trajectory. Every started trajectory has exactly one fate, or is still live."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    ABORTED = "aborted"


class AbortReason(Enum):
    """The reason why a trajectory was aborted or filtered; stored with its row."""

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
    ENVIRONMENT_FAILED = "environment_failed"
    """Its environment failed more often than retries are allowed."""


def outcome_key(fate: Fate, reason: AbortReason) -> str:
    """Name of an outcome in stored ledgers and counts, from fate and reason.

    >>> outcome_key(Fate.ABORTED, AbortReason.RUN_ENDED)
    'aborted:run_ended'
    """
    return f"{fate.value}:{reason.value}"


def parse_outcome_key(key: str) -> tuple[Fate, AbortReason]:
    """The fate and reason of an outcome's name.

    >>> parse_outcome_key("aborted:run_ended")
    (<Fate.ABORTED: 'aborted'>, <AbortReason.RUN_ENDED: 'run_ended'>)
    """
    fate, _, reason = key.partition(":")
    return Fate(fate), AbortReason(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens sampled without interruption under one policy version on one instance."""

    version: PolicyVersion
    instance: InstanceId
    tokens: IntArray  # [T] token ids
    logprobs: FloatArray  # [T] log-probability under the sampling policy, nats

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.logprobs.shape, "one logprob per token"

    @property
    def finite_prefix_length(self) -> int:
        """Number of tokens before the first whose logprob is infinite or NaN; all if there is none."""
        finite = np.isfinite(self.logprobs)
        return len(finite) if finite.all() else int(finite.argmin())

    def drop_first(self, num_dropped: int) -> Segment:
        """A copy of this segment without its first tokens."""
        return (
            replace(self, tokens=self.tokens[num_dropped:], logprobs=self.logprobs[num_dropped:])
            if num_dropped
            else self
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpan:
    """Tokens between two turns that the model did not sample: end of the turn, observation, start of the next turn."""

    role: str
    """Who speaks in them: "tool", "user", ..."""
    tokens: IntArray  # [T] token ids; none if the environment said nothing and nothing bridges the turns
    seconds: float = 0.0
    """How long the environment took."""
    parent_end: int | None = None
    """Position behind the last token of the earlier context that is kept, if a context branch begins with these tokens;
    see stores/context_branches.py."""
    is_next_turn_auxiliary: bool = False
    """Whether the turn after them is not to be trained on. It is stored as given, once its trajectory is whole."""


AUXILIARY = "auxiliary"
"""Role of turns that were sampled and are not trained on: they are stored as given tokens."""
Span = Segment | EnvSpan
NO_VERSION = PolicyVersion(-1)
"""The version of tokens that were given, not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Times at which a trajectory reached each stage, in seconds since the run's start; 0 if it has not.

    Seconds of the machine's clock: an emulated run that is made faster (`time_scale`) has as many more in its journal.
    """

    arrived_s: float = 0.0
    routed_s: float = 0.0
    sampled_s: float = 0.0
    rewarded_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response from prompt to reward, with one turn or several. An environment replies to each turn but the last.

    What comes after the prompt is a list of spans, sampled and given; a turn is what was sampled between two given
    spans. Arrays over the response have an element for each token in order, given ones included. `v_traj` is the oldest
    version that any sampled token may stem from.
    """

    id: TrajectoryId
    group: GroupId
    prompt_tokens: IntArray  # [P] token ids
    v_traj: PolicyVersion = PolicyVersion(-1)
    spans: tuple[Span, ...] = ()
    finish: FinishReason = FinishReason.UNFINISHED
    """Of the last turn."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """The reward function's error, empty if none. A trajectory with an error carries no gradient."""
    timings: Timings = Timings()
    dataset_row: int = -1
    """The row of the data set, or the index of the generated task, that the prompt came from; -1 if unknown."""
    source: int = 0
    """Number of its task source."""
    task: int = -1
    """Number of its task in that source; -1: the group's own number."""
    teacher_logprobs: FloatArray | None = None
    """[T] logprob of each sampled token under the reference model, nats, at the sampling temperature, as a teacher
    computed it; 0 for tokens of environments. None if no teacher did."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sampled spans."""
        return tuple(s for s in self.spans if isinstance(s, Segment))

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(s.tokens) for s in self.spans)

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_given(self) -> int:
        """Number of tokens after the prompt that were given: by environments, and those of auxiliary turns."""
        return self.num_tokens - self.num_sampled

    @property
    def has_env_steps(self) -> bool:
        """Whether an environment has replied to a turn, even with an empty text."""
        return any(isinstance(s, EnvSpan) for s in self.spans)

    @property
    def environment_s(self) -> float:
        """Total seconds spent in environments."""
        return sum(s.seconds for s in self.spans if isinstance(s, EnvSpan))

    @property
    def response_tokens(self) -> IntArray:
        """[T] token ids after the prompt."""
        return np.concatenate([s.tokens for s in self.spans]) if self.spans else np.zeros(0, np.int32)

    @property
    def branches(self) -> tuple[ContextBranch, ...]:
        """Context branches: positions where a request continued from an earlier point; empty for a linear
        conversation."""
        starts, position = [], len(self.prompt_tokens)
        for span in self.spans:
            if isinstance(span, EnvSpan) and span.parent_end is not None:
                starts.append(ContextBranch(position, span.parent_end))
            position += len(span.tokens)
        return tuple(starts)

    @property
    def context(self) -> IntArray:
        """[C] token ids of the next token's context: all tokens so far, unless there are branches."""
        tokens = np.concatenate([self.prompt_tokens, self.response_tokens])
        branches = self.branches
        return tokens[context_positions(branches, len(tokens))] if branches else tokens

    @property
    def logprobs(self) -> FloatArray:
        """[T] behaviour logprobs, nats: of each token under the policy that sampled it; 0 for tokens of
        environments."""
        if not self.spans:
            return np.zeros(0, np.float32)
        return np.concatenate(
            [s.logprobs if isinstance(s, Segment) else np.zeros(len(s.tokens), np.float32) for s in self.spans]
        )

    @property
    def versions(self) -> IntArray:
        """[T] policy version that sampled each token; `NO_VERSION` for tokens of environments."""
        if not self.spans:
            return np.zeros(0, np.int32)
        return np.concatenate(
            [np.full(len(s.tokens), s.version if isinstance(s, Segment) else NO_VERSION, np.int32) for s in self.spans]
        )

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """[T] whether each token was sampled."""
        mask: npt.NDArray[np.bool_] = self.versions != NO_VERSION
        return mask

    @property
    def num_current_turn_tokens(self) -> int:
        """Number of tokens sampled since the last environment token."""
        turn_segments = itertools.takewhile(lambda span: isinstance(span, Segment), reversed(self.spans))
        return sum(len(span.tokens) for span in turn_segments)

    @property
    def turns(self) -> tuple[IntArray, ...]:
        """Token ids of each turn, the current one last if any of its tokens were sampled."""
        turns: list[list[IntArray]] = [[]]
        for span in self.spans:
            if isinstance(span, Segment):
                turns[-1].append(span.tokens)
            else:
                turns.append([])
        return tuple(np.concatenate(parts) for parts in turns if parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrajectory:
    """An ended trajectory as it is stored."""

    trajectory: Trajectory
    fate: Fate
    reason: AbortReason = AbortReason.NONE
    step: int = -1
    """The training step that consumed it; for other fates the step that was next when it ended."""
    advantage: float = 0.0
    loss_mask: bool = True
    """Whether it was scored, so that a loss applies to it."""

    @property
    def staleness(self) -> int:
        """v_train - v_traj for consumed trajectories, else -1."""
        return self.step - self.trajectory.v_traj if self.fate is Fate.CONSUMED else -1

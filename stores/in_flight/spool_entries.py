"""The entries of a spool, the log of changes to groups, trajectories and batches in flight. Pure.

As bytes, an entry is a JSON list with its arrays behind it. Entries about an episode have its attempt: the number of
times that it was restarted before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    IntArray,
    PolicyVersion,
    Segment,
    TrajectoryId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDrawn:
    """A prompt was drawn for a group. The source can produce it again from the group's number, with its answer."""

    group: GroupId
    prompt_tokens: IntArray  # [P] token ids
    at_s: float
    dataset_row: int = -1
    source: int = 0
    """Number of its task source."""
    task: int = -1
    """Number of its task in that source; -1: the group's own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesRouted:
    """Instances have begun to sample trajectories. routed: (trajectory, route_number)."""

    routed: tuple[tuple[TrajectoryId, int], ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensDelivered:
    """An instance has sampled tokens of a response. start: position of the first one in the response."""

    trajectory: TrajectoryId
    route_number: int
    start: int
    segments: tuple[Segment, ...]
    finish: FinishReason
    at_s: float
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationDelivered:
    """An environment returned an observation after a turn."""

    trajectory: TrajectoryId
    start: int
    """Position in the response of the observation's first token, which is the end of the turn."""
    role: str
    tokens: IntArray  # [T] token ids; there may be none
    seconds: float
    """Time that the environment took."""
    at_s: float
    attempt: int = 0
    turn_tokens: int = 0
    """Limit on the turn that follows; 0 if the environment set none."""
    after: int | None = None
    """Where a context branch begins with the observation, as in EnvSpan."""
    auxiliary: bool = False
    """Whether the turn that follows is not trained on."""
    stop: StopCriteria = NO_STOP
    """Stop criteria of the turn that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRestarted:
    """An environment failed, and the trajectory starts again from its prompt."""

    trajectory: TrajectoryId
    tokens: int
    """Tokens that it had, which are lost."""
    route_number: int
    """Of its latest routing; what is sampled from now on has a higher one."""
    attempt: int = 0
    """The attempt that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDelivered:
    """A response of so many tokens was scored. error: of the reward function, empty if none."""

    trajectory: TrajectoryId
    tokens: int
    reward: float
    parts: Mapping[str, float]
    error: str
    at_s: float
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """A training step has taken trajectories. versions: their v_traj."""

    step: int
    trajectories: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesDiscarded:
    """Trajectories have ended without being trained on. versions: their v_traj."""

    endings: tuple[Ending, ...]
    versions: tuple[PolicyVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightResumed:
    """A resumed run continues from `version`: later tokens, batches and endings are dropped. from_prompt: trajectories
    that restart from their prompts."""

    version: PolicyVersion
    from_prompt: tuple[TrajectoryId, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """An evaluation has ended or was abandoned: the trajectories sampled for it are not needed any more."""

    at_s: float


Entry = (
    GroupDrawn
    | TrajectoriesRouted
    | TokensDelivered
    | ObservationDelivered
    | EpisodeRestarted
    | RewardDelivered
    | BatchTaken
    | TrajectoriesDiscarded
    | InFlightResumed
    | EvaluationEnded
)

OfEpisode = TokensDelivered | ObservationDelivered | EpisodeRestarted | RewardDelivered
"""Entries that belong to one attempt at an episode."""


def encode(entry: Entry) -> bytes:
    """An entry as bytes."""
    head: list[Any]
    arrays: Sequence[np.ndarray[Any, Any]] = ()
    match entry:
        case GroupDrawn():
            head = ["drawn", entry.group, len(entry.prompt_tokens), entry.at_s, entry.dataset_row]
            head += [entry.source, entry.task] if entry.task >= 0 else []
            arrays = (entry.prompt_tokens.astype("<i4"),)
        case TrajectoriesRouted():
            head = ["routed", entry.routed, entry.at_s]
        case TokensDelivered():
            segments = [(s.version, s.instance, len(s.tokens)) for s in entry.segments]
            head = [
                "tokens",
                entry.trajectory,
                entry.route_number,
                entry.start,
                entry.finish.value,
                entry.at_s,
                segments,
            ]
            head += [entry.attempt]
            arrays = [a for s in entry.segments for a in (s.tokens.astype("<i4"), s.logprobs.astype("<f4"))]
        case ObservationDelivered():
            head = ["given", entry.trajectory, entry.start, entry.role, len(entry.tokens), entry.seconds, entry.at_s]
            head += [entry.attempt, *_next_turn(entry)]
            arrays = (entry.tokens.astype("<i4"),)
        case EpisodeRestarted():
            head = ["restarted", entry.trajectory, entry.tokens, entry.route_number, entry.attempt]
        case RewardDelivered():
            parts = {name: float(value) for name, value in entry.parts.items()}
            head = ["reward", entry.trajectory, entry.tokens, float(entry.reward), parts, entry.error, entry.at_s]
            head += [entry.attempt]
        case BatchTaken():
            head = ["batch", entry.step, entry.trajectories, entry.versions]
        case TrajectoriesDiscarded():
            endings = [(e.trajectory, e.group, e.fate.value, e.reason.value, e.step) for e in entry.endings]
            head = ["retired", endings, entry.versions]
        case InFlightResumed():
            head = ["resumed", entry.version, entry.from_prompt, entry.at_s]
        case EvaluationEnded():
            head = ["evaluated", entry.at_s]
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *(a.tobytes() for a in arrays)])


def _next_turn(entry: ObservationDelivered) -> list[Any]:
    """Fields of the turn that follows an observation, up to the last that differs from its default."""
    if entry.stop != NO_STOP:
        return [entry.turn_tokens, entry.after, entry.auxiliary, entry.stop.strings, entry.stop.token_ids]
    if entry.after is not None or entry.auxiliary:
        return [entry.turn_tokens, entry.after, entry.auxiliary]
    return [entry.turn_tokens] if entry.turn_tokens else []


def decode(data: bytes) -> Entry:
    """The inverse of `encode`. Raises ValueError for what no version of `encode` has written."""
    try:
        (size,) = struct.unpack_from("<I", data)
        kind, *rest = json.loads(data[4 : 4 + size])
        entry: Entry = _DECODERS[kind](data, 4 + size, *rest)
        return entry
    except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no entry of a spool: {error}") from error


def _ints(data: bytes, offset: int, count: int) -> IntArray:
    return np.frombuffer(data, "<i4", count, offset)


def _tokens(
    data: bytes,
    offset: int,
    trajectory: int,
    route_number: int,
    start: int,
    finish: str,
    at_s: float,
    parts: list[Any],
    attempt: int,
) -> TokensDelivered:
    segments = []
    for version, instance, count in parts:
        segments.append(
            Segment(
                version=PolicyVersion(version),
                instance=InstanceId(instance),
                tokens=_ints(data, offset, count),
                logprobs=np.frombuffer(data, "<f4", count, offset + 4 * count),
            )
        )
        offset += 8 * count
    return TokensDelivered(
        trajectory=TrajectoryId(trajectory),
        route_number=route_number,
        start=start,
        segments=tuple(segments),
        finish=FinishReason(finish),
        at_s=at_s,
        attempt=attempt,
    )


def _observation(
    data: bytes,
    offset: int,
    trajectory: int,
    start: int,
    role: str,
    count: int,
    seconds: float,
    at_s: float,
    attempt: int,
    turn_tokens: int = 0,
    after: int | None = None,
    auxiliary: bool = False,
    strings: Sequence[str] = (),
    token_ids: Sequence[int] = (),
) -> ObservationDelivered:
    return ObservationDelivered(
        trajectory=TrajectoryId(trajectory),
        start=start,
        role=role,
        tokens=_ints(data, offset, count),
        seconds=seconds,
        at_s=at_s,
        attempt=attempt,
        turn_tokens=turn_tokens,
        after=after,
        auxiliary=auxiliary,
        stop=StopCriteria(tuple(strings), tuple(token_ids)),
    )


def _discarded(data: bytes, offset: int, endings: list[Any], versions: list[Any]) -> TrajectoriesDiscarded:
    return TrajectoriesDiscarded(
        endings=tuple(
            Ending(trajectory=TrajectoryId(t), group=GroupId(g), fate=Fate(f), reason=AbortReason(r), step=s)
            for t, g, f, r, s in endings
        ),
        versions=tuple(map(PolicyVersion, versions)),
    )


_DECODERS: dict[str, Any] = {
    "evaluated": lambda data, at, at_s: EvaluationEnded(at_s=at_s),
    "drawn": lambda data, at, group, count, at_s, row=-1, source=0, task=-1: GroupDrawn(
        group=GroupId(group),
        prompt_tokens=_ints(data, at, count),
        at_s=at_s,
        dataset_row=row,
        source=source,
        task=task,
    ),
    "routed": lambda data, at, routed, at_s: TrajectoriesRouted(
        routed=tuple((TrajectoryId(t), route_number) for t, route_number in routed), at_s=at_s
    ),
    "tokens": _tokens,
    "given": _observation,
    "restarted": lambda data, at, trajectory, tokens, route_number, attempt: EpisodeRestarted(
        trajectory=TrajectoryId(trajectory), tokens=tokens, route_number=route_number, attempt=attempt
    ),
    "reward": lambda data, at, trajectory, tokens, reward, parts, error, at_s, attempt: RewardDelivered(
        trajectory=TrajectoryId(trajectory),
        tokens=tokens,
        reward=reward,
        parts=parts,
        error=error,
        at_s=at_s,
        attempt=attempt,
    ),
    "batch": lambda data, at, step, trajectories, versions: BatchTaken(
        step=step, trajectories=tuple(map(TrajectoryId, trajectories)), versions=tuple(map(PolicyVersion, versions))
    ),
    "retired": _discarded,
    "resumed": lambda data, at, version, from_prompt, at_s: InFlightResumed(
        version=PolicyVersion(version), from_prompt=tuple(map(TrajectoryId, from_prompt)), at_s=at_s
    ),
}

"""The entries of a spool: changes to groups, trajectories and batches in flight. Pure.

An entry is encoded as a JSON list followed by its arrays, so the order of a class's fields is part of the format.
`attempt` in entries about an episode is the number of its restarts so far. `at_s` is the time of an entry in seconds.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import (
    FinishReason,
    FloatArray,
    GroupId,
    IntArray,
    PolicyVersion,
    Segment,
    TrajectoryId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDrawn:
    """A prompt was drawn for a group. The source can produce prompt and answer again from the group's number."""

    group: GroupId
    prompt_tokens: IntArray  # [P] token ids
    at_s: float
    dataset_row: int = -1
    source: int = 0
    """Index of its task source."""
    task: int = -1
    """Index of its task in that source; -1: the group's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesRouted:
    """Instances have started sampling trajectories. routed: (trajectory, route_number)."""

    routed: tuple[tuple[TrajectoryId, int], ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensDelivered:
    """An instance has sampled tokens of a response. start: position of the first one in the response."""

    trajectory: TrajectoryId
    route_number: int
    start: int
    finish: FinishReason
    at_s: float
    segments: tuple[Segment, ...]
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
    max_turn_tokens: int = 0
    """Token limit of the next turn; 0 if the environment set none."""
    parent_end: int | None = None
    """Position behind the last kept token of the earlier context, if a context branch begins with the observation."""
    is_next_turn_auxiliary: bool = False
    """Whether the next turn is not trained on."""
    stop: StopCriteria = NO_STOP
    """Stop criteria of the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRestarted:
    """An environment failed, and the trajectory restarts from its prompt."""

    trajectory: TrajectoryId
    num_tokens: int
    """Number of its response tokens, which are dropped."""
    route_number: int
    """Route number of its latest routing; later samples have higher ones."""
    attempt: int = 0
    """The attempt that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDelivered:
    """A response with this number of tokens was scored. error: error of the reward function; empty if there was
    none."""

    trajectory: TrajectoryId
    num_tokens: int
    reward: float
    parts: Mapping[str, float]
    error: str
    at_s: float
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobsDelivered:
    """A teacher has computed the logprobs of a response with this number of tokens, which has its reward."""

    trajectory: TrajectoryId
    num_tokens: int
    logprobs: FloatArray  # [T] under the reference model, nats; 0 for tokens that were not sampled
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """A training step has consumed trajectories. versions: their v_traj."""

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
    """An evaluation has ended or was abandoned, and its trajectories are dropped."""

    at_s: float


Entry = (
    GroupDrawn
    | TrajectoriesRouted
    | TokensDelivered
    | ObservationDelivered
    | EpisodeRestarted
    | RewardDelivered
    | TeacherLogprobsDelivered
    | BatchTaken
    | TrajectoriesDiscarded
    | InFlightResumed
    | EvaluationEnded
)

EpisodeEntry = TokensDelivered | ObservationDelivered | EpisodeRestarted | RewardDelivered | TeacherLogprobsDelivered
"""Entries that belong to one attempt at an episode."""


ENTRY_CLASSES: dict[str, Any] = {
    "drawn": GroupDrawn,
    "routed": TrajectoriesRouted,
    "tokens": TokensDelivered,
    "given": ObservationDelivered,
    "restarted": EpisodeRestarted,
    "reward": RewardDelivered,
    "teacher": TeacherLogprobsDelivered,
    "batch": BatchTaken,
    "retired": TrajectoriesDiscarded,
    "resumed": InFlightResumed,
    "evaluated": EvaluationEnded,
}
"""Names of the entry classes in a spool."""
_ENTRY_NAMES = {entry: kind for kind, entry in ENTRY_CLASSES.items()}


def encode(entry: Entry) -> bytes:
    """Encode an entry as bytes: its kind, then its fields in order, without trailing ones that have their default. An
    array is stored as its length."""
    entry_fields = fields(entry)
    values = [getattr(entry, f.name) for f in entry_fields]
    while entry_fields[len(values) - 1].default is not MISSING and values[-1] == entry_fields[len(values) - 1].default:
        values.pop()
    if isinstance(values[-1], StopCriteria):
        values[-1:] = [values[-1].strings, values[-1].token_ids]
    arrays: list[np.ndarray[Any, Any]] = []

    def plain(value: Any) -> Any:
        match value:
            case np.ndarray():
                arrays.append(value.astype("<f4" if value.dtype.kind == "f" else "<i4"))
                return len(value)
            case Segment():
                arrays.extend([value.tokens.astype("<i4"), value.logprobs.astype("<f4")])
                return value.version, value.instance, len(value.tokens)
            case Ending():
                return [getattr(value, f.name) for f in fields(value)]
            case Enum():
                return value.value
        return value.item()  # a number of numpy

    text = json.dumps([_ENTRY_NAMES[type(entry)], *values], default=plain, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *(a.tobytes() for a in arrays)])


def decode(data: bytes) -> Entry:
    """Decode the bytes of an entry. Raises ValueError for bytes that no version of `encode` has written."""
    try:
        (size,) = struct.unpack_from("<I", data)
        kind, *values = json.loads(data[4 : 4 + size])
        hints, offset = _hints(ENTRY_CLASSES[kind]), 4 + size
        if kind == "given" and len(values) == len(hints) + 1:
            values[-2:] = [values[-2:]]  # the two parts of its stop criteria
        if len(values) > len(hints):
            raise ValueError(f"{len(values)} fields")

        def array(dtype: str, count: int) -> np.ndarray[Any, Any]:
            nonlocal offset
            offset += 4 * count
            return np.frombuffer(data, dtype, count, offset - 4 * count)

        def parse(hint: Any, value: Any) -> Any:
            if hint in (IntArray, FloatArray):
                return array("<i4" if hint == IntArray else "<f4", value)
            if hint is Segment:
                version, instance, count = value
                return Segment(
                    version=version, instance=instance, tokens=array("<i4", count), logprobs=array("<f4", count)
                )
            if hint is Ending:
                return Ending(**{n: parse(h, v) for (n, h), v in zip(_hints(Ending).items(), value, strict=True)})
            if hint is StopCriteria:
                return StopCriteria(*map(tuple, value))
            if get_origin(hint) is tuple:
                return tuple(parse(get_args(hint)[0], item) for item in value)
            return hint(value) if isinstance(hint, type) and issubclass(hint, Enum) else value

        entry: Entry = ENTRY_CLASSES[kind](**{n: parse(h, v) for (n, h), v in zip(hints.items(), values, strict=False)})
        return entry
    except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no entry of a spool: {error}") from error


@functools.cache
def _hints(entry: Any) -> dict[str, Any]:
    """The types of a class's fields by name, in order."""
    return get_type_hints(entry)

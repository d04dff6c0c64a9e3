"""The layout of trajectories in a store's arrays: a row of numbers each, flat token arrays, and JSON for the rest.

The arrays themselves are listed in stores/trajectories/versioned.py. Numpy, pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import (
    NO_VERSION,
    AbortReason,
    Ended,
    Fate,
    FinishReason,
    Given,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Span,
    Timings,
    Trajectory,
    TrajectoryId,
)

INT_COLUMNS = (
    "trajectory", "group", "v_traj", "v_min", "v_max", "offset", "prompt_tokens", "response_tokens",
    "finish", "fate", "reason", "step", "staleness", "text_offset", "text_bytes", "loss_mask",
)  # fmt: skip
COMMIT_COLUMNS = (
    "kind", "step", "rows", "tokens", "first_id", "last_id", "record_offset", "record_bytes",
)  # fmt: skip
"""Of a commit. kind: its index in KINDS; first_id, last_id: the smallest and largest of its trajectories, -1 if it has
none; record_offset: of its record in `records`."""
FLOAT_COLUMNS = ("reward", "advantage", "arrived_s", "routed_s", "sampled_s", "rewarded_s")
TURN_COLUMNS = ("turns", "given_tokens", "tool_s")
"""Of trajectories of many turns. given_tokens: of the response_tokens; tool_s: seconds that environments took."""

FINISHES, FATES, REASONS = tuple(FinishReason), tuple(Fate), tuple(AbortReason)
TOKEN_ARRAYS = {"ids": "int32", "logprobs": "float32", "versions": "int32", "mask": "uint8"}
AT = {name: i for i, name in enumerate(INT_COLUMNS)}
"""Index of each name in INT_COLUMNS."""
COMMIT_AT = {name: i for i, name in enumerate(COMMIT_COLUMNS)}
"""Index of each name in COMMIT_COLUMNS."""
FLOAT_AT = {name: i for i, name in enumerate(FLOAT_COLUMNS)}
"""Index of each name in FLOAT_COLUMNS."""
KINDS = ("step", "end", "resume")
"""Kinds of commits, as COMMIT_COLUMNS has them; others have no index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows in the form that a commit appends. tokens: [T] by the names of TOKEN_ARRAYS."""

    tokens: dict[str, npt.NDArray[Any]]
    ints: npt.NDArray[np.int64]  # [R, len(INT_COLUMNS)]
    floats: npt.NDArray[np.float32]  # [R, len(FLOAT_COLUMNS)]
    turns: npt.NDArray[np.float64]  # [R, len(TURN_COLUMNS)]
    has_answers: bool  # of any row
    has_branches: bool  # of any row
    text: bytes
    num_tokens: int


def pack(ended: Sequence[Ended], begin: int, text_begin: int) -> Packed:
    """Pack rows for a commit. begin, text_begin: where their tokens and their text will begin in the store."""
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [np.zeros(0, d)] for name, d in TOKEN_ARRAYS.items()}
    ints = np.zeros((len(ended), len(INT_COLUMNS)), np.int64)
    floats = np.zeros((len(ended), len(FLOAT_COLUMNS)), np.float32)
    turns = np.zeros((len(ended), len(TURN_COLUMNS)))
    text = bytearray()
    offset = begin
    for i, row in enumerate(ended):
        t = row.trajectory
        response, versions = t.response_tokens, t.versions
        sampled = versions != NO_VERSION
        prompt = len(t.prompt_tokens)
        columns["ids"] += [t.prompt_tokens, response]
        columns["logprobs"] += [np.zeros(prompt, np.float32), t.logprobs]
        columns["versions"] += [np.full(prompt, NO_VERSION, np.int32), versions]
        columns["mask"] += [np.zeros(prompt, np.uint8), (sampled & row.loss_mask).astype(np.uint8)]
        extra = json.dumps(_extra(t), separators=(",", ":")).encode()
        ints[i] = (
            t.id, t.group, t.v_traj, versions[sampled].min(initial=2**31 - 1), versions.max(initial=-1), offset, prompt,
            len(response), FINISHES.index(t.finish), FATES.index(row.fate), REASONS.index(row.reason), row.step,
            row.staleness, text_begin + len(text), len(extra), row.loss_mask,
        )  # fmt: skip
        timings = (t.timings.arrived_s, t.timings.routed_s, t.timings.sampled_s, t.timings.rewarded_s)
        floats[i] = (t.reward, row.advantage, *timings)
        # Of the seconds as they are stored with the spans, which are rounded.
        turns[i] = (len(t.turns), t.num_given, sum(_seconds(s) for s in t.spans if isinstance(s, Given)))
        text += extra
        offset += prompt + len(response)
    return Packed(
        tokens={name: np.concatenate(parts) for name, parts in columns.items()},
        ints=ints,
        floats=floats,
        turns=turns,
        has_answers=any(row.trajectory.has_answers for row in ended),
        has_branches=any(row.trajectory.branches for row in ended),
        text=bytes(text),
        num_tokens=offset - begin,
    )


def unpack(
    ints: Sequence[int],
    floats: Sequence[float],
    tokens: Mapping[str, npt.NDArray[Any]],
    first: int,
    text: bytes,
    text_first: int,
) -> Ended:
    """The inverse of `pack` for one row. tokens, text: slices that contain the row's; first, text_first: where in the
    store they begin. Raises StoreError if they contradict each other."""
    row = dict(zip(INT_COLUMNS, ints, strict=True))
    try:
        extra = json.loads(text[row["text_offset"] - text_first :][: row["text_bytes"]])
        stored = [stored_span(*span) for span in extra["segments"]]
        finish, fate, reason = FINISHES[row["finish"]], FATES[row["fate"]], REASONS[row["reason"]]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        # A flipped bit that decompression did not detect.
        raise StoreError(f"trajectory {row['trajectory']}: its record is corrupt: {error!r}") from error
    begin = row["offset"] - first
    middle = begin + row["prompt_tokens"]
    end = middle + row["response_tokens"]
    spans: list[Span] = []
    at, agree = middle, True
    for who, version, size, seconds, after in stored:
        if after >= at - begin:
            raise StoreError(
                f"trajectory {row['trajectory']}: its branch at token {at - begin} goes on after token {after}"
            )
        ids, logprobs = tokens["ids"][at : at + size], tokens["logprobs"][at : at + size]
        if version == NO_VERSION:
            spans.append(Given(role=who, tokens=ids, seconds=seconds, after=None if after < 0 else after))
        else:
            instance = InstanceId(who)
            spans.append(Segment(version=PolicyVersion(version), instance=instance, tokens=ids, logprobs=logprobs))
        agree &= bool((tokens["versions"][at : at + size] == version).all())
        at += size
    if at != end or not agree:
        raise StoreError(f"trajectory {row['trajectory']}: its segments do not match its token versions")
    reward, advantage, arrived_s, routed_s, sampled_s, rewarded_s = floats
    return Ended(
        trajectory=Trajectory(
            id=TrajectoryId(row["trajectory"]),
            group=GroupId(row["group"]),
            prompt_tokens=tokens["ids"][begin:middle],
            v_traj=PolicyVersion(row["v_traj"]),
            spans=tuple(spans),
            finish=finish,
            reward=reward,
            reward_parts=extra.get("parts", {}),
            error=extra.get("error", ""),
            timings=Timings(arrived_s=arrived_s, routed_s=routed_s, sampled_s=sampled_s, rewarded_s=rewarded_s),
        ),
        fate=fate,
        reason=reason,
        step=row["step"],
        advantage=advantage,
        loss_mask=bool(row["loss_mask"]),
    )


def stored_span(who: str, version: int, size: int, *more: float) -> tuple[str, int, int, float, int]:
    """A span as `_stored` writes it, with the seconds of a sampled one as 0, and `after` as -1 if no branch begins with
    it. Raises ValueError or TypeError for what is none: only a given one has seconds, and may begin a branch."""
    if len(more) not in ((1, 2) if version == NO_VERSION else (0,)):
        raise ValueError(f"a span of version {version} with {len(more)} further numbers")
    seconds, after = (*more, -1)[:2] if more else (0.0, -1)
    if len(more) == 2 and after < 0:
        raise ValueError(f"a branch that goes on after token {after}")
    return str(who), int(version), int(size), float(seconds), int(after)


def _extra(trajectory: Trajectory) -> dict[str, Any]:
    extra: dict[str, Any] = {"segments": [_stored(span) for span in trajectory.spans]}
    if trajectory.reward_parts:
        extra["parts"] = trajectory.reward_parts
    if trajectory.error:
        extra["error"] = trajectory.error
    return extra


def _stored(span: Span) -> list[str | int | float]:
    """A span as stored: [instance, version, tokens]; of a given one [role, NO_VERSION, tokens, seconds], and `after` if
    a branch begins with it."""
    if isinstance(span, Given):
        given: list[str | int | float] = [span.role, NO_VERSION, len(span.tokens), _seconds(span)]
        return given if span.after is None else [*given, span.after]
    return [span.instance, span.version, len(span.tokens)]


def _seconds(span: Given) -> float:
    return round(span.seconds, 6)

"""Layout of trajectories in a store's arrays: a row of numbers, flat token arrays, and JSON for the rest.

The arrays themselves are listed in stores/trajectories/versioned.py. Numpy, pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.columns import (
    COLUMNS,
    FATES,
    FINISHES,
    REASONS,
    Rows,
    empty_rows,
    select_displayed_columns,
    span_seconds,
)
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectory import (
    NO_VERSION,
    EndedTrajectory,
    EnvSpan,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Span,
    Timings,
    Trajectory,
    TrajectoryId,
)

COMMIT_COLUMNS = (
    "kind", "step", "rows", "tokens", "first_id", "last_id", "record_offset", "record_bytes",
)  # fmt: skip
"""Columns of the table of commits. kind: its index in COMMIT_KINDS; first_id, last_id: the smallest and largest id of
its trajectories, -1 if it has none; record_offset, record_bytes: position and size of its record in `records`."""
TOKEN_ARRAYS = {"ids": "int32", "logprobs": "float32", "versions": "int32", "mask": "uint8"}
TEACHER_ARRAY = "teacher"
"""The token array of a teacher's logprobs, which a store has once a row has any."""
COMMIT_COLUMN_INDEX = {name: i for i, name in enumerate(COMMIT_COLUMNS)}
"""Index of each name in COMMIT_COLUMNS."""
TIMING_COLUMNS = tuple(field.name for field in fields(Timings))
COMMIT_KINDS = ("step", "end", "resume", "refusal")
"""Kinds of commits, as COMMIT_COLUMNS has them; others have no index."""


def record_columns(record: CommitRecord) -> tuple[int, int, int, int]:
    """The numbers of a commit's record that its line in the table of commits repeats: the first four COMMIT_COLUMNS."""
    kind = COMMIT_KINDS.index(record.kind) if record.kind in COMMIT_KINDS else len(COMMIT_KINDS)
    return kind, record.step, record.num_rows, record.num_tokens


def id_range(ids: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The smallest and largest id, as COMMIT_COLUMNS has them; -1 and -1 without any."""
    return (int(ids.min()), int(ids.max())) if len(ids) else (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitArrays:
    """Trajectories as arrays that a commit appends. tokens: [T] arrays by the names of TOKEN_ARRAYS, and TEACHER_ARRAY
    if a row has a teacher's logprobs."""

    tokens: dict[str, npt.NDArray[Any]]
    rows: Rows  # [R] all columns
    text: bytes
    num_tokens: int


def pack(ended_trajectories: Sequence[EndedTrajectory], start: int, text_start: int) -> CommitArrays:
    """Convert trajectories to arrays for a commit. start, text_start: positions in the store where their tokens and
    texts begin."""
    tokens: dict[str, list[npt.NDArray[Any]]] = {name: [np.zeros(0, d)] for name, d in TOKEN_ARRAYS.items()}
    has_teacher = any(row.trajectory.teacher_logprobs is not None for row in ended_trajectories)
    if has_teacher:
        tokens[TEACHER_ARRAY] = []
    offsets, texts = [], []
    offset = start
    for row in ended_trajectories:
        t = row.trajectory
        response, versions = t.response_tokens, t.versions
        prompt_length = len(t.prompt_tokens)
        tokens["ids"] += [t.prompt_tokens, response]
        tokens["logprobs"] += [np.zeros(prompt_length, np.float32), t.logprobs]
        tokens["versions"] += [np.full(prompt_length, NO_VERSION, np.int32), versions]
        tokens["mask"] += [
            np.zeros(prompt_length, np.uint8),
            ((versions != NO_VERSION) & row.loss_mask).astype(np.uint8),
        ]
        if has_teacher:
            tokens[TEACHER_ARRAY] += [np.full(prompt_length, np.nan, np.float32), _encode_teacher_logprobs(t)]
        texts.append(json.dumps(_extra_fields(t), separators=(",", ":")).encode())
        offsets.append(offset)
        offset += prompt_length + len(response)
    rows = empty_rows(len(ended_trajectories), COLUMNS)
    for column in select_displayed_columns():
        rows[column.name] = [column.encode(row) for row in ended_trajectories]
    rows["offset"] = offsets
    rows["text_bytes"] = [len(text) for text in texts]
    rows["text_offset"] = text_start + np.cumsum(rows["text_bytes"]) - rows["text_bytes"]
    return CommitArrays(
        tokens={name: np.concatenate(parts) for name, parts in tokens.items()},
        rows=rows,
        text=b"".join(texts),
        num_tokens=offset - start,
    )


def _encode_teacher_logprobs(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    """[T] a teacher's logprobs as they are stored: NaN for each token without one."""
    if trajectory.teacher_logprobs is None:
        return np.full(trajectory.num_tokens, np.nan, np.float32)
    return np.where(trajectory.sampled, trajectory.teacher_logprobs, np.float32(np.nan))


def lacks_teacher_logprob(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """[T] bool, whether tokens have what is stored for those without a teacher's logprob, bit for bit."""
    lacking: npt.NDArray[np.bool_] = np.ascontiguousarray(values, np.float32).view(np.uint32) == NAN_BITS
    return lacking


NAN_BITS = np.asarray(np.nan, np.float32).view(np.uint32)


def fingerprint_rows(tokens: Mapping[str, npt.NDArray[Any]], rows: Rows, text: bytes) -> str:
    """Hash, 32 hex digits, of all that is stored of a commit's rows. Columns with fill values only are left out,
    because an earlier store without such a column reads the same; so are a teacher's logprobs if there are none.

    Args:
        tokens: [T] by the names of TOKEN_ARRAYS, and TEACHER_ARRAY if the store has it, of these rows alone.
        rows: [R] all columns.
        text: Their texts.
    """
    digest = hashlib.blake2b(digest_size=16)
    arrays = {name: np.asarray(tokens[name], dtype) for name, dtype in TOKEN_ARRAYS.items()}
    if TEACHER_ARRAY in tokens and not lacks_teacher_logprob(tokens[TEACHER_ARRAY]).all():
        arrays[TEACHER_ARRAY] = np.asarray(tokens[TEACHER_ARRAY], np.float32)
    arrays |= {c.array_name: np.asarray(rows[c.name], c.dtype) for c in COLUMNS if (rows[c.name] != c.fill).any()}
    arrays["text"] = np.frombuffer(text, np.uint8)
    for name, values in arrays.items():
        little_endian = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        digest.update(f"{name}:{len(values)};".encode())
        digest.update(little_endian.view(np.uint8).data)
    return digest.hexdigest()


def unpack(
    row: Mapping[str, Any], tokens: Mapping[str, npt.NDArray[Any]], start: int, text: bytes, text_start: int
) -> EndedTrajectory:
    """Rebuild a trajectory from its stored row; the inverse of `pack`.

    Args:
        row: The row's columns by name.
        tokens: Slices of the token arrays that contain the row's.
        start: Position of those slices in the store.
        text: A slice of the texts that contains the row's.
        text_start: Position of that slice in the store.

    Raises:
        StoreError: They contradict each other.
    """
    try:
        extra = json.loads(text[row["text_offset"] - text_start :][: row["text_bytes"]])
        stored_spans = [parse_span(*span) for span in extra["segments"]]
        if min(row["finish"], row["fate"], row["reason"]) < 0:  # Python would count from the end
            raise IndexError("finish, fate and reason must not be negative")
        finish, fate, reason = FINISHES[row["finish"]], FATES[row["fate"]], REASONS[row["reason"]]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        # A flipped bit that decompression did not detect.
        raise StoreError(f"trajectory {row['trajectory']}: its record is corrupt: {error!r}") from error
    row_start = row["offset"] - start
    middle = row_start + row["prompt_tokens"]
    end = middle + row["response_tokens"]
    spans: list[Span] = []
    index, versions_match = middle, True
    for origin, version, size, seconds, parent_end in stored_spans:
        if parent_end >= index - row_start:
            raise StoreError(
                f"trajectory {row['trajectory']}: its branch at token {index - row_start} goes on after token "
                f"{parent_end}"
            )
        ids, logprobs = tokens["ids"][index : index + size], tokens["logprobs"][index : index + size]
        if version == NO_VERSION:
            spans.append(
                EnvSpan(role=origin, tokens=ids, seconds=seconds, parent_end=None if parent_end < 0 else parent_end)
            )
        else:
            instance = InstanceId(origin)
            spans.append(Segment(version=PolicyVersion(version), instance=instance, tokens=ids, logprobs=logprobs))
        versions_match &= bool((tokens["versions"][index : index + size] == version).all())
        index += size
    if index != end or not versions_match:
        raise StoreError(f"trajectory {row['trajectory']}: its segments do not match its token versions")
    teacher_logprobs = None
    if TEACHER_ARRAY in tokens:
        teacher_logprobs = decode_teacher_logprobs(tokens[TEACHER_ARRAY][middle:end], tokens["versions"][middle:end])
    return EndedTrajectory(
        trajectory=Trajectory(
            id=TrajectoryId(row["trajectory"]),
            group=GroupId(row["group"]),
            prompt_tokens=tokens["ids"][row_start:middle],
            v_traj=PolicyVersion(row["v_traj"]),
            spans=tuple(spans),
            finish=finish,
            reward=row["reward"],
            reward_parts=extra.get("parts", {}),
            error=extra.get("error", ""),
            timings=Timings(**{name: row[name] for name in TIMING_COLUMNS}),
            dataset_row=row["dataset_row"],
            source=row["source"],
            task=row["task"],
            teacher_logprobs=teacher_logprobs,
        ),
        fate=fate,
        reason=reason,
        step=row["step"],
        advantage=row["advantage"],
        loss_mask=bool(row["loss_mask"]),
    )


def decode_teacher_logprobs(
    values: npt.NDArray[np.float32], versions: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32] | None:
    """A teacher's logprobs of a response as Trajectory has them, from stored values; None if it has none. versions: of
    the response's tokens. Values that are not finite stay, for an audit to find."""
    if lacks_teacher_logprob(values).all():
        return None
    return np.where(versions == NO_VERSION, np.float32(0), values)


def parse_span(instance: str, version: int, size: int, *env_values: float) -> tuple[str, int, int, float, int]:
    """Parse a stored span. Raises ValueError or TypeError if it is malformed. Seconds of sampled spans are 0;
    `parent_end` is -1 if no branch begins with the span."""
    if len(env_values) not in ((1, 2) if version == NO_VERSION else (0,)):
        raise ValueError(f"a span of version {version} with {len(env_values)} further numbers")
    if size < 0:
        raise ValueError(f"a span of {size} tokens")
    seconds, parent_end = (*env_values, -1)[:2] if env_values else (0.0, -1)
    if len(env_values) == 2 and parent_end < 0:
        raise ValueError(f"a branch that goes on after token {parent_end}")
    return str(instance), int(version), int(size), float(seconds), int(parent_end)


def _extra_fields(trajectory: Trajectory) -> dict[str, Any]:
    extra: dict[str, Any] = {"segments": [_encode_span(span) for span in trajectory.spans]}
    if trajectory.reward_parts:
        extra["parts"] = trajectory.reward_parts
    if trajectory.error:
        extra["error"] = trajectory.error
    return extra


def _encode_span(span: Span) -> list[str | int | float]:
    """A span as stored: [instance, version, tokens] of a segment; [role, NO_VERSION, tokens, seconds] of an EnvSpan,
    with `parent_end` at the end if a branch begins with it."""
    if isinstance(span, EnvSpan):
        values: list[str | int | float] = [span.role, NO_VERSION, len(span.tokens), span_seconds(span)]
        return values if span.parent_end is None else [*values, span.parent_end]
    return [span.instance, span.version, len(span.tokens)]

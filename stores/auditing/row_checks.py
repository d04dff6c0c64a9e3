"""Audit of rows with their tokens, in blocks of limited size, column by column.

Rows are independent of each other except for the hash of a step's batch, which continues from block to block; so ranges
of rows can be checked by several processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.auditing.single_consumption import is_consumed
from staleflow.stores.auditing.weight_counts import RefusedInstance, refused_token_findings
from staleflow.stores.context_branches import ContextBranch
from staleflow.stores.errors import ConfigError, StoreError, StoreUnavailable
from staleflow.stores.trajectories.columns import FATES, FINISHES, REASONS, Rows
from staleflow.stores.trajectories.layout import (
    TEACHER_ARRAY,
    decode_teacher_logprobs,
    lacks_teacher_logprob,
    parse_span,
)
from staleflow.stores.trajectories.reader import BLOCK_ROWS, TOKEN_POSITION_COLUMNS, StoreReader
from staleflow.stores.trajectories.records import BatchDigest
from staleflow.stores.trajectory import NO_VERSION, EnvSpan, Span

CHECK = "bound"
SPAN_TOTALS = ("turns", "given_tokens", "tool_s")
"""Columns that a row's spans must agree with."""
VERSION_COLUMNS = ("v_min", "v_max", "staleness")
"""Columns that follow from the versions of a row's tokens, its step and its v_traj."""
SECONDS_TOLERANCE = 1e-6
"""Seconds that sums of the same times may differ by."""
Ints = npt.NDArray[np.int64]
MAX_GAP_TOKENS = 65_536
"""Maximum unread tokens between two rows of one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """A range of rows to check, and the steps whose batches to hash."""

    start: int
    stop: int
    """Exclusive."""
    steps: frozenset[int]
    """Steps whose batches lie in the range with all their rows."""
    max_tokens: int
    """Tokens that are read together; a longer trajectory is read alone."""
    refusals: tuple[RefusedInstance, ...] = ()
    """Instances that were taken out of service."""


@dataclass(slots=True, kw_only=True)
class RowCheckResult:
    """Findings of a range of rows, and hashes of its batches."""

    start: int
    findings: list[Finding] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """Hashes of batches, by step."""
    sampled_tokens: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of sampled tokens by (instance, version)."""
    error: str = ""
    """Why a row, and all after it, could not be read; empty if all could."""


def check_rows_at(path: str, snapshot: str, eta: int, rows: RowRange) -> RowCheckResult:
    """Call `check_rows` with plain values, for workers. Raises ConfigError if this process cannot open the store, which
    the process that audits can."""
    try:
        store = StoreReader.at(Path(path), snapshot)
    except StoreUnavailable:
        raise
    except StoreError as error:  # not damage: the audit has opened it
        remedy = "audit it without --scheduler, or where its workers see the folder"
        raise ConfigError(f"a worker cannot open the store: {error}; {remedy}") from error
    return check_rows(store, eta, rows)


def check_rows(store: StoreReader, eta: int, rows: RowRange) -> RowCheckResult:
    """Check a range of rows. eta: the staleness bound."""
    result = RowCheckResult(start=rows.start)
    digests: dict[int, BatchDigest] = {}
    number = rows.start
    try:
        for block in read_blocks(store, rows.start, rows.stop, rows.max_tokens):
            result.findings += _check_rows(block, eta)
            result.sampled_tokens += block.spans.sampled_tokens()
            if rows.refusals:
                result.findings += _refused_tokens(block, number, rows.refusals)
            number += len(block.rows)
            _hash(block, digests, rows.steps)
    except StoreUnavailable:
        raise
    except StoreError as error:
        result.error = str(error)
    result.digests = {step: digest.hex for step, digest in digests.items()}
    return result


def hash_batches(store: StoreReader, rows: RowRange) -> dict[int, str]:
    """Hash the batches of steps whose rows all lie in a range. Raises StoreError."""
    digests: dict[int, BatchDigest] = {}
    for block in read_blocks(store, rows.start, rows.stop, rows.max_tokens):
        _hash(block, digests, rows.steps)
    return {step: digest.hex for step, digest in digests.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Adjacent rows with their tokens and spans. Spans and texts agree in each row."""

    rows: Rows
    start: int
    """Position of the first token in the store."""
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    spans: Spans
    """Of all rows, in order."""
    teacher: npt.NDArray[np.float32] | None = None
    """A teacher's logprobs as they are stored; None if the store has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans of many rows, as arrays of length N."""

    instances: list[str]
    """Instances of sampled spans, roles of env spans."""
    rows: Ints
    """Row within the block."""
    versions: Ints
    """NO_VERSION for env spans."""
    sizes: Ints
    seconds: npt.NDArray[np.float64]
    """0 for sampled spans."""
    parent_ends: Ints
    """-1 where no context branch begins."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, str, int, int, float, int]]) -> Spans:
        """Build the arrays from tuples of row, instance, version, tokens, seconds and `parent_end`. Raises
        OverflowError for numbers beyond 64 bits."""
        table = np.asarray([(span[0], *span[2:4], span[5]) for span in spans], np.int64)
        rows, versions, sizes, parent_ends = table.reshape(-1, 4).T
        instances, seconds = [s[1] for s in spans], np.asarray([s[4] for s in spans], np.float64)
        return cls(
            instances=instances, rows=rows, versions=versions, sizes=sizes, seconds=seconds, parent_ends=parent_ends
        )

    def sampled_tokens(self) -> Counter[tuple[str, int]]:
        """Count the sampled tokens by (instance, version)."""
        counts = Counter[tuple[str, int]]()
        for instance, version, size in zip(self.instances, self.versions.tolist(), self.sizes.tolist(), strict=True):
            if version != NO_VERSION:
                counts[instance, version] += size
        return counts

    def branches(self, prompts: Ints) -> dict[int, list[ContextBranch]]:
        """Context branches by row, for rows that have any. prompts: prompt length of each row."""
        by_row: dict[int, list[ContextBranch]] = {}
        starts = np.cumsum(self.sizes) - self.sizes
        firsts = dict(zip(*(part.tolist() for part in np.unique(self.rows, return_index=True)), strict=True))
        for i in np.flatnonzero(self.parent_ends >= 0).tolist():
            row = int(self.rows[i])
            position = int(prompts[row] + starts[i] - starts[firsts[row]])
            by_row.setdefault(row, []).append(ContextBranch(position, int(self.parent_ends[i])))
        return by_row

    def span_totals(self, count: int) -> npt.NDArray[np.float64]:
        """[count, 3] the columns SPAN_TOTALS, computed from the spans of `count` rows."""
        is_observation = self.versions == NO_VERSION
        starts = ~is_observation  # a turn begins where a sampled span comes first in its row, or after a given one
        starts[1:] &= is_observation[:-1] | (self.rows[1:] != self.rows[:-1])
        return np.stack(
            [np.bincount(self.rows, weights, count) for weights in (starts, is_observation * self.sizes, self.seconds)],
            axis=1,
        )


def read_blocks(store: StoreReader, start: int, stop: int, max_tokens: int) -> Iterator[RowBlock]:
    """Read the rows at start <= row < stop in blocks. Raises StoreError at the first row that cannot be read."""
    for block_start in range(start, stop, BLOCK_ROWS):
        rows = store.row_columns(block_start, min(block_start + BLOCK_ROWS, stop))
        for a, b in _block_ranges(rows, max_tokens):
            yield _read(store, rows[a:b])


def _block_ranges(rows: Rows, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are read together: at most `max_tokens` tokens, and no gap above MAX_GAP_TOKENS."""
    starts = rows["offset"]
    ends = starts + rows["prompt_tokens"] + rows["response_tokens"]
    a = 0
    while a < len(rows):
        extent = np.maximum.accumulate(ends[a:]) - np.minimum.accumulate(starts[a:])
        has_gap = np.abs(starts[a + 1 :] - ends[a:-1]) > MAX_GAP_TOKENS
        stops = (extent[1:] > max_tokens) | has_gap
        b = a + 1 + int(np.argmax(stops)) if stops.any() else len(rows)
        yield a, b
        a = b


def _read(store: StoreReader, rows: Rows) -> RowBlock:
    tokens, start, text, text_start = store.read_tokens(rows)
    mask = store.token_masks(start, start + len(tokens["ids"]))
    spans = _read_spans(rows, tokens["versions"], start, text, text_start)
    if spans is None:
        # Some columns contradict each other: the reader of single rows raises, if the row cannot be read.
        ended_trajectories = store.unpack(rows, tokens, start, text, text_start)
        spans = Spans.of([(i, *_of_span(s)) for i, r in enumerate(ended_trajectories) for s in r.trajectory.spans])
    return RowBlock(
        rows=rows,
        start=start,
        ids=tokens["ids"],
        logprobs=tokens["logprobs"],
        versions=tokens["versions"],
        mask=mask,
        spans=spans,
        teacher=tokens.get(TEACHER_ARRAY),
    )


def _of_span(span: Span) -> tuple[str, int, int, float, int]:
    """(instance, version, tokens, seconds, parent_end) of a span."""
    if isinstance(span, EnvSpan):
        return span.role, NO_VERSION, len(span.tokens), span.seconds, -1 if span.parent_end is None else span.parent_end
    return span.instance, span.version, len(span.tokens), 0.0, -1


def _are_in_order(rows: Rows) -> bool:
    """Whether rows are contiguous in the store."""
    offsets, prompt_lengths, responses = (rows[name] for name in TOKEN_POSITION_COLUMNS)
    return (
        bool((offsets[1:] == (offsets + prompt_lengths + responses)[:-1]).all())
        and min(prompt_lengths.min(), responses.min()) >= 0
    )


def _read_spans(rows: Rows, versions: npt.NDArray[np.int32], start: int, text: bytes, text_start: int) -> Spans | None:
    """The spans of contiguous rows; None if the rows are not contiguous or anything in them is invalid."""
    offsets, prompt_lengths, responses = (rows[name] for name in TOKEN_POSITION_COLUMNS)
    is_valid = _are_in_order(rows)
    for name, members in (("finish", FINISHES), ("fate", FATES), ("reason", REASONS)):
        is_valid &= bool(((rows[name] >= 0) & (rows[name] < len(members))).all())
    text_starts = (rows["text_offset"] - text_start).tolist()
    sizes = rows["text_bytes"].tolist()
    try:
        extras = json.loads(b"[%s]" % b",".join(text[a : a + size] for a, size in zip(text_starts, sizes, strict=True)))
        spans = Spans.of([(i, *parse_span(*span)) for i, extra in enumerate(extras) for span in extra["segments"]])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    if not is_valid or len(extras) != len(rows) or (spans.sizes < 0).any():
        return None
    if not np.array_equal(np.bincount(spans.rows, spans.sizes, len(rows)), responses):
        return None
    if any(
        branch.parent_end >= branch.start
        for row_branches in spans.branches(prompt_lengths).values()
        for branch in row_branches
    ):
        return None
    # Prompts, of version -1, and spans in the order in which they are stored.
    order = np.argsort(np.concatenate([np.arange(len(rows)), spans.rows]), kind="stable")
    expected_versions = np.repeat(
        np.concatenate([np.full(len(rows), NO_VERSION), spans.versions])[order].astype(np.int32),
        np.concatenate([prompt_lengths, spans.sizes])[order],
    )
    offset = int(offsets[0]) - start
    return spans if np.array_equal(versions[offset : offset + len(expected_versions)], expected_versions) else None


def _check_rows(block: RowBlock, eta: int) -> Iterator[Finding]:
    """Check v_traj <= step <= v_traj + eta if consumed, and that no token is older than v_traj or newer than step; and
    that tokens which were not sampled have no version, no logprob and no gradient, and the others a finite logprob."""
    rows, spans = block.rows, block.spans
    sampled = (spans.sizes > 0) & (spans.versions != NO_VERSION)
    row_index, versions = spans.rows[sampled], spans.versions[sampled]
    v_traj, step, consumed_mask = rows["v_traj"], rows["step"], is_consumed(rows)
    oldest, newest = np.full(len(rows), np.iinfo(np.int64).max), np.full(len(rows), np.iinfo(np.int64).min)
    np.minimum.at(oldest, row_index, versions)
    np.maximum.at(newest, row_index, versions)
    breaks_v_traj = oldest < v_traj
    breaks_bound = consumed_mask & ((v_traj > step) | (step > v_traj + eta))
    breaks_step = consumed_mask & (newest > step)
    row_faults = _token_faults_by_row(block)
    turns = spans.span_totals(len(rows))
    stored = np.stack([rows[name] for name in SPAN_TOTALS], axis=1).astype(np.float64)
    versions_and_staleness = np.stack(
        [
            np.where(newest < oldest, NO_VERSION, oldest),
            np.where(newest < oldest, NO_VERSION, newest),
            np.where(consumed_mask, step - v_traj, -1),
        ],
        axis=1,
    )
    stored_versions = np.stack([rows[name] for name in VERSION_COLUMNS], axis=1)
    breaks_versions = (stored_versions != versions_and_staleness).any(axis=1)
    breaks_turns = np.logical_not(np.isclose(stored, turns, rtol=0, atol=(0, 0, SECONDS_TOLERANCE))).any(axis=1)
    is_wrong = breaks_v_traj | breaks_bound | breaks_step | breaks_versions | breaks_turns
    is_wrong |= np.isin(range(len(rows)), [*row_faults])
    for i in np.flatnonzero(is_wrong).tolist():
        location = f"trajectory {rows['trajectory'][i]}"
        if breaks_v_traj[i]:
            message = f"a token of version {oldest[i]}, v_traj is {v_traj[i]}"
            yield Finding(check=CHECK, location=location, message=message)
        if breaks_bound[i]:
            message = f"consumed by step {step[i]}, v_traj is {v_traj[i]} and eta {eta}"
            yield Finding(check=CHECK, location=location, message=message)
        if breaks_step[i]:
            message = f"a token of version {newest[i]}, consumed by step {step[i]}"
            yield Finding(check=CHECK, location=location, message=message)
        for message in row_faults.get(i, ()):
            yield Finding(check="arrays", location=location, message=message)
        if breaks_turns[i]:
            yield Finding(check="arrays", location=location, message=describe_span_total_mismatch(turns[i], stored[i]))
        if breaks_versions[i]:
            numbers = [
                "versions {} to {} and staleness {}".format(*v[i]) for v in (versions_and_staleness, stored_versions)
            ]
            message = f"its tokens have {numbers[0]}; stored are {numbers[1]}"
            yield Finding(check="arrays", location=location, message=message)


def _refused_tokens(block: RowBlock, start_row: int, refusals: Sequence[RefusedInstance]) -> Iterator[Finding]:
    """Tokens of instances that were out of service. start_row: number of the block's first row in the store."""
    spans = block.spans
    for i in np.unique(spans.rows[np.isin(spans.versions, [r.version for r in refusals])]).tolist():
        row_spans = [
            (spans.instances[index], int(spans.versions[index]), int(spans.sizes[index]))
            for index in np.flatnonzero(spans.rows == i).tolist()
        ]
        yield from refused_token_findings(
            f"trajectory {block.rows['trajectory'][i]}", start_row + i, row_spans, refusals
        )


def describe_span_total_mismatch(spans: Iterable[float], stored: Iterable[float]) -> str:
    """Describe a row whose spans and stored columns SPAN_TOTALS differ."""
    numbers = [" {:g} turns, {:g} given tokens, {:.6g} s".format(*values) for values in (spans, stored)]
    return f"its spans have{numbers[0]}; stored are{numbers[1]}"


def _token_faults_by_row(block: RowBlock) -> dict[int, list[str]]:
    """The `token_faults` of each row that has any, by row."""
    if _are_in_order(block.rows):  # checks all rows at once, and single rows only on a mismatch
        offsets, prompts, responses = (block.rows[name] for name in TOKEN_POSITION_COLUMNS)
        token_range = slice(int(offsets[0]) - block.start, int((offsets + prompts + responses)[-1]) - block.start)
        sizes = np.stack([prompts, responses], axis=1).ravel()
        trained = np.stack([np.zeros(len(prompts), np.uint8), block.rows["loss_mask"]], axis=1).ravel()
        sampled = block.versions[token_range] != NO_VERSION
        if (
            np.array_equal(block.mask[token_range], np.repeat(trained.astype(np.uint8), sizes) * sampled)
            and not block.logprobs[token_range][~sampled].any()
            and np.isfinite(block.logprobs[token_range]).all()
            and not (sampled & np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)).any()
            and (block.teacher is None or _are_all_or_none(block.teacher[token_range], sampled, prompts + responses))
        ):
            return {}
    errors: dict[int, list[str]] = {}
    for i, (offset, prompt, response, trained) in enumerate(
        block.rows[[*TOKEN_POSITION_COLUMNS, "loss_mask"]].tolist()
    ):
        a = offset - block.start
        if min(offset, prompt, response) < 0:
            continue
        row_tokens = slice(a, a + prompt + response)
        if row_errors := list(
            token_faults(
                block.versions[row_tokens],
                block.logprobs[row_tokens],
                block.mask[row_tokens],
                prompt,
                trained,
                None if block.teacher is None else block.teacher[row_tokens],
            )
        ):
            errors[i] = row_errors
    return errors


def token_faults(
    versions: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    mask: npt.NDArray[np.uint8],
    prompt_length: int,
    loss_mask: int,
    teacher: npt.NDArray[np.float32] | None = None,
) -> Iterator[str]:
    """Describe contradictions between a row's token arrays. loss_mask: that of the
    row; teacher: a teacher's logprobs as they are stored, None if the store has none."""
    sampled = versions != NO_VERSION
    if count := int(np.count_nonzero(sampled[:prompt_length])):
        yield f"{count} tokens of the prompt have a version"
    if count := int(np.count_nonzero(logprobs[~sampled])):
        yield f"{count} tokens that were not sampled have a logprob"
    if count := int(np.count_nonzero(~np.isfinite(logprobs[sampled]))):
        yield f"{count} sampled tokens have a logprob that is not finite"
    expected_mask = sampled * np.uint8(loss_mask != 0)
    expected_mask[:prompt_length] = 0
    if count := int(np.count_nonzero(mask > expected_mask)):
        yield f"{count} tokens have a loss mask, and carry no gradient"
    if count := int(np.count_nonzero(mask < expected_mask)):
        yield f"{count} tokens that carry gradient have no loss mask"
    if teacher is None:
        return
    if count := int(np.count_nonzero(~lacks_teacher_logprob(teacher[~sampled]))):
        yield f"{count} tokens that were not sampled have a teacher's logprob"
    if not lacks_teacher_logprob(teacher).all() and (count := int(np.count_nonzero(~np.isfinite(teacher[sampled])))):
        yield f"{count} sampled tokens have no finite logprob of the teacher, which has computed others of the row"


def _are_all_or_none(teacher: npt.NDArray[np.float32], sampled: npt.NDArray[np.bool_], sizes: Ints) -> bool:
    """Whether, of adjacent rows with these numbers of tokens, either all sampled tokens of a row have a finite logprob
    of a teacher or none has, and no other token has one."""
    lacking, row_index = lacks_teacher_logprob(teacher), np.repeat(np.arange(len(sizes)), sizes)
    num_sampled = np.bincount(row_index[sampled], minlength=len(sizes))
    num_lacking = np.bincount(row_index[sampled & lacking], minlength=len(sizes))
    return bool(
        lacking[~sampled].all()
        and np.isfinite(teacher[sampled & ~lacking]).all()
        and ((num_lacking == 0) | (num_lacking == num_sampled)).all()
    )


def _hash(block: RowBlock, digests: dict[int, BatchDigest], steps: Iterable[int]) -> None:
    """Add the rows of a block to the hashes of these steps' batches."""
    consumed_mask = is_consumed(block.rows) & np.isin(block.rows["step"], sorted(steps))
    names = ["trajectory", "v_traj", "step", *TOKEN_POSITION_COLUMNS, "reward", "advantage"]
    branches = block.spans.branches(block.rows["prompt_tokens"])
    for number in np.flatnonzero(consumed_mask).tolist():
        id, v_traj, step, offset, prompt, response, reward, advantage = block.rows[names][number].item()
        a = offset - block.start
        b, c = a + prompt, a + prompt + response
        versions, logprobs = block.versions[b:c], block.logprobs[b:c]
        if (is_observation := versions == NO_VERSION).any():  # a row that is read has no logprobs there
            logprobs = np.where(is_observation, np.float32(0), logprobs)
        digests.setdefault(step, BatchDigest()).add(
            (id, v_traj),
            block.ids[a:b],
            block.ids[b:c],
            versions,
            logprobs,
            (reward, advantage),
            branches.get(number, ()),
            None if block.teacher is None else decode_teacher_logprobs(block.teacher[b:c], versions),
        )

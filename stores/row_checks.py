"""The part of an audit that reads tokens: rows in blocks of bounded size, checked column by column.

Rows are independent of each other but for the hash of a step's batch, which goes on from block to block; so ranges of
rows can be checked apart, by several processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stores.base import BatchDigest
from stores.consumption import is_consumed
from stores.errors import StoreError
from stores.findings import Finding
from stores.layout import AT, FATES, FINISHES, FLOAT_AT, REASONS
from stores.reading import BLOCK_ROWS, StoreReader
from stores.trajectory import NO_VERSION

CHECK = "bound"
Ints = npt.NDArray[np.int64]
GAP = 65_536
"""Tokens between rows that are not read just because rows on both sides are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """A task: check the rows at first <= row < last and hash the batches of `steps`, all of whose rows lie there.
    most_tokens: read together; a longer trajectory is read alone."""

    first: int
    last: int
    steps: frozenset[int]
    most_tokens: int


@dataclass(slots=True, kw_only=True)
class RowsChecked:
    """What was found in a range of rows. digests: of the batches, by step. error: why a row, and all after it, could
    not be read; empty if all could."""

    first: int
    findings: list[Finding] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    error: str = ""


def check_rows_at(path: str, snapshot: str, eta: int, rows: RowRange) -> RowsChecked:
    """As `check_rows`; a function of plain values, so that it can be sent to a worker."""
    return check_rows(StoreReader.at(Path(path), snapshot), eta, rows)


def check_rows(store: StoreReader, eta: int, rows: RowRange) -> RowsChecked:
    """Check a range of rows."""
    found = RowsChecked(first=rows.first)
    digests: dict[int, BatchDigest] = {}
    try:
        for block in read_blocks(store, rows.first, rows.last, rows.most_tokens):
            found.findings += _bound(block, eta)
            _hash(block, digests, rows.steps)
    except StoreError as error:
        found.error = str(error)
    found.digests = {step: digest.hex for step, digest in digests.items()}
    return found


def hash_batches(store: StoreReader, rows: RowRange) -> dict[int, str]:
    """The hashes of the batches of steps, all of whose rows lie in a range. Raises StoreError."""
    digests: dict[int, BatchDigest] = {}
    for block in read_blocks(store, rows.first, rows.last, rows.most_tokens):
        _hash(block, digests, rows.steps)
    return {step: digest.hex for step, digest in digests.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Rows that were read, and found to agree with the segments in their texts. begin: where the tokens begin in the
    store; segments: [N, 3] row in the block, version and length of each sampled segment that has tokens."""

    ints: Ints
    floats: npt.NDArray[np.float32]
    begin: int
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    segments: Ints


def read_blocks(store: StoreReader, first: int, last: int, most_tokens: int) -> Iterator[RowBlock]:
    """The rows at first <= row < last in blocks. Raises StoreError at the first row that cannot be read."""
    for begin in range(first, last, BLOCK_ROWS):
        ints, floats = store.numbers(begin, min(begin + BLOCK_ROWS, last))
        for a, b in _cuts(ints, most_tokens):
            yield _read(store, ints[a:b], floats[a:b])


def _cuts(ints: Ints, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows that are read together: no more than `most_tokens`, and without gaps."""
    begins = ints[:, AT["offset"]]
    ends = begins + ints[:, AT["prompt_tokens"]] + ints[:, AT["response_tokens"]]
    a = 0
    while a < len(ints):
        extent = np.maximum.accumulate(ends[a:]) - np.minimum.accumulate(begins[a:])
        apart = np.abs(begins[a + 1 :] - ends[a:-1]) > GAP
        stops = (extent[1:] > most_tokens) | apart
        b = a + 1 + int(np.argmax(stops)) if stops.any() else len(ints)
        yield a, b
        a = b


def _read(store: StoreReader, ints: Ints, floats: npt.NDArray[np.float32]) -> RowBlock:
    tokens, begin, text, text_begin = store.extent(ints)
    store.require_masks(begin, begin + len(tokens["ids"]))
    segments = _agreeing(ints, tokens["versions"], begin, text, text_begin)
    if segments is None:
        # Something contradicts something: the reader of single rows says what, if it is of consequence.
        rows = list(store.unpacked(ints, floats, tokens, begin, text, text_begin))
        of_rows = [(i, s.version, len(s.tokens)) for i, r in enumerate(rows) for s in r.trajectory.segments]
        segments = np.asarray(of_rows, np.int64).reshape(-1, 3)
    return RowBlock(
        ints=ints,
        floats=floats,
        begin=begin,
        ids=tokens["ids"],
        logprobs=tokens["logprobs"],
        versions=tokens["versions"],
        segments=segments[(segments[:, 2] > 0) & (segments[:, 1] != NO_VERSION)],
    )


def _agreeing(ints: Ints, versions: npt.NDArray[np.int32], begin: int, text: bytes, text_begin: int) -> Ints | None:
    """The segments of rows that lie one after another, if everything about them is in order; None if anything is not,
    or if they lie otherwise."""
    offsets, prompts, responses = (ints[:, AT[name]] for name in ("offset", "prompt_tokens", "response_tokens"))
    in_place = (
        bool((offsets[1:] == (offsets + prompts + responses)[:-1]).all()) and min(prompts.min(), responses.min()) >= 0
    )
    for name, members in (("finish", FINISHES), ("fate", FATES), ("reason", REASONS)):
        in_place &= bool(((ints[:, AT[name]] >= 0) & (ints[:, AT[name]] < len(members))).all())
    places = (ints[:, AT["text_offset"]] - text_begin).tolist()
    sizes = ints[:, AT["text_bytes"]].tolist()
    try:
        extras = json.loads(b"[%s]" % b",".join(text[a : a + size] for a, size in zip(places, sizes, strict=True)))
        stored = [(i, version, size) for i, extra in enumerate(extras) for _, version, size, *_ in extra["segments"]]
        segments = np.asarray(stored, np.int64).reshape(-1, 3)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    if not in_place or len(extras) != len(ints) or (segments[:, 2] < 0).any():
        return None
    if not np.array_equal(np.bincount(segments[:, 0], segments[:, 2], len(ints)), responses):
        return None
    # Prompts, of version -1, and segments in the order in which they are stored.
    rows = np.concatenate([np.arange(len(ints)), segments[:, 0]])
    order = np.argsort(rows, kind="stable")
    expected = np.repeat(
        np.concatenate([np.full(len(ints), -1), segments[:, 1]])[order].astype(np.int32),
        np.concatenate([prompts, segments[:, 2]])[order],
    )
    at = int(offsets[0]) - begin
    return segments if np.array_equal(versions[at : at + len(expected)], expected) else None


def _bound(block: RowBlock, eta: int) -> Iterator[Finding]:
    """Check v_traj <= step <= v_traj + eta if consumed, and that no token is older than v_traj or newer than step."""
    ints, segments = block.ints, block.segments
    v_traj, step, consumed = ints[:, AT["v_traj"]], ints[:, AT["step"]], is_consumed(ints)
    oldest, newest = np.full(len(ints), np.iinfo(np.int64).max), np.full(len(ints), np.iinfo(np.int64).min)
    np.minimum.at(oldest, segments[:, 0], segments[:, 1])
    np.maximum.at(newest, segments[:, 0], segments[:, 1])
    older = oldest < v_traj
    outside = consumed & ~((v_traj <= step) & (step <= v_traj + eta))
    newer = consumed & (newest > step)
    for i in np.flatnonzero(older | outside | newer).tolist():
        where = f"trajectory {ints[i, AT['trajectory']]}"
        if older[i]:
            what = f"a token of version {oldest[i]}, v_traj is {v_traj[i]}"
            yield Finding(check=CHECK, where=where, what=what)
        if outside[i]:
            what = f"consumed by step {step[i]}, v_traj is {v_traj[i]} and eta {eta}"
            yield Finding(check=CHECK, where=where, what=what)
        if newer[i]:
            what = f"a token of version {newest[i]}, consumed by step {step[i]}"
            yield Finding(check=CHECK, where=where, what=what)


def _hash(block: RowBlock, digests: dict[int, BatchDigest], steps: Iterable[int]) -> None:
    """Go on hashing the batches of these steps with the rows of a block."""
    consumed = is_consumed(block.ints) & np.isin(block.ints[:, AT["step"]], sorted(steps))
    columns = [AT[name] for name in ("trajectory", "v_traj", "step", "offset", "prompt_tokens", "response_tokens")]
    numbers = block.floats[:, [FLOAT_AT["reward"], FLOAT_AT["advantage"]]]
    for row, (reward, advantage) in zip(
        block.ints[consumed][:, columns].tolist(), numbers[consumed].tolist(), strict=True
    ):
        id, v_traj, step, offset, prompt, response = row
        a = offset - block.begin
        b, c = a + prompt, a + prompt + response
        digests.setdefault(step, BatchDigest()).add(
            (id, v_traj), block.ids[a:b], block.ids[b:c], block.versions[b:c], block.logprobs[b:c], (reward, advantage)
        )

"""The contract of a trajectory store, and the values it keeps. Pure; two implementations, one conformance suite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stores.trajectory import Ended, PolicyVersion, Trajectory, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What a store's numbers mean: the promise of the run that wrote it."""

    run: str
    eta: int
    groups_per_step: int
    group_size: int
    members_started: int
    held_out: int | None = None
    """How many held-out prompts are never drawn for training: part of which prompt a group's id stands for. None in
    stores of earlier versions, which drew without looking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The protocol's books at a commit. With the rows up to it they must balance: started = ended + live."""

    num_started: int
    num_ended: dict[str, int]
    """By "fate:reason"."""
    live: tuple[tuple[int, int], ...]
    """Trajectories in flight, as half-open ranges of ids."""
    next_step: int
    version: int

    @property
    def num_live(self) -> int:
        return sum(b - a for a, b in self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One commit. kind: "step", a training step with the batch it consumed; "end", the run's end; "resume", what was in
    flight when the run was lost, given up before it goes on."""

    kind: str
    step: int
    ledger: LedgerState
    metrics: dict[str, float] = field(default_factory=dict)
    weight_fingerprint: str = ""
    """Of the version this step published."""
    loaded_fingerprints: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By instance: the version it serves and the fingerprint of what it holds."""
    batch_fingerprint: str = ""
    """Of the tokens, logprobs, versions and advantages the trainer received, in its order."""
    num_rows: int = 0
    num_tokens: int = 0
    """Rows and stored tokens (prompts included) of this commit: what a truncated array is noticed by."""


class TrajectoryStore(Protocol):
    """Append-only. One owner commits; anyone may read."""

    @property
    def header(self) -> RunHeader: ...

    def commit(self, record: StepRecord, ended: Sequence[Ended]) -> str:
        """Store a step and the trajectories that ended since the last commit, all or nothing; returns the snapshot.
        The record's num_rows and num_tokens are filled in here. Raises StoreError; then nothing was stored."""
        ...

    def steps(self) -> list[StepRecord]:
        """All commits, oldest first."""
        ...

    def ended(self, step: int | None = None) -> Iterable[Ended]:
        """All stored trajectories in the order stored, or those that one training step consumed, in its order."""
        ...

    def get(self, trajectory: TrajectoryId) -> Ended | None: ...


def id_ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges that cover exactly these ids.

    >>> id_ranges([3, 1, 2, 7])
    ((1, 4), (7, 8))
    """
    ranges: list[tuple[int, int]] = []
    for i in sorted(ids):
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    return tuple(ranges)


def batch_fingerprint(batch: Iterable[tuple[Trajectory, float]]) -> str:
    """32 hex digits over what a training step receives: (trajectory, advantage) in order."""
    digest = hashlib.blake2b(digest_size=16)
    for trajectory, advantage in batch:
        digest.update(np.asarray([trajectory.id, trajectory.v_traj], np.int64).tobytes())
        for array in (trajectory.prompt_tokens, trajectory.response_tokens, trajectory.versions):
            digest.update(np.asarray([len(array)], np.int64).tobytes() + array.astype(np.int32).tobytes())
        digest.update(trajectory.logprobs.astype(np.float32).tobytes())
        digest.update(np.asarray([trajectory.reward, advantage], np.float32).tobytes())
    return digest.hexdigest()


def record_to_json(record: StepRecord) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "kind": record.kind,
        "step": record.step,
        "ledger": {
            "num_started": record.ledger.num_started,
            "num_ended": record.ledger.num_ended,
            "live": [list(r) for r in record.ledger.live],
            "next_step": record.ledger.next_step,
            "version": record.ledger.version,
        },
        "metrics": record.metrics,
        "weight_fingerprint": record.weight_fingerprint,
        "loaded_fingerprints": {k: list(v) for k, v in record.loaded_fingerprints.items()},
        "batch_fingerprint": record.batch_fingerprint,
        "num_rows": record.num_rows,
        "num_tokens": record.num_tokens,
    }


def record_from_json(value: dict[str, Any]) -> StepRecord:
    """The inverse of `record_to_json`."""
    ledger = value["ledger"]
    return StepRecord(
        kind=value["kind"],
        step=value["step"],
        ledger=LedgerState(
            num_started=ledger["num_started"],
            num_ended=dict(ledger["num_ended"]),
            live=tuple((a, b) for a, b in ledger["live"]),
            next_step=ledger["next_step"],
            version=ledger["version"],
        ),
        metrics=dict(value["metrics"]),
        weight_fingerprint=value["weight_fingerprint"],
        loaded_fingerprints={k: (PolicyVersion(v), f) for k, (v, f) in value["loaded_fingerprints"].items()},
        batch_fingerprint=value["batch_fingerprint"],
        num_rows=value["num_rows"],
        num_tokens=value["num_tokens"],
    )

"""Values stored with commits: the run's header and the record of each commit. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from staleflow.stores.context_branches import ContextBranch
from staleflow.stores.serialization import Codec
from staleflow.stores.trajectory import Trajectory
from staleflow.stores.weights.weight_report import WeightCheck

RESUME_CHANGEABLE_KEYS = (
    "steps",
    "rollout.instances",
    "rollout.max_instances",
    "rollout.min_instances",
    "cluster.",
    "deadlines.",
    "training.checkpoint_every",
    "training.keep_every",
    "evaluation.every",
    "evaluation.max_slot_share",
    "training.ranks",
    "training.resume_every",
    "training.schedule_steps",
)
"""Keys that `staleflow resume --set` may change: where and how long a run runs, not the result of its stored steps. The
number of ranks changes only the rounding of later steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The settings of a run without which its stored numbers cannot be interpreted."""

    run: str
    eta: int
    """The staleness bound."""
    groups_per_step: int
    group_size: int
    members_started_per_group: int
    """Trajectories started per group; those beyond `group_size` are redundant."""
    num_held_out: int = 0
    """Number of held-out prompts, never drawn for training: needed to tell a group's prompt from its id."""
    url: str = ""
    """Where in a bucket the store's data are; empty if they are in its folder."""
    job: str = ""
    """The job file, TOML, of a store in a bucket: whoever has only its URL knows the run by it."""
    max_prompt_tokens: int | None = None
    """Length in tokens above which prompts are replaced by others; None: none is replaced."""
    sources: tuple[str, ...] = ()
    """Names of the run's task sources; the number in a row's column `source` is a position here. Empty if it has one
    source without a name."""

    @property
    def bound_text(self) -> str:
        """The staleness bound in words."""
        return f"staleness bound eta = {self.eta}"


@dataclass(slots=True, kw_only=True)
class SourceState:
    """Counts of the groups of one task source, and the state of its sampler."""

    num_drawn: int = 0
    """Groups whose prompts have arrived."""
    num_trained: int = 0
    num_filtered: int = 0
    num_aborted: int = 0
    credit: float = 0.0
    """Number of groups by which it was trained on less than its ratio requires; negative if it was on more."""
    usable_share: float = 1.0
    """Moving average of the share of its groups that are trained on."""
    num_useless: int = 0
    """Groups that were filtered or failed since one of it was trained on."""
    sampler: dict[str, list[float]] = field(default_factory=dict)
    """State of its sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The ledger's counts at a commit. They must match the rows so far: started = ended + live."""

    num_started: int
    """Trajectories that were started."""
    num_ended: dict[str, int]
    """Ended trajectories by "fate:reason"."""
    live: tuple[tuple[int, int], ...]
    """Trajectories in flight, as half-open ranges of ids."""
    next_step: int
    """The training step that would come next."""
    version: int
    """The newest policy version."""
    sources: tuple[SourceState, ...] = ()
    """Of each task source; empty if the run has one source, whose prompts are drawn in order."""
    tasks_in_flight: tuple[tuple[int, int, int], ...] = ()
    """(group, source, task) of each group in flight, where `sources` is not empty."""

    @property
    def num_live(self) -> int:
        """Number of trajectories in flight."""
        return sum(b - a for a, b in self.live)


EMPTY_LEDGER = LedgerState(num_started=0, num_ended={}, live=(), next_step=0, version=0)
"""The ledger of a run that has started nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The record of any commit: of a training step with the batch it consumed, or of another event, which `kind`
    names."""

    kind: str
    """One of "step", a training step; "end", the run's end; "resume", an interrupted run that went on;
    "refusal", an instance that was taken out of service for its weights, or checks of weights whose commit was
    undone."""
    step: int
    """Number of the training step, from 0: step k trains policy version k and publishes version k + 1. Of other kinds,
    the step that was next."""
    ledger: LedgerState
    metrics: dict[str, float] = field(default_factory=dict)
    """By name; docs/metrics.md has their units and meanings."""
    weight_fingerprint: str = ""
    """Fingerprint of the version this step published."""
    batch_fingerprint: str = ""
    """Hash of what the trainer received, in its order: ids, v_traj, tokens, versions, logprobs, rewards, advantages and
    context branches of the trajectories."""
    num_rows: int = 0
    num_tokens: int = 0
    """Rows and stored tokens (prompts included) of this commit, which the audit compares with its rows."""
    weight_checks: tuple[WeightCheck, ...] = ()
    """What the instances' pulls since the commit before showed."""
    inputs: dict[str, str] = field(default_factory=dict)
    """What the weights of the next steps are computed from besides the batches, by name (see
    pipeline/recovery/start_inputs.py): in the first commit of each start of the run, and when the trainer has moved."""
    rows_fingerprint: str = ""
    """Hash of this commit's rows as they are stored, of any fate; empty without rows."""
    previous: str = ""
    """Entry of the commit before (`chain_hash`)."""

    def is_repeat_of(self, other: CommitRecord | None) -> bool:
        """Whether this is a repeated request for the commit whose record is `other`."""
        if other is None or (self.kind, self.step) != (other.kind, other.step):
            return False
        if self.kind == "refusal" and self._checked_pulls != other._checked_pulls:
            return False
        return replace(self.ledger, live=()) == replace(other.ledger, live=())

    @property
    def _checked_pulls(self) -> list[tuple[str, int]]:
        """The instances and versions that `weight_checks` is about; its numbers may be NaN, which equals nothing."""
        return [(str(check.instance), int(check.version)) for check in self.weight_checks]


def chain_hash(record: bytes) -> str:
    """Hash, 64 hex digits, of a commit's record as stored: the commit's entry in the run's hash chain
    (stores/auditing/chain.py)."""
    return hashlib.sha256(record).hexdigest()


def id_ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges that contain exactly these ids.

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


class BatchDigest:
    """Incremental hash of a batch, trajectory by trajectory."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(
        self,
        id_and_version: tuple[int, int],
        prompt: npt.NDArray[np.int32],
        response: npt.NDArray[np.int32],
        versions: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        reward_and_advantage: tuple[float, float],
        branches: Sequence[ContextBranch] = (),
        teacher_logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Add a trajectory. id_and_version: its id and v_traj. Other arguments as in Trajectory."""
        self._hash.update(_TWO_INTS.pack(*id_and_version))
        for array in (prompt, response, versions):
            self._hash.update(_LENGTH.pack(len(array)))
            self._hash.update(np.ascontiguousarray(array, "<i4").data)
        self._hash.update(np.ascontiguousarray(logprobs, "<f4").data)
        self._hash.update(_TWO_NUMBERS.pack(*reward_and_advantage))
        if branches:
            self._hash.update(_LENGTH.pack(-len(branches)))
        for branch in branches:
            self._hash.update(_TWO_INTS.pack(*branch))
        if teacher_logprobs is not None:
            self._hash.update(b"teacher")
            self._hash.update(np.ascontiguousarray(teacher_logprobs, "<f4").data)

    @property
    def hex(self) -> str:
        """The hash so far, 32 hex digits."""
        return self._hash.hexdigest()


_TWO_INTS, _LENGTH, _TWO_NUMBERS = struct.Struct("<qq"), struct.Struct("<q"), struct.Struct("<ff")


def batch_fingerprint(batch: Iterable[tuple[Trajectory, float]]) -> str:
    """Hash, 32 hex digits, of what a training step receives: (trajectory, advantage) in order."""
    digest = BatchDigest()
    for t, advantage in batch:
        arrays = (t.prompt_tokens, t.response_tokens, t.versions, t.logprobs)
        digest.add((t.id, t.v_traj), *arrays, (t.reward, advantage), t.branches, t.teacher_logprobs)
    return digest.hex


RECORD_CODEC = Codec(
    omit_defaults={
        RunHeader: ("sources",),
        LedgerState: ("sources", "tasks_in_flight"),
        CommitRecord: ("inputs", "rows_fingerprint", "previous"),
    },
    stored_names={
        RunHeader: {
            "members_started_per_group": "members_started",
            "num_held_out": "held_out",
            "max_prompt_tokens": "longest_prompt",
        }
    },
)
"""Encodes headers and step records as the stores keep them."""

"""Splits a step's trajectories into minibatches and micro-batches. Numpy, pure.

A micro-batch is bounded by tokens, not by rows: lengths vary by orders of magnitude, memory must not. Token
weights are fixed over the whole minibatch first, so how it is split cannot change its loss.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from staleflow.stores.context_branches import ContextBranch
from staleflow.stores.trajectory import NO_VERSION, EndedTrajectory
from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES
from staleflow.tasks.training.microbatch_split import split_by_length, split_by_prompt
from staleflow.tasks.training.shared_prompts import indices_of_equal_keys

MESSAGE_BYTES = 32 * 2**20
"""Maximum number of bytes of rows in a message to the trainer, if there are several. A process that sends or receives a
message has two copies of it in memory, and does little else meanwhile."""
ROW_BYTES = 256
"""Bytes of a row in a message without its tokens, at most if it has no branches; each takes some ten more."""
MAX_LAG = 2**15 - 1
"""Largest lag that a row can represent; larger ones are stored as this."""
LogprobsByRow = Mapping[int, npt.NDArray[np.float32]]
"""[T] logprobs of rows' responses, by row index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory as the trainer needs it."""

    prompt: npt.NDArray[np.int32]  # [P] token ids
    response: npt.NDArray[np.int32]  # [T] token ids
    behaviour: npt.NDArray[np.float32]  # [T] logprobs under the sampling policy, nats
    sampled: npt.NDArray[np.bool_]  # [T] False: an environment's token between two turns; no gradient
    advantage: float
    staleness: int
    trained: bool = True
    """False: no gradient, but the row still counts in the denominator."""
    lags: npt.NDArray[np.int16] | None = None
    """[T] versions between the one that sampled each token and the one the step begins with, at most MAX_LAG; None:
    `staleness` for all tokens."""
    group: int = 0
    """Id of its group, within which a loss may compare rewards (DPO)."""
    branches: tuple[ContextBranch, ...] = ()
    """Points where the response continues an earlier context; a model computes a row with branches as several sequences
    (branch_sequences.py)."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[T] logprobs under the reference model, nats, as a teacher computed them; None if none did."""

    def __post_init__(self) -> None:
        assert len(self.prompt), "the first token of a response is predicted from its prompt"

    @classmethod
    def of(cls, row: EndedTrajectory) -> Row:
        """Convert a stored trajectory to a row."""
        return cls(
            prompt=row.trajectory.prompt_tokens,
            response=row.trajectory.response_tokens,
            behaviour=row.trajectory.logprobs,
            sampled=row.trajectory.sampled,
            advantage=row.advantage,
            staleness=row.staleness,
            trained=row.loss_mask,
            lags=_lags(row),
            group=row.trajectory.group,
            branches=row.trajectory.branches,
            reference_logprobs=row.trajectory.teacher_logprobs,
        )

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, which are those with a gradient."""
        return int(np.count_nonzero(self.sampled))

    @property
    def is_usable(self) -> npt.NDArray[np.bool_]:
        """[T] bool, whether each token was sampled and its stored logprob is finite."""
        usable: npt.NDArray[np.bool_] = self.sampled & np.isfinite(self.behaviour)
        return usable

    @property
    def num_unusable(self) -> int:
        """Number of sampled tokens without a finite stored logprob, for which no importance ratio can be computed."""
        return self.num_sampled - int(np.count_nonzero(self.is_usable))


def _lags(row: EndedTrajectory) -> npt.NDArray[np.int16]:
    """[T] lags of a stored trajectory's tokens; 0 for tokens of environments."""
    versions = row.trajectory.versions
    return np.where(versions == NO_VERSION, 0, np.clip(row.step - versions, 0, MAX_LAG)).astype(np.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMessage:
    """A message with rows of a step's batch. num_remaining: number of rows that follow in later messages."""

    pickled_rows: bytes
    num_remaining: int

    @classmethod
    def of(cls, batch: Sequence[EndedTrajectory], start: int) -> BatchMessage:
        """Pack the rows that a step consumes from row `start` on, as many as fit. Takes some 50 us a row, so not on an
        event loop; `rows` takes some 20."""
        stop = message_end(batch, start)
        return cls(
            pickled_rows=pickle.dumps([Row.of(row) for row in batch[start:stop]]), num_remaining=len(batch) - stop
        )

    def rows(self) -> list[Row]:
        """Unpack the rows."""
        rows: list[Row] = pickle.loads(self.pickled_rows)
        return rows


def message_end(batch: Sequence[EndedTrajectory], start: int) -> int:
    """Index after the last row of the message that starts with row `start`: as many rows as fit, at least one."""
    num_bytes, stop = 0, start
    while stop < len(batch):
        trajectory = batch[stop].trajectory
        # A prompt's token takes 4 bytes, a response's 11 with its logprob, 4 more with the reference's.
        token_bytes = 11 if trajectory.teacher_logprobs is None else 15
        num_bytes += 4 * len(trajectory.prompt_tokens) + token_bytes * trajectory.num_tokens + ROW_BYTES
        if num_bytes > MESSAGE_BYTES and stop > start:
            break
        stop += 1
    return stop


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded rows. Response columns begin at `response_start`: the logits at position start + t predict column
    t."""

    row_indices: tuple[int, ...]
    input_ids: npt.NDArray[np.int64]  # [N, L]
    attention_mask: npt.NDArray[np.int64]  # [N, L]
    prompt_lengths: npt.NDArray[np.int64]  # [N] tokens of each row's prompt
    response_start: int  # index of the first position whose prediction is used: min prompt length - 1
    targets: npt.NDArray[np.int64]  # [N, L - 1 - start], the token after each position
    mask: npt.NDArray[np.float32]  # same shape, 1 where the target is a sampled token
    behaviour: npt.NDArray[np.float32]  # same shape
    lags: npt.NDArray[np.int64]  # same shape
    token_weight: npt.NDArray[np.float32]  # [N, 1] weight of each of the row's tokens in the minibatch loss
    advantage: npt.NDArray[np.float32]  # [N, 1]

    def select(self, rows: slice, columns: slice = slice(None)) -> MicroBatch:
        """Select rows and response columns, as views."""
        return replace(
            self,
            row_indices=self.row_indices[rows],
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            prompt_lengths=self.prompt_lengths[rows],
            response_start=self.response_start + (columns.start or 0),
            targets=self.targets[rows, columns],
            mask=self.mask[rows, columns],
            behaviour=self.behaviour[rows, columns],
            lags=self.lags[rows, columns],
            token_weight=self.token_weight[rows],
            advantage=self.advantage[rows],
        )

    def split(self, max_sampled: int, *, may_split_rows: bool) -> list[MicroBatch]:
        """Split the batch into parts with a limited number of sampled tokens, in order, at least one in each.
        may_split_rows: whether a single row may be split."""
        counts = (self.mask > 0).sum(1)
        parts, start = list[MicroBatch](), 0
        while start < len(self.row_indices):
            num_fitting = int(np.searchsorted(counts[start:].cumsum(), max_sampled, side="right"))
            end = start + max(1, num_fitting)
            part = self.select(slice(start, end))
            parts += _split_columns(part, max_sampled) if may_split_rows and not num_fitting else [part]
            start = end
        return [part for part in parts if part.mask.any()]

    def scatter(self, rows: Sequence[Row], values: Mapping[int, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """[N, T] values of the batch from values of the rows' responses; 0 for rows without values."""
        result = np.zeros_like(self.behaviour)
        for k, i in enumerate(self.row_indices):
            if i in values:
                start = len(rows[i].prompt) - 1 - self.response_start
                response_values = values[i][max(0, -start) : result.shape[1] - start]
                result[k, max(0, start) : max(0, start) + len(response_values)] = response_values
        return result


def _split_columns(row: MicroBatch, max_sampled: int) -> list[MicroBatch]:
    """Split a single row into parts of `max_sampled` sampled tokens."""
    sampled = np.flatnonzero(row.mask[0] > 0)
    ends = [*sampled[max_sampled::max_sampled], row.mask.shape[1]]
    return [row.select(slice(0, 1), slice(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def token_weights(aggregation: str, lengths: Sequence[int], max_length: int) -> npt.NDArray[np.float32]:
    """[N] weight of each row's tokens. The sum of weight x loss over all tokens is the aggregated loss.

    token_mean: mean over all tokens (DAPO). sequence_mean: mean of per-sequence means (GRPO). constant_length: sum over
    tokens / (N x max_length) (Dr. GRPO).
    """
    if aggregation not in AGGREGATION_NAMES:
        raise ValueError(f"unknown aggregation {aggregation!r}; choose one of {', '.join(AGGREGATION_NAMES)}")
    n = np.maximum(np.asarray(lengths, np.float64), 1.0)  # no division by 0 for a row without tokens
    if aggregation == "token_mean":
        weights = np.full(len(n), 1.0 / max(sum(lengths), 1))
    elif aggregation == "sequence_mean":
        weights = 1.0 / (len(n) * n)
    else:
        weights = np.full(len(n), 1.0 / (len(n) * max_length))
    return weights.astype(np.float32)


def minibatches(
    num_rows: int, num_minibatches: int, rng: np.random.Generator, num_adjacent: int = 1
) -> list[npt.NDArray[np.int64]]:
    """Split the rows at random into `num_minibatches` parts of nearly equal size, or one per row if there are fewer.
    num_adjacent: number of adjacent rows that stay in one part."""
    parts = np.array_split(rng.permutation(num_rows // num_adjacent), num_minibatches)
    return [
        (np.sort(part)[:, None] * num_adjacent + np.arange(num_adjacent)).reshape(-1) for part in parts if len(part)
    ]


def microbatches(
    rows: Sequence[Row],
    indices: Sequence[int],
    weights: npt.NDArray[np.float32],
    token_budget: int,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    is_packed: bool = False,
) -> list[MicroBatch]:
    """Split the chosen rows so that rows x longest <= token_budget, shortest first; a single row always fits. Each rank
    gets its share of the rows in the same number of micro-batches, some of which may be empty.

    weights: [len(indices)], from `token_weights`. is_packed: the rows are computed without padding, and shared prompts
    once, so that only those tokens count, and rows of a prompt stay together.
    """
    responses = [len(rows[i].response) for i in indices]
    prompts = [len(rows[i].prompt) for i in indices]
    if is_packed:
        rows_by_prompt = indices_of_equal_keys(rows[i].prompt.tobytes() for i in indices)
        splits = split_by_prompt(rows_by_prompt, prompts, responses, num_ranks, token_budget)
    else:
        splits = split_by_length(
            [sum(lengths) for lengths in zip(prompts, responses, strict=True)], num_ranks, token_budget
        )
    return [_pad(rows, indices, weights, parts[rank]) if parts[rank] else EMPTY_MICROBATCH for parts in splits]


def _pad(
    rows: Sequence[Row], indices: Sequence[int], weights: npt.NDArray[np.float32], part: Sequence[int]
) -> MicroBatch:
    selected = [rows[indices[i]] for i in part]
    start = min(len(r.prompt) for r in selected) - 1
    # At least one target, also where all responses are empty.
    max_tokens = max(start + 2, *(len(r.prompt) + len(r.response) for r in selected))
    shape = (len(selected), max_tokens)
    ids, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, behaviour, lags = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for k, row in enumerate(selected):
        prompt, end = len(row.prompt), len(row.prompt) + len(row.response)
        ids[k, :prompt], ids[k, prompt:end] = row.prompt, row.response
        attention[k, :end] = 1
        mask[k, prompt:end] = row.sampled
        behaviour[k, prompt:end] = row.behaviour
        lags[k, prompt:end] = row.staleness if row.lags is None else row.lags
    return MicroBatch(
        row_indices=tuple(indices[i] for i in part),
        input_ids=ids,
        attention_mask=attention,
        prompt_lengths=np.asarray([len(r.prompt) for r in selected], np.int64),
        response_start=start,
        targets=ids[:, start + 1 :],
        mask=mask[:, start + 1 :],
        behaviour=behaviour[:, start + 1 :],
        lags=lags[:, start + 1 :],
        token_weight=np.asarray([[weights[i]] for i in part], np.float32),
        advantage=np.asarray([[r.advantage] for r in selected], np.float32),
    )


_ID, _ZERO, _UNSAMPLED = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.bool_)
_ROW = Row(prompt=_ID, response=_ID, behaviour=_ZERO, sampled=_UNSAMPLED, advantage=0.0, staleness=0)
EMPTY_MICROBATCH = replace(_pad([_ROW], [0], _ZERO, [0]), row_indices=())
"""The micro-batch of a rank without rows: two tokens that are not trained. Its pass through the model has a gradient of
0, and takes part in the collective operations of all ranks."""

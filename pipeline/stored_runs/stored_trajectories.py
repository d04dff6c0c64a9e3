"""Stored trajectories as flat records for users: numbers, texts and tokens; and the batches and metrics of training
steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.stored_runs.response_texts import decode_trajectory
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.dataframes import RowTexts, import_offline_module, plain_row
from staleflow.stores.trajectories.reader import StoreReader, UnreadableRow
from staleflow.stores.trajectories.records import CommitRecord, batch_fingerprint
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer

WINDOW_ROWS = 512
"""Maximum number of rows that are read together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTrajectory:
    """One stored trajectory: a response of one turn or several, and how it was sampled, scored and trained on.

    Arrays have an element for each token after the prompt, in order. They include tokens between two turns of the
    model, such as an environment's observation: `sampled` marks the model's own tokens.
    """

    id: int
    group: int
    """The group of trajectories of the same prompt."""
    step: int
    """The training step that consumed it; of others, the step that was next when it ended."""
    fate: str
    """How it ended: "consumed", "filtered" or "aborted"."""
    reason: str
    """Why it was filtered or aborted; "none" if it was consumed."""
    finish: str
    """Why sampling ended: "stop", "length", or "unfinished"."""
    v_traj: int
    """Oldest policy version that any of its sampled tokens may come from."""
    v_min: int
    """Oldest policy version that sampled one of its tokens; -1 if nothing was sampled."""
    v_max: int
    """Newest policy version that sampled one of its tokens; -1 if nothing was sampled."""
    staleness: int
    """step - v_traj, in policy versions, at most the run's bound; -1 if it was not consumed."""
    reward: float
    advantage: float
    """0 if it was not consumed."""
    loss_mask: bool
    """Whether it was scored, so that a loss applies to its sampled tokens."""
    error: str
    """Why its reward could not be computed; empty if it could."""
    reward_parts: Mapping[str, float]
    """Values of a reward's parts, by name."""
    turns: int
    """Number of the model's turns."""
    tool_s: float
    """Time that environments took, seconds."""
    arrived_s: float
    """When its prompt was drawn; like the other times in seconds since the run's start, 0 if it never happened."""
    routed_s: float
    """When it was sent to a rollout instance."""
    sampled_s: float
    """When sampling ended."""
    rewarded_s: float
    """When it was scored."""
    prompt: str
    """Text of the prompt, with the template's marks; empty if texts were not requested."""
    response: str
    """Text after the prompt; empty if texts were not requested."""
    messages: tuple[Mapping[str, Any], ...]
    """The messages after the prompt, in order: `role`, `content`, `tokens` (their number) and `seconds` of each; empty
    if texts were not requested."""
    prompt_ids: npt.NDArray[np.int32]  # [P]
    """Token ids of the prompt."""
    response_ids: npt.NDArray[np.int32]  # [T]
    """Token ids after the prompt."""
    logprobs: npt.NDArray[np.float32]  # [T]
    """Log-probability of each token under the policy that sampled it, nats; 0 of provided tokens."""
    versions: npt.NDArray[np.int32]  # [T]
    """Policy version that sampled each token; -1 of provided tokens."""
    sampled: npt.NDArray[np.bool_]  # [T]
    """Whether the model sampled each token."""

    @classmethod
    def of(cls, row: EndedTrajectory, detokenizer: Detokenizer | None = None) -> StoredTrajectory:
        """Build the record of a stored row. detokenizer: decodes its tokens; without one, texts are empty."""
        texts = RowTexts("", "", []) if detokenizer is None else decode_trajectory(row.trajectory, detokenizer)
        cells = plain_cells(row)
        return cls(
            id=cells["trajectory"],
            reward_parts=row.trajectory.reward_parts,
            prompt=texts.prompt,
            response=texts.response,
            messages=tuple(texts.messages),
            **{field.name: cells[field.name] for field in fields(cls) if field.name in cells},
        )

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled.sum())

    def __repr__(self) -> str:
        text = f": {self.prompt[-40:]!r} -> {self.response[:40]!r}" if self.response else ""
        return f"<StoredTrajectory {self.id}, {self.fate} at step {self.step}, reward {self.reward:.3f}{text}>"


def plain_cells(row: EndedTrajectory) -> dict[str, Any]:
    """The columns of a stored row by name, numbers as those of Python."""
    return {name: cell.item() if isinstance(cell, np.generic) else cell for name, cell in plain_row(row).items()}


def select_positions(store: StoreReader, where: str) -> npt.NDArray[np.int64]:
    """Positions of the rows that a condition selects, in stored order. Raises ConfigError."""
    (positions,) = np.nonzero(Selection(where).mask(store.displayed_columns()))
    return positions


def read_windows(
    store: StoreReader, positions: npt.NDArray[np.int64]
) -> Iterator[list[EndedTrajectory | UnreadableRow]]:
    """Yield the rows at these ascending positions, in order, reading one window at a time to limit memory."""
    for window in np.split(positions, np.flatnonzero(np.diff(positions // WINDOW_ROWS)) + 1):
        yield list(store.trajectories_at(window.tolist()))


def read_rows(store: StoreReader, where: str) -> Iterator[EndedTrajectory]:
    """Read the rows that a condition selects, in stored order. Raises ConfigError at once for an invalid condition,
    StoreError at a row that cannot be read."""
    return read_rows_at(store, select_positions(store, where))


def read_rows_at(store: StoreReader, positions: npt.NDArray[np.int64]) -> Iterator[EndedTrajectory]:
    """Read the rows at these positions, in order. Raises StoreError at a row that cannot be read."""
    for rows in read_windows(store, positions):
        for row in rows:
            if isinstance(row, UnreadableRow):
                raise StoreError(f'{row.error}; leave it out with where="trajectory != {row.trajectory}"')
            yield row


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedBatch:
    """The batch that a training step consumed, read from the store."""

    record: CommitRecord
    """The step's commit."""
    fingerprint: str
    """Hash of the tokens, logprobs, versions and advantages as they read now; the record has that of what the trainer
    received."""
    trajectories: tuple[StoredTrajectory, ...]
    """In the order in which they were trained on; without texts."""

    @property
    def is_intact(self) -> bool:
        """Whether tokens, logprobs, versions, rewards and advantages equal, bit for bit, those that the trainer got."""
        return self.fingerprint == self.record.batch_fingerprint


def read_batch(store: StoreReader, step: int) -> ConsumedBatch:
    """The batch of a training step. Raises ConfigError if the step is not stored, StoreError if it cannot be read."""
    record = next((r for r in store.commits() if r.kind == "step" and r.step == step), None)
    if record is None:
        raise ConfigError(f"{store.path}: no commit of step {step}")
    rows = list(store.trajectories(step=step))
    return ConsumedBatch(
        record=record,
        fingerprint=batch_fingerprint((row.trajectory, row.advantage) for row in rows),
        trajectories=tuple(StoredTrajectory.of(row) for row in rows),
    )


def metrics_table(steps: Iterable[CommitRecord]) -> Any:
    """A pandas.DataFrame of metrics with one row per step; NaN where a step lacks a metric. Raises ConfigError if
    pandas is not installed."""
    pandas = import_offline_module("pandas")
    rows = list(steps)
    index = pandas.Index([row.step for row in rows], name="step", dtype="int64")
    return pandas.DataFrame([row.metrics for row in rows], index=index, dtype="float64")

"""A stored run's training steps: metrics as a table, and the batch of each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from staleflow.pipeline.stored_runs.stored_trajectories import StoredTrajectory
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.dataframes import import_offline_module
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.records import StepRecord, batch_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedBatch:
    """The batch that a training step consumed, read from the store."""

    record: StepRecord
    """The step's commit."""
    fingerprint: str
    """Hash of the tokens, logprobs, versions and advantages as they read now; the record has that of what the trainer
    received."""
    trajectories: tuple[StoredTrajectory, ...]
    """In the order in which they were trained on; without texts."""

    @property
    def intact(self) -> bool:
        """Whether the batch equals the one that the trainer received, bit for bit."""
        return self.fingerprint == self.record.batch_fingerprint


def read_batch(store: StoreReader, step: int) -> ConsumedBatch:
    """The batch of a training step. Raises ConfigError if the step is not stored, StoreError if it cannot be read."""
    record = next((r for r in store.commits() if r.kind == "step" and r.step == step), None)
    if record is None:
        raise ConfigError(f"{store.path}: no commit of step {step}")
    rows = list(store.ended(step=step))
    return ConsumedBatch(
        record=record,
        fingerprint=batch_fingerprint((row.trajectory, row.advantage) for row in rows),
        trajectories=tuple(StoredTrajectory.of(row) for row in rows),
    )


def metrics_table(steps: Iterable[StepRecord]) -> Any:
    """A pandas.DataFrame of metrics with one row per step; NaN where a step lacks a metric. Raises ConfigError if
    pandas is not installed."""
    pandas = import_offline_module("pandas")
    rows = list(steps)
    index = pandas.Index([row.step for row in rows], name="step", dtype="int64")
    return pandas.DataFrame([row.metrics for row in rows], index=index, dtype="float64")

"""A stored run's commits, as its users read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.trajectories.dataframes import require
from staleflow.stores.trajectories.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One commit of a run: a training step with the batch it consumed, or the end of a start of the run."""

    kind: str
    """One of "step", a training step; "end", the run's end; "resume", an interrupted run that went on."""
    step: int
    """Number of the training step, from 0; step k starts from policy version k and publishes version k + 1. Of other
    kinds, the step that was next."""
    metrics: Mapping[str, float]
    """The step's metrics by name; units and meanings are in docs/metrics.md."""
    num_rows: int
    """Trajectories that ended since the commit before, of any fate."""
    num_tokens: int
    """Stored tokens of those, prompts included."""
    num_ended: Mapping[str, int]
    """All trajectories that had ended by then, by "fate:reason"."""
    num_live: int
    """Trajectories in flight."""
    weight_fingerprint: str
    """Fingerprint of the policy version that the step published; empty of other kinds."""
    loaded_fingerprints: Mapping[str, tuple[int, str]]
    """By rollout instance: the policy version that it served, and the fingerprint of the weights it held."""
    batch_fingerprint: str
    """Hash of the tokens, logprobs, versions and advantages as the trainer received them; empty of other kinds."""

    @classmethod
    def of(cls, record: StepRecord) -> Step:
        """The commit of a stored record."""
        return cls(
            kind=record.kind,
            step=record.step,
            metrics=record.metrics,
            num_rows=record.num_rows,
            num_tokens=record.num_tokens,
            num_ended=record.ledger.num_ended,
            num_live=record.ledger.num_live,
            weight_fingerprint=record.weight_fingerprint,
            loaded_fingerprints=record.loaded_fingerprints,
            batch_fingerprint=record.batch_fingerprint,
        )


def metrics_table(steps: Iterable[Step]) -> Any:
    """A pandas.DataFrame with a row for each step, by its number, and a column for each metric; NaN where a step lacks
    one. Raises ConfigError if pandas is not installed."""
    pandas = require("pandas")
    rows = list(steps)
    index = pandas.Index([row.step for row in rows], name="step", dtype="int64")
    return pandas.DataFrame([dict(row.metrics) for row in rows], index=index, dtype="float64")

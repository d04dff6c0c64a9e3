"""Builds the records that a run commits to its store, for each step, each refusal of weights and its end, and raises
alarms if their metrics show that training fails.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectory import outcome_key
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)


class RecordBuilder:
    """The records of one run. alarms: list to which alarms about training steps are appended."""

    def __init__(self, coordinator: Coordinator, actors: Actors, alarms: list[str]) -> None:
        self._coordinator = coordinator
        self._actors = actors
        self._alarms = alarms
        self._training_alarms = TrainingAlarms()
        self.weight_inputs: dict[str, str] = {}
        """Fingerprints of the inputs of the weights in this start of the run."""
        self._stored_inputs: dict[str, str] = {}
        """The latest inputs that a step's record contains."""

    def make_step_record(self, published_step: PublishedStep) -> CommitRecord:
        """Build the record of a finished step, with the current ledger. Adds metrics to those of the step."""
        metrics = published_step.metrics
        if self._actors.verification.probe:  # else no logprobs were compared
            metrics["probe_drift"] = max((i.drift for i in self._actors.instances.values()), default=0.0)
            metrics["probe_limit"] = self._actors.verification.drift_limit
        if (mixture := self._coordinator.mixture) is not None:
            metrics.update(mixture.take_metrics())
        for alarm in self._training_alarms.observe(published_step.version - 1, metrics):
            self._alarms.append(alarm)
            logger.error(alarm)
        inputs = {**self.weight_inputs, "numerics": published_step.numerics}
        record = CommitRecord(
            kind="step",
            step=published_step.version - 1,
            ledger=self._ledger_state(),
            metrics=metrics,
            weight_fingerprint=published_step.fingerprint,
            weight_checks=self._actors.verification.take_checks(),
            inputs=inputs if inputs != self._stored_inputs else {},
        )
        self._stored_inputs = inputs
        return record

    def make_record(self, kind: Literal["refusal", "end"]) -> CommitRecord:
        """Build the record of an instance that has refused weights, or of the run's end."""
        return CommitRecord(
            kind=kind,
            step=self._coordinator.ledger.next_step,
            ledger=self._ledger_state(),
            weight_checks=self._actors.verification.take_checks(),
        )

    def _ledger_state(self) -> LedgerState:
        ledger, mixture = self._coordinator.ledger, self._coordinator.mixture
        return LedgerState(
            num_started=ledger.num_started,
            num_ended={outcome_key(fate, reason): count for (fate, reason), count in ledger.num_ended.items()},
            live=(),
            next_step=ledger.next_step,
            version=ledger.version,
            sources=() if mixture is None else mixture.states,
            tasks_in_flight=() if mixture is None else mixture.tasks_in_flight,
        )


MIN_ESS = 0.3
"""Effective sample size, as a share of the tokens, below which an alarm is raised. If log ratios were normal, their
standard deviation would be 1.1, and one in twenty tokens would have more than three times the mean weight."""
AVERAGED_STEPS = 3
"""Number of steps over which the effective sample size is averaged, since one token with a wrong logprob can change
that of a single step."""
MIN_STANDARD_ERRORS = 2.0
"""Number of standard errors by which the average must be below the limit."""


def lowest_average(values: Sequence[float]) -> float | None:
    """Return the lowest mean of AVERAGED_STEPS consecutive values, or of all if there are fewer; None if there are
    none.

    >>> lowest_average([0.9, 0.0, 0.9, 0.9])
    0.6
    """
    means = [
        fmean(values[start : start + AVERAGED_STEPS])
        for start in range(max(1, len(values) - AVERAGED_STEPS + 1))
        if values
    ]
    return min(means, default=None)


class TrainingAlarms:
    """Checks the steps of one start of a run. Each kind of alarm is raised once."""

    def __init__(self) -> None:
        self._recent_ess: deque[tuple[float, float]] = deque(maxlen=AVERAGED_STEPS)
        """(effective sample size, its standard error) of the latest steps."""
        self._raised_kinds: set[str] = set()

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the alarms of a finished training step, each a line with value, limit and remedy."""
        self._recent_ess.append((metrics.get("ess", 1.0), metrics.get("ess_stderr", 0.0)))
        values, stderrs = zip(*self._recent_ess, strict=True)
        ess, stderr = sum(values) / AVERAGED_STEPS, math.hypot(*stderrs) / AVERAGED_STEPS
        alarms = []
        if len(values) == AVERAGED_STEPS and ess + MIN_STANDARD_ERRORS * stderr < MIN_ESS and self._is_first("ess"):
            alarms.append(
                f"step {step}: the effective sample size of the importance ratios is {ess:.2g} of the tokens, averaged "
                f"over {AVERAGED_STEPS} steps (standard error {stderr:.1g}), below {MIN_ESS:g}: few tokens outweigh "
                "the batch; lower staleness.eta or training.learning_rate, or choose a loss that bounds or masks them "
                "(docs/losses.md)"
            )
        if (num_dropped := metrics.get("updates_dropped", 0.0)) and self._is_first("dropped"):
            alarms.append(
                f"step {step}: updates dropped because their gradient was not finite: {num_dropped:.0f}; lower "
                "training.learning_rate, and look for rewards and logprobs that are not finite"
            )
        return alarms

    def _is_first(self, kind: str) -> bool:
        """Mark a kind of alarm as raised. Returns whether it was not raised before."""
        is_new = kind not in self._raised_kinds
        self._raised_kinds.add(kind)
        return is_new

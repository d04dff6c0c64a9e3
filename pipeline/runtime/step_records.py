"""Builds the records that a run commits to its store: one for each step, for each refusal of weights, and for its
end."""

from __future__ import annotations

import logging

from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.training_alarms import TrainingAlarms
from staleflow.stores.trajectories.records import LedgerState, StepRecord
from staleflow.stores.trajectory import outcome_key
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)


class StepRecords:
    """The records of one run. alarms: list to which alarms about training steps are appended."""

    def __init__(self, coordinator: Coordinator, actors: Actors, alarms: list[str]) -> None:
        self._coordinator = coordinator
        self._actors = actors
        self._alarms = alarms
        self._training_alarms = TrainingAlarms()
        self.weight_inputs: dict[str, str] = {}
        """Fingerprints of what the weights are computed from, since this start of the run."""
        self._stored_inputs: dict[str, str] = {}
        """The latest inputs that a step's record contains."""

    def make_step_record(self, published: PublishedStep) -> StepRecord:
        """Build the record of a finished step, with the ledger as it is now. Adds metrics to the step's."""
        metrics = published.metrics
        metrics["probe_drift"] = max((i.drift for i in self._actors.instances.values()), default=0.0)
        metrics["probe_limit"] = self._actors.verification.drift_limit
        if (mixture := self._coordinator.mixture) is not None:
            metrics.update(mixture.take_metrics())
        for alarm in self._training_alarms.observe(published.version - 1, metrics):
            self._alarms.append(alarm)
            logger.error(alarm)
        inputs = {**self.weight_inputs, "numerics": published.numerics}
        record = StepRecord(
            kind="step",
            step=published.version - 1,
            ledger=self._ledger_state(),
            metrics=metrics,
            weight_fingerprint=published.fingerprint,
            weight_checks=self._actors.verification.take_checks(),
            inputs=inputs if inputs != self._stored_inputs else {},
        )
        self._stored_inputs = inputs
        return record

    def make_refusal_record(self) -> StepRecord:
        """Build the record of an instance that has refused weights."""
        return self._make_record("refusal")

    def make_end_record(self) -> StepRecord:
        """Build the record of the run's end."""
        return self._make_record("end")

    def _make_record(self, kind: str) -> StepRecord:
        return StepRecord(
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

"""The batches of the training steps in flight: their rows as they are stored, with fingerprints and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.records import CommitRecord, batch_fingerprint, id_ranges
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.store_thread import StoreThread
from staleflow.tasks.training.batches import batch_metrics, rows_with_advantages
from staleflow.tasks.training.microbatches import BatchMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch of one step. rows: in the trainer's order. fingerprint: hash of the rows, computed in the background so
    that the trainer does not wait for it."""

    rows: list[EndedTrajectory]
    fingerprint: asyncio.Future[str]
    metrics: dict[str, float]


class StepBatches:
    """The batches of steps that are being trained or committed. Each is built on first use.

    in_flight: has the trajectories that each step consumed. store_thread: reads the rows of stored steps, and computes
    fingerprints.
    """

    def __init__(self, in_flight: InFlightState, store_thread: StoreThread, settings: ServerSettings) -> None:
        self._in_flight, self._store_thread, self._settings = in_flight, store_thread, settings
        self._batches: dict[int, StepBatch] = {}
        self._repeated_batch: list[EndedTrajectory] = []
        """The rows of a stored step that is trained again, number `_repeated_step`."""
        self._repeated_step = -1

    def batch(self, step: int) -> StepBatch:
        """Return the batch of a step in flight."""
        if step not in self._batches:
            settings, group_size = self._settings, self._settings.group_size
            rows = rows_with_advantages(
                step, self._in_flight.batches[step], group_size, settings.advantage, settings.overlong
            )
            trajectories_and_advantages = [(e.trajectory, e.advantage) for e in rows]
            fingerprint = asyncio.get_running_loop().run_in_executor(
                self._store_thread.executor, batch_fingerprint, trajectories_and_advantages
            )
            metrics = batch_metrics(rows, group_size)
            self._batches[step] = StepBatch(rows=rows, fingerprint=fingerprint, metrics=metrics)
        return self._batches[step]

    async def message(self, step: int, start: int) -> BatchMessage:
        """Return rows of a step from row `start` on, as many as fit into a message. The rows of a step that is not in
        flight are read from the store."""
        if step in self._in_flight.batches:
            return await asyncio.to_thread(BatchMessage.of, self.batch(step).rows, start)
        if step != self._repeated_step or not start:
            self._repeated_batch, self._repeated_step = await self._store_thread.consumed_rows(step), step
        message = await asyncio.to_thread(BatchMessage.of, self._repeated_batch, start)
        if not message.num_remaining:
            self._repeated_batch, self._repeated_step = [], -1
        return message

    async def contents(self, record: CommitRecord) -> tuple[list[EndedTrajectory], dict[str, float], CommitRecord]:
        """Return the rows of a commit, the metrics of its batch, and its record with live trajectories, metrics and
        batch fingerprint filled in."""
        batch = self.batch(record.step) if record.kind == "step" else None
        rows = [*(batch.rows if batch else []), *self._in_flight.discarded]
        live_ranges = id_ranges(self._in_flight.unstored(record.ledger.num_started, (e.trajectory.id for e in rows)))
        metrics = batch.metrics if batch else {}
        complete_record = replace(
            record,
            ledger=replace(record.ledger, live=live_ranges),
            metrics=metrics | record.metrics,
            batch_fingerprint=await batch.fingerprint if batch else "",
        )
        return rows, metrics, complete_record

    def forget(self, step: int) -> None:
        """Drop the batch of a stored step."""
        self._batches.pop(step, None)

    def forget_all(self) -> None:
        """Drop all batches, because their steps are undone."""
        self._batches.clear()

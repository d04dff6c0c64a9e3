"""The batches of the training steps in flight: their rows as they are stored, with fingerprints and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.store_thread import StoreThread
from staleflow.tasks.training.batches import batch_metrics, consumed_rows
from staleflow.tasks.training.microbatches import BatchMessage, RowArrays, message_end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch of one step. rows: in the trainer's order. fingerprint: hash of the rows, computed in the background so
    that the trainer does not wait for it."""

    rows: list[EndedTrajectory]
    fingerprint: asyncio.Future[str]
    metrics: dict[str, float]


class StepBatches:
    """The batches of steps that are being trained or committed. Each is built on first use.

    flight: the trajectories that each step consumed. stored: the rows of stored steps; its thread computes
    fingerprints.
    """

    def __init__(self, flight: InFlightState, stored: StoreThread, settings: ServerSettings) -> None:
        self._flight, self._stored, self._settings = flight, stored, settings
        self._batches: dict[int, StepBatch] = {}
        self._repeated_batch: list[EndedTrajectory] = []
        """The rows of a stored step that is trained again, number `_again_step`."""
        self._repeated_step = -1

    def batch(self, step: int) -> StepBatch:
        """Return the batch of a step in flight."""
        if step not in self._batches:
            settings, group_size = self._settings, self._settings.group_size
            rows = consumed_rows(step, self._flight.batches[step], group_size, settings.advantage, settings.overlong)
            values = [(e.trajectory, e.advantage) for e in rows]
            fingerprint = asyncio.get_running_loop().run_in_executor(self._stored.executor, batch_fingerprint, values)
            metrics = batch_metrics(rows, group_size)
            self._batches[step] = StepBatch(rows=rows, fingerprint=fingerprint, metrics=metrics)
        return self._batches[step]

    async def part(self, step: int, start: int) -> BatchMessage:
        """Return rows of a step from row `start` on, as many as fit into a message. The rows of a step that is not in
        flight are read from the store."""
        if step in self._flight.batches:
            return await _part_of(self.batch(step).rows, start)
        if step != self._repeated_step or not start:
            self._repeated_batch, self._repeated_step = await self._stored.consumed(step), step
        message = await _part_of(self._repeated_batch, start)
        if not message.rest:
            self._repeated_batch, self._repeated_step = [], -1
        return message

    def forget(self, step: int) -> None:
        """Drop the batch of a stored step."""
        self._batches.pop(step, None)

    def forget_all(self) -> None:
        """Drop all batches, because their steps are undone."""
        self._batches.clear()


async def _part_of(rows: list[EndedTrajectory], start: int) -> BatchMessage:
    """Pack rows from row `start` on, as many as fit into a message, beside the event loop."""
    stop = message_end(rows, start)
    packed = await asyncio.to_thread(RowArrays.of, rows[start:stop])
    return BatchMessage(packed=packed, rest=len(rows) - stop)

"""The batches of the training steps in flight: their rows as they are stored, with fingerprints and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectory import Ended
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.store_thread import StoreThread
from staleflow.tasks.training.batches import batch_metrics, consumed_rows
from staleflow.tasks.training.microbatches import BatchMessage, RowArrays, part_end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch of one step. rows: in the trainer's order. fingerprint: of the rows, computed in the background: the
    trainer is waiting for them."""

    rows: list[Ended]
    fingerprint: asyncio.Future[str]
    metrics: dict[str, float]


class StepBatches:
    """The batches of steps that are trained or wait for their commit, each made when it is first asked for.

    flight: has what each step has taken. stored: has the rows of steps that are stored; its thread computes
    fingerprints."""

    def __init__(self, flight: InFlightState, stored: StoreThread, settings: ServerSettings) -> None:
        self._flight, self._stored, self._settings = flight, stored, settings
        self._made: dict[int, StepBatch] = {}
        self._again: list[Ended] = []
        """The rows of a stored step that is trained again, number `_again_step`."""
        self._again_step = -1

    def batch(self, step: int) -> StepBatch:
        """The batch of a step that has taken trajectories."""
        if step not in self._made:
            settings, group_size = self._settings, self._settings.group_size
            rows = consumed_rows(step, self._flight.batches[step], group_size, settings.advantage, settings.overlong)
            values = [(e.trajectory, e.advantage) for e in rows]
            fingerprint = asyncio.get_running_loop().run_in_executor(self._stored.executor, batch_fingerprint, values)
            metrics = batch_metrics(rows, group_size)
            self._made[step] = StepBatch(rows=rows, fingerprint=fingerprint, metrics=metrics)
        return self._made[step]

    async def part(self, step: int, first: int) -> BatchMessage:
        """Rows from row `first` on, as many as fit into a message; of a step that is stored if it has taken none."""
        if step in self._flight.batches:
            return await _part_of(self.batch(step).rows, first)
        if step != self._again_step or not first:
            self._again, self._again_step = await self._stored.consumed(step), step
        part = await _part_of(self._again, first)
        if not part.rest:
            self._again, self._again_step = [], -1
        return part

    def forget(self, step: int) -> None:
        """Drop the batch of a step that is stored."""
        self._made.pop(step, None)

    def forget_all(self) -> None:
        """Drop what was made, since the steps have not happened."""
        self._made.clear()


async def _part_of(rows: list[Ended], first: int) -> BatchMessage:
    """As many rows from row `first` on as fit into a message; packed beside the event loop."""
    last = part_end(rows, first)
    packed = await asyncio.to_thread(RowArrays.of, rows[first:last])
    return BatchMessage(packed=packed, rest=len(rows) - last)

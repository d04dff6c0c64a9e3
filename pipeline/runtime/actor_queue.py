"""A queue of trajectories that actors without state work off: reward workers, and teachers.

Invariants:
- Every queued trajectory is processed, unless it has ended or all actors are being replaced. The trajectories of a lost
  actor are processed again, by any of them.
- An actor whose process does not answer is detected within twice deadlines.call_s, however long its work takes, because
  it is pinged meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import DeadlineKey
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import TrajectoryId

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ActorQueue(ABC):
    """The trajectories of one run that wait for one of several actors. names: of the actors."""

    max_batch: ClassVar[int] = 32
    """Maximum number of trajectories in one call to an actor."""

    def __init__(self, config: RunConfig, actors: Actors, names: Sequence[str]) -> None:
        self._config = config
        self._actors = actors
        self._names = tuple(names)
        self._queue: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._num_idle_actors = 0
        """Number of actors that wait for work."""
        self._replacing: set[str] = set()
        self._locks = {name: asyncio.Lock() for name in names}
        """Held while an actor processes a batch, or is moved."""

    @property
    def is_busy(self) -> bool:
        """Whether an actor processes a batch, or is moved. Both have deadlines."""
        return any(lock.locked() for lock in self._locks.values())

    def coroutines(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run concurrently until cancelled, one per actor."""
        return [self._process_on(name) for name in self._names]

    @abstractmethod
    async def _process(self, name: str, batch: tuple[TrajectoryId, ...]) -> None:
        """Let an actor process a batch, and report the results. Raises ActorLost, ActorFailed."""

    async def _ask(self, name: str, method: str, *args: Any, deadline: DeadlineKey = "call_s", within_s: float) -> Any:
        """Return the result of a long call to an actor. Raises ActorLost if its process does not answer pings
        meanwhile. deadline: the key of `deadlines` that within_s depends on."""
        request = self._actors.ask(name, method, *args, deadline=deadline, within_s=within_s)
        call = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({call}, timeout=self._config.deadlines.call_s))[0]:
                await self._actors.ask(name, "ping")
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _next_batch(self) -> tuple[TrajectoryId, ...]:
        """Return the trajectories that an actor processes next: its share of the queue."""
        self._num_idle_actors += 1
        try:
            batch = [await self._queue.get()]
        finally:
            self._num_idle_actors -= 1
        share = math.ceil((1 + self._queue.qsize()) / (1 + self._num_idle_actors))
        while len(batch) < min(share, self.max_batch):
            batch.append(self._queue.get_nowait())
        return tuple(batch)

    async def _replace(self, name: str) -> None:
        """Replace a lost actor as soon as there is a Dask worker for it. Raises NoFreeWorker if there was none for
        start_s, and no other actor is left."""
        self._replacing.add(name)
        try:
            while True:
                try:
                    return await self._actors.replace_stateless(name)
                except NoFreeWorker as error:
                    if not self._actors.has_other(name, self._names):
                        raise
                    logger.warning("the run continues without %s: %s", name, error)
        finally:
            self._replacing.discard(name)

    async def _process_on(self, name: str) -> None:
        """Send batches to one actor. If it is lost, replace it and queue its batch again."""
        while True:
            batch = await self._next_batch()
            try:
                async with self._locks[name]:
                    await self._process(name, batch)
            except (errors.ActorLost, errors.ActorFailed) as loss_error:
                if loss_error.actor != name:
                    raise
                for trajectory in batch:
                    self._queue.put_nowait(trajectory)
                self._actors.record_loss(name, loss_error)
                await self._replace(name)

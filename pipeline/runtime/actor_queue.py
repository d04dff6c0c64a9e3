"""A queue of trajectories that actors without state work off: reward workers, and teachers.

Invariants:
- Every queued trajectory is sent to an actor; it waits while all of them are busy, moved or replaced. The trajectories
  of a lost actor are sent again, to any of them.
- An actor that has work, but whose process does not answer, is detected within twice deadlines.call_s, however long the
  work takes, because it is pinged meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, ClassVar

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import DeadlineKey
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import TrajectoryId

logger = logging.getLogger(__name__)


class ActorQueue(ABC):
    """The trajectories of one run that wait for one of several actors, whose names are given."""

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
        """Names of lost actors that are being replaced."""
        self._locks = {name: asyncio.Lock() for name in names}
        """Locked while an actor processes a batch, or is moved."""

    @property
    def is_busy(self) -> bool:
        """Whether an actor processes a batch, or is moved. Both have deadlines."""
        return any(lock.locked() for lock in self._locks.values())

    def coroutines(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run concurrently until cancelled, one per actor."""
        return [self._process_until_cancelled(name) for name in self._names]

    @abstractmethod
    async def _process(self, name: str, batch: tuple[TrajectoryId, ...]) -> None:
        """Let an actor process a batch, and report the results. Raises ActorLost, ActorFailed."""

    async def _ask_with_pings(
        self, name: str, method: str, *args: Any, deadline: DeadlineKey = "call_s", within_s: float
    ) -> Any:
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
        level = logging.WARNING
        self._replacing.add(name)
        try:
            while True:
                try:
                    return await self._actors.replace_stateless(name)
                except NoFreeWorker as error:
                    if not self._actors.is_other_placed(name, self._names):
                        raise
                    logger.log(level, "the run continues without %s: %s", name, error)
                    level = logging.DEBUG  # it is tried again every start_s
        finally:
            self._replacing.discard(name)

    def _put(self, batch: Iterable[TrajectoryId]) -> None:
        """Queue trajectories."""
        for trajectory in batch:
            self._queue.put_nowait(trajectory)

    async def _process_until_cancelled(self, name: str) -> None:
        """Send batches to one actor. If it is lost, replace it and queue its batch again."""
        lock = self._locks[name]
        while True:
            batch = await self._next_batch()
            if lock.locked():  # it is moved, which takes long; others may be idle
                self._put(batch)
                async with lock:
                    continue
            try:
                async with lock:
                    await self._process(name, batch)
            except (errors.ActorLost, errors.ActorFailed) as loss_error:
                if loss_error.actor != name:
                    raise
                self._put(batch)
                self._actors.record_loss(name, loss_error)
                await self._replace(name)

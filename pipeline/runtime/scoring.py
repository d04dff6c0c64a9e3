"""Scoring of sampled responses by the run's reward workers.

Invariants:
- Every response that was put here is scored and told, or its reward worker is being replaced; what a lost worker held
  is scored again.
- A reward worker's process that does not answer any more is noticed within twice deadlines.call_s, however long it may
  score: it is asked for a sign of life meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pipeline.config.schema import RunConfig
from pipeline.coordination.events import TrajectoryScored
from pipeline.runtime.actors import SERVER, Actors
from stores import errors
from stores.trajectory import TrajectoryId
from tasks.scoring import ScoredResponse

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCORE_BATCH = 32
"""Responses handed to a reward worker in one call: enough to hide the call, few enough to spread."""


class Scoring:
    """The responses of one run that wait for a reward worker. tell: called with every score. elapsed_s: seconds of the
    run so far."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        tell: Callable[[TrajectoryScored], None],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._actors = actors
        self._tell = tell
        self._elapsed_s = elapsed_s
        self._queue: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._failure_said = False

    def put(self, trajectory: TrajectoryId) -> None:
        """Queue a sampled response."""
        self._queue.put_nowait(trajectory)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """An endless coroutine for each reward worker, to be run side by side."""
        return [self._score_on(name) for name in self._config.judges if not self._config.acts]

    async def score_texts(self, items: list[tuple[str, Any]], within_s: float) -> list[ScoredResponse]:
        """Score (response, record) pairs that belong to no trajectory, while nothing else is scored. A reward worker
        that is lost is replaced, and scores them again."""
        while True:
            try:
                asking = self._actors.ask("reward-0", "score_texts", items, within_s=within_s)
                scored: list[ScoredResponse] = await self._watched("reward-0", asking)
                return scored
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if lost.who != "reward-0":
                    raise
                self._actors.lose("reward-0", lost, self._elapsed_s())
                await self._actors.place_reward("reward-0")

    async def _watched(self, name: str, asking: Coroutine[Any, Any, T]) -> T:
        """The result of a call to a reward worker that may take long. Raises ActorLost if its process does not answer
        a short one meanwhile."""
        call = asyncio.ensure_future(asking)
        try:
            while not (await asyncio.wait({call}, timeout=self._config.deadlines.call_s))[0]:
                await self._actors.ask(name, "answers")
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _score_on(self, name: str) -> None:
        """Feed one reward worker; replace it when it is lost, and score again what it held."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < SCORE_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            allowed_s = self._config.deadlines.call_s + len(batch) * self._config.reward.timeout_s
            try:
                asking = self._actors.ask(name, "score", SERVER, tuple(batch), deadline="call_s", within_s=allowed_s)
                scored = await self._watched(name, asking)
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if lost.who != name:
                    raise
                self._actors.lose(name, lost, self._elapsed_s())
                await self._actors.place_reward(name)
                for trajectory in batch:
                    self._queue.put_nowait(trajectory)
                continue
            for trajectory, reward, error in scored:
                if error:  # the first in full: they are many and alike, and each is stored with its trajectory
                    level = logging.DEBUG if self._failure_said else logging.WARNING
                    logger.log(
                        level, "trajectory %d: reward failed: %s; further ones: steps count them", trajectory, error
                    )
                    self._failure_said = True
                self._tell(TrajectoryScored(trajectory=trajectory, reward=reward, error=error))

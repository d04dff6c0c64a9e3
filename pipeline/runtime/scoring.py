"""Scores sampled responses with the run's reward workers.

Invariants:
- Every response that was put here is scored and told, or its reward worker is being replaced; what a lost worker held
  is scored again.
- A response waits for its group's others, for HELD_S at most: the group is of no use before all have rewards, and one
  call for several costs a fraction of as many.
- A reward worker's process that does not answer any more is noticed within twice deadlines.call_s, however long it may
  score: it is asked for a sign of life meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import TrajectoryScored
from staleflow.pipeline.runtime.actors import SERVER, Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import GroupId, TrajectoryId, is_evaluation

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCORE_BATCH = 32
"""Responses handed to a reward worker in one call: enough to hide the call, few enough to spread."""
HELD_S = 0.02
"""Seconds that a response is held back for others to be scored with it."""
MAX_GROUPS_COUNTED = 10_000
"""Groups whose sampled members are counted; the oldest are forgotten, such as those that were aborted."""


class Scoring:
    """The responses of one run that wait for a reward worker. emit: called with every score. elapsed_s: returns the
    seconds of the run so far."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        emit: Callable[[TrajectoryScored], None],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._actors = actors
        self._emit = emit
        self._elapsed_s = elapsed_s
        self._queue: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._num_free = 0
        """Reward workers that wait for work."""
        self._held_back: list[TrajectoryId] = []
        self._releasing: asyncio.TimerHandle | None = None
        self._num_sampled: dict[GroupId, int] = {}
        self._failure_logged = False
        self._moving: set[str] = set()
        self._busy = {name: asyncio.Lock() for name in config.reward_actors}
        """Held while a reward worker scores a batch, or is moved."""

    async def move(self, name: str) -> None:
        """Move a reward worker to a process that other actors of the run use, between two batches. Does nothing if it
        is moving already."""
        if name in self._moving:
            return
        self._moving.add(name)
        try:
            async with self._busy[name]:
                await self._actors.move_reward_actor(name)
        except errors.ActorLost as lost:  # its next batch finds it gone, and replaces it
            logger.warning("%s", lost)
        finally:
            self._moving.discard(name)

    def put(self, trajectory: TrajectoryId) -> None:
        """Queue a sampled response, together with those held back if it completes its group."""
        self._held_back.append(trajectory)
        if self._completes(trajectory) or len(self._held_back) >= SCORE_BATCH:
            self._release()
        elif self._releasing is None:
            self._releasing = asyncio.get_running_loop().call_later(HELD_S, self._release)

    def _completes(self, trajectory: TrajectoryId) -> bool:
        """Count a response; whether its group has as many as are trained on by now."""
        if is_evaluation(trajectory):  # nobody waits for its group
            return False
        group = GroupId(trajectory // self._config.oversampled_group_size)
        count = self._num_sampled.pop(group, 0) + 1
        if count >= self._config.batch.group_size:
            return True
        self._num_sampled[group] = count
        if len(self._num_sampled) > MAX_GROUPS_COUNTED:
            del self._num_sampled[next(iter(self._num_sampled))]
        return False

    def _release(self) -> None:
        """Let the reward workers have what was held back."""
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None
        batch, self._held_back = self._held_back, []
        for trajectory in batch:
            self._queue.put_nowait(trajectory)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run concurrently until cancelled, one per reward worker."""
        return [self._score_on(name) for name in self._config.reward_actors if not self._config.has_environment]

    async def _watched(self, name: str, asking: Coroutine[Any, Any, T]) -> T:
        """The result of a call to a reward worker that may take long. Raises ActorLost if its process does not answer
        a short one meanwhile."""
        call = asyncio.ensure_future(asking)
        try:
            while not (await asyncio.wait({call}, timeout=self._config.deadlines.call_s))[0]:
                await self._actors.ask(name, "ping")
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _batch(self) -> list[TrajectoryId]:
        """What a reward worker scores next: its share of what is queued, as others wait for work too."""
        self._num_free += 1
        try:
            batch = [await self._queue.get()]
        finally:
            self._num_free -= 1
        share = math.ceil((1 + self._queue.qsize()) / (1 + self._num_free))
        while len(batch) < min(share, SCORE_BATCH):
            batch.append(self._queue.get_nowait())
        return batch

    async def _score_on(self, name: str) -> None:
        """Feed one reward worker; replace it when it is lost, and score again what it held."""
        while True:
            batch = await self._batch()
            allowed_s = self._config.deadlines.call_s + len(batch) * self._config.reward.timeout_s
            try:
                async with self._busy[name]:
                    asking = self._actors.ask(
                        name, "score", SERVER, tuple(batch), deadline="call_s", within_s=allowed_s
                    )
                    scored = await self._watched(name, asking)
            except (errors.ActorLost, errors.ActorFailed) as lost:
                if lost.actor != name:
                    raise
                self._actors.record_loss(name, lost, self._elapsed_s())
                await self._actors.place_reward(name)
                for trajectory in batch:
                    self._queue.put_nowait(trajectory)
                continue
            for trajectory, reward, error in scored:
                if error:  # the first in full: they are many and alike, and each is stored with its trajectory
                    level = logging.DEBUG if self._failure_logged else logging.WARNING
                    logger.log(
                        level, "trajectory %d: reward failed: %s; further ones: steps count them", trajectory, error
                    )
                    self._failure_logged = True
                self._emit(TrajectoryScored(trajectory=trajectory, reward=reward, error=error))

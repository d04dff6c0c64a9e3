"""Scores sampled responses with the run's reward workers.

Invariants:
- Every queued response gets a score, or all reward workers are being replaced. The responses of a lost worker are
  scored again, by any of them.
- A response waits for the rest of its group, at most MAX_HOLD_S: a group is not used before all members have rewards,
  and one call for several responses is cheaper than several calls.
- A reward worker whose process does not answer is detected within twice deadlines.call_s, however long a score takes,
  because it is pinged while it scores.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import TrajectoryScored
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import SERVER
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import GroupId, TrajectoryId, is_evaluation

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCORE_BATCH = 32
"""Maximum number of responses in one call to a reward worker."""
MAX_HOLD_S = 0.02
"""Maximum seconds that a response waits for others to be scored with it."""
MAX_GROUPS_COUNTED = 10_000
"""Groups whose sampled members are counted; the oldest, such as aborted ones, are dropped."""


class ScoreQueue:
    """The responses of one run that wait for a reward worker. emit: called with every score."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        emit: Callable[[TrajectoryScored], None],
    ) -> None:
        self._config = config
        self._actors = actors
        self._emit = emit
        self._queue: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._num_idle_workers = 0
        """Number of reward workers that wait for work."""
        self._num_tokens: dict[TrajectoryId, int] = {}
        """Number of tokens of each response that is not scored."""
        self._waiting_for_group: list[TrajectoryId] = []
        self._release_timer: asyncio.TimerHandle | None = None
        self._num_sampled_by_group: dict[GroupId, int] = {}
        self._has_logged_failure = False
        self._moving: set[str] = set()
        self._replacing: set[str] = set()
        self._worker_locks = {name: asyncio.Lock() for name in config.reward_actors}
        """Held while a reward worker scores a batch, or is moved."""

    @property
    def is_scoring(self) -> bool:
        """Whether a reward worker scores a batch, or is moved. Both have deadlines."""
        return any(lock.locked() for lock in self._worker_locks.values())

    async def move(self, name: str) -> None:
        """Move a reward worker to a process that other actors of the run use, between two batches. Does nothing if it
        is moving already, or is lost and being replaced."""
        if name in self._moving:
            return
        self._moving.add(name)
        try:
            async with self._worker_locks[name]:
                if name not in self._replacing:
                    await self._actors.move_reward_actor(name)
        except (errors.ActorLost, errors.ActorFailed, NoFreeWorker) as error:  # its next batch replaces it if need be
            logger.warning("%s", error)
        finally:
            self._moving.discard(name)

    def put(self, trajectory: TrajectoryId, num_tokens: int) -> None:
        """Queue a sampled response of so many tokens, together with those held back if it completes its group."""
        self._num_tokens[trajectory] = num_tokens
        self._waiting_for_group.append(trajectory)
        if self._completes_group(trajectory) or len(self._waiting_for_group) >= SCORE_BATCH:
            self._queue_waiting()
        elif self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._queue_waiting)

    def _completes_group(self, trajectory: TrajectoryId) -> bool:
        """Count a response. Returns True if its group now has as many responses as are trained on."""
        if is_evaluation(trajectory):  # it has no group that is trained on
            return False
        group = GroupId(trajectory // self._config.oversampled_group_size)
        count = self._num_sampled_by_group.pop(group, 0) + 1
        if count >= self._config.batch.group_size:
            return True
        self._num_sampled_by_group[group] = count
        if len(self._num_sampled_by_group) > MAX_GROUPS_COUNTED:
            del self._num_sampled_by_group[next(iter(self._num_sampled_by_group))]
        return False

    def _queue_waiting(self) -> None:
        """Queue the responses that were held back."""
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        batch, self._waiting_for_group = self._waiting_for_group, []
        for trajectory in batch:
            self._queue.put_nowait(trajectory)

    def coroutines(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run concurrently until cancelled, one per reward worker."""
        return [self._score_on(name) for name in self._config.reward_actors if not self._config.has_environment]

    async def _ping_while_waiting(self, name: str, request: Coroutine[Any, Any, T]) -> T:
        """Return the result of a long call to a reward worker. Raises ActorLost if its process does not answer pings
        meanwhile."""
        call = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({call}, timeout=self._config.deadlines.call_s))[0]:
                await self._actors.ask(name, "ping")
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _next_batch(self) -> list[TrajectoryId]:
        """Return the responses that a reward worker scores next: its share of the queue."""
        self._num_idle_workers += 1
        try:
            batch = [await self._queue.get()]
        finally:
            self._num_idle_workers -= 1
        share = math.ceil((1 + self._queue.qsize()) / (1 + self._num_idle_workers))
        while len(batch) < min(share, SCORE_BATCH):
            batch.append(self._queue.get_nowait())
        return batch

    async def _replace(self, name: str) -> None:
        """Replace a lost reward worker as soon as there is a Dask worker for it. Raises NoFreeWorker if there was none
        for start_s, and no other reward worker is left."""
        self._replacing.add(name)
        try:
            while True:
                try:
                    return await self._actors.replace_reward_actor(name)
                except NoFreeWorker as error:
                    if not self._actors.has_other_reward_actor(name):
                        raise
                    logger.warning("the run continues without %s: %s", name, error)
        finally:
            self._replacing.discard(name)

    async def _score_on(self, name: str) -> None:
        """Send batches to one reward worker. If it is lost, replace it and score its batch again."""
        while True:
            batch = await self._next_batch()
            allowed_s = self._config.deadlines.call_s + len(batch) * self._config.reward.timeout_s
            try:
                async with self._worker_locks[name]:
                    num_tokens = tuple(self._num_tokens.get(trajectory, 0) for trajectory in batch)
                    request = self._actors.ask(
                        name, "score", SERVER, tuple(batch), num_tokens, deadline="call_s", within_s=allowed_s
                    )
                    scores = await self._ping_while_waiting(name, request)
            except (errors.ActorLost, errors.ActorFailed) as loss_error:
                if loss_error.actor != name:
                    raise
                for trajectory in batch:
                    self._queue.put_nowait(trajectory)
                self._actors.record_loss(name, loss_error)
                await self._replace(name)
                continue
            for trajectory in batch:
                self._num_tokens.pop(trajectory, None)
            for trajectory, reward, error in scores:
                if error:  # only the first is a warning; each is stored with its trajectory
                    level = logging.DEBUG if self._has_logged_failure else logging.WARNING
                    logger.log(
                        level, "trajectory %d: reward failed: %s; further ones: steps count them", trajectory, error
                    )
                    self._has_logged_failure = True
                self._emit(TrajectoryScored(trajectory=trajectory, reward=reward, error=error))

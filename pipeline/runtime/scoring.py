"""Scores sampled responses with the run's reward workers.

A response waits for the rest of its group, at most MAX_HOLD_S: a group is not used before all members have rewards,
and one call for several responses is cheaper than several calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import TrajectoryScored
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.actor_client import SERVER
from staleflow.pipeline.runtime.actor_queue import ActorQueue
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores import errors
from staleflow.stores.trajectory import GroupId, TrajectoryId, is_evaluation

logger = logging.getLogger(__name__)

MAX_HOLD_S = 0.02
"""Maximum seconds that a response waits for others to be scored with it."""
MAX_GROUPS_COUNTED = 10_000
"""Groups whose sampled members are counted; the oldest, such as aborted ones, are dropped."""


class ScoreQueue(ActorQueue):
    """The responses of one run that wait for a reward worker. emit: called with every score."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        emit: Callable[[TrajectoryScored], None],
    ) -> None:
        super().__init__(config, actors, () if config.has_environment else config.reward_actors)
        self._emit = emit
        self._num_tokens: dict[TrajectoryId, int] = {}
        """Number of tokens of each response that is not scored."""
        self._waiting_for_group: list[TrajectoryId] = []
        self._release_timer: asyncio.TimerHandle | None = None
        self._num_sampled_by_group: dict[GroupId, int] = {}
        self._has_logged_failure = False
        self._moving: set[str] = set()

    async def move(self, name: str) -> None:
        """Move a reward worker to a process that other actors of the run use, between two batches. Does nothing if it
        is moving already, or is lost and being replaced."""
        if name in self._moving:
            return
        self._moving.add(name)
        try:
            async with self._locks[name]:
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
        if self._count_sampled(trajectory) or len(self._waiting_for_group) >= self.max_batch:
            self._queue_waiting()
        elif self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._queue_waiting)

    def _count_sampled(self, trajectory: TrajectoryId) -> bool:
        """Count a sampled response. Returns True if its group now has as many responses as are trained on."""
        if is_evaluation(trajectory):  # it has no group that is trained on
            return False
        group = GroupId(trajectory // self._config.members_started_per_group)
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
        self._put(batch)

    async def _process(self, name: str, batch: tuple[TrajectoryId, ...]) -> None:
        """Let a reward worker score a batch."""
        num_tokens = tuple(self._num_tokens.get(trajectory, 0) for trajectory in batch)
        within_s = self._config.deadlines.call_s + len(batch) * self._config.reward.timeout_s
        scores = await self._ask_with_pings(name, "score", SERVER, batch, num_tokens, within_s=within_s)
        for trajectory in batch:
            self._num_tokens.pop(trajectory, None)
        for trajectory, reward, error in scores:
            if error:  # only the first is a warning; each is stored with its trajectory
                level = logging.DEBUG if self._has_logged_failure else logging.WARNING
                logger.log(level, "trajectory %d: reward failed: %s; further ones: steps count them", trajectory, error)
                self._has_logged_failure = True
            self._emit(TrajectoryScored(trajectory=trajectory, reward=reward, error=error))

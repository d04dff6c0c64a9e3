"""Sends scored responses to the run's teachers, which compute their logprobs under the reference model.

A response is queued when it has its reward, so that its tokens do not change any more. A training step waits for those
of its trajectories. Sampling, and the training of earlier steps, go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.runtime.actor_client import SERVER
from staleflow.pipeline.runtime.actor_queue import ActorQueue
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.trajectory import TrajectoryId, is_evaluation


class TeacherQueue(ActorQueue):
    """The responses of one run that wait for a teacher. Without teachers, nothing waits."""

    max_batch = 4  # whose logprobs arrive together: a lost teacher repeats few, and a step waits for few others

    def __init__(self, config: RunConfig, actors: Actors) -> None:
        super().__init__(config, actors, config.teachers)
        self._pending: dict[TrajectoryId, asyncio.Future[None]] = {}
        """Queued responses, each with a future of its logprobs."""

    def put(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Queue responses that have their reward. Idempotent; those of evaluations are left out."""
        for trajectory in trajectories if self._names else ():
            if trajectory not in self._pending and not is_evaluation(trajectory):
                self._pending[trajectory] = asyncio.get_running_loop().create_future()
                self._put([trajectory])

    async def wait_for(self, trajectories: Iterable[TrajectoryId]) -> float:
        """Wait until the server has the logprobs of these responses, as far as they were queued. Returns the seconds
        that this took."""
        started_s = now_s()
        if futures := {self._pending[t] for t in trajectories if t in self._pending}:
            await asyncio.wait(futures)  # if this is cancelled, they are not
        return now_s() - started_s

    async def _process(self, name: str, batch: tuple[TrajectoryId, ...]) -> None:
        deadlines = self._config.deadlines
        within_s = deadlines.call_s + len(batch) * deadlines.sample_s
        await self._ask_with_pings(name, "score", SERVER, batch, deadline="sample_s", within_s=within_s)
        for trajectory in batch:
            self._pending.pop(trajectory).set_result(None)

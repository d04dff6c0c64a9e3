"""The reward actor: fetches finished responses, scores them in its scoring process, sends scores to the server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.actors.actor_calls import call, remote_methods
from staleflow.tasks.actors.server_messages import RewardItem, ScoringItem
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer, ScoringSettings


@remote_methods
class RewardWorker:
    """One of several reward actors, each with a scoring process. Idempotent: the first score is the one that holds."""

    def __init__(self, settings: ScoringSettings, call_s: float) -> None:
        self._scorer = Scorer(settings)
        self._call_s = call_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def check(self) -> None:
        """Raise ConfigError if the reward function cannot be loaded."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.check)

    async def answers(self) -> bool:
        """Show that this process is there, also while it scores."""
        return True

    async def score(self, server: Any, trajectories: tuple[TrajectoryId, ...]) -> list[tuple[TrajectoryId, float, str]]:
        """Score the trajectories that are still live; the server gets the scores and their parts. Returns (trajectory,
        reward, error) for each, as the server holds them."""
        items: list[ScoringItem] = await call(
            server, "scoring_items", trajectories, within_s=self._call_s, who="server"
        )
        scores = await self.score_texts([(item.text, item.record) for item in items])
        scored = [
            RewardItem(item.trajectory, item.tokens, item.epoch, score)
            for item, score in zip(items, scores, strict=True)
        ]
        held = await call(server, "rewarded", scored, within_s=self._call_s, who="server")
        return [(item.trajectory, score.reward, score.error) for item, score in zip(items, held, strict=True) if score]

    async def score_texts(self, items: list[tuple[str, Any]]) -> list[ScoredResponse]:
        """Score (response, record) pairs that belong to no trajectory, such as an evaluation's."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.score, items)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

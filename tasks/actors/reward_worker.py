"""The reward actor: fetches finished responses, scores them in its scoring process, sends scores to the server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.server_messages import RewardItem, ScoringItem
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer, ScoringSettings


@remote_methods
class RewardWorker:
    """The reward worker's Dask actor, with a scoring process of its own. Scoring is idempotent: the server keeps the
    first score."""

    def __init__(self, settings: ScoringSettings, call_s: float) -> None:
        self._scorer = Scorer(settings)
        self._call_s = call_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def check(self) -> None:
        """Raise ConfigError if the reward function cannot be loaded."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.check)

    async def ping(self) -> None:
        """Return at once, also while responses are being scored."""

    async def score(
        self, server: Any, trajectories: tuple[TrajectoryId, ...], num_tokens: tuple[int, ...]
    ) -> list[tuple[TrajectoryId, float, str]]:
        """Score trajectories that are still live, and send the scores to the server. Returns (trajectory, reward,
        error) of each, as the server recorded them. num_tokens: of each response, as the driver knows them."""
        items: list[ScoringItem] = await call_actor(
            server, "scoring_items", trajectories, num_tokens, timeout_s=self._call_s, actor_name="server"
        )
        scores = await self.score_texts([(item.text, item.record) for item in items])
        reward_items = [
            RewardItem(item.trajectory, item.num_tokens, item.route_number, score)
            for item, score in zip(items, scores, strict=True)
        ]
        recorded_scores = await call_actor(
            server, "record_rewards", reward_items, timeout_s=self._call_s, actor_name="server"
        )
        return [
            (item.trajectory, score.reward, score.error)
            for item, score in zip(items, recorded_scores, strict=True)
            if score
        ]

    async def score_texts(self, items: list[tuple[str, Any]]) -> list[ScoredResponse]:
        """Score (response, record) pairs."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._scorer.score, items)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

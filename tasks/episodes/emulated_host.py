"""The environments of an emulated run: they take their time, and say nothing but how many tokens they give."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.emulated_episodes import EmulatedEpisodes
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.step_results import Answer, EpisodeKey
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedHostSettings:
    """Settings of an emulated run's environment hosts. time_scale: seconds of an environment that pass in one."""

    episodes: EmulatedEpisodes
    limits: EnvironmentConfig
    time_scale: float

    def build(self) -> EmulatedEnvironments:
        return EmulatedEnvironments(self)


class EmulatedEnvironments:
    """Answers as the workload says, after as long as it says. Evaluated tasks have negative numbers, and the episodes
    of the positive ones, as in emulated engines."""

    def __init__(self, settings: EmulatedHostSettings) -> None:
        self._settings = settings
        self._episodes = settings.episodes
        self._places = asyncio.Semaphore(settings.limits.concurrency)

    needs_token_ids = False

    async def check(self) -> None:
        """There is nothing to try."""

    async def act(
        self,
        key: EpisodeKey,
        record: Record,
        turns: Sequence[str],
        *,
        cut: bool,
        newest: SampledTurn | None = None,
    ) -> Answer:
        found = self._episodes.answer(abs(key.task), key.member, len(turns) - 1, attempt=key.attempt, cut=cut)
        limit_s, scale = self._settings.limits.step_timeout_s, self._settings.time_scale
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        async with self._places:
            waited_s = (clock() - asked_s) * scale
            await asyncio.sleep(min(found.seconds, limit_s) / scale)
        if found.seconds > limit_s:
            late = "is never answered" if math.isinf(found.seconds) else f"takes {found.seconds:g} s"
            error = f"step {len(turns)} {late}, environment.step_timeout_s = {limit_s:g} s"
            return Answer(ended=True, error=error, seconds=limit_s, waited_s=waited_s)
        if found.error:
            return Answer(ended=True, error=found.error, seconds=found.seconds, waited_s=waited_s)
        messages = () if found.ended else (Message("tool", str(found.tokens)),)
        return Answer(
            messages=messages, ended=found.ended, reward=found.reward, seconds=found.seconds, waited_s=waited_s
        )

    async def end(self, key: EpisodeKey, record: Record) -> Answer:
        found = self._episodes.answer(abs(key.task), key.member, 0, attempt=key.attempt, cut=True)
        return Answer(ended=True, reward=found.reward)

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is open."""

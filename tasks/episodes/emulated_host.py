"""Emulated environments: a step takes the time of the workload and returns only a number of tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.emulated_episodes import EmulatedEpisodes
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedHostSettings:
    """Settings of an emulated run's environment hosts. time_scale: emulated seconds per second of real time."""

    episodes: EmulatedEpisodes
    environment_config: EnvironmentConfig
    time_scale: float

    def build(self) -> EmulatedEnvironments:
        return EmulatedEnvironments(self)


class EmulatedEnvironments:
    """Environment steps with the results and durations of the emulated workload. Groups of evaluations have negative
    ids. Groups i and -i have the same episodes, as in emulated engines."""

    def __init__(self, settings: EmulatedHostSettings) -> None:
        self._settings = settings
        self._episodes = settings.episodes
        self._slots = asyncio.Semaphore(settings.environment_config.concurrency)

    needs_token_ids = False

    async def check(self) -> None:
        """Do nothing: there is nothing to check."""

    async def step(
        self,
        key: EpisodeKey,
        record: Record,
        turns: Sequence[str],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None = None,
    ) -> HostedStepResult:
        config, scale = self._settings.environment_config, self._settings.time_scale
        group, turn = abs(key.group), len(turns) - 1
        step = self._episodes.step_result(
            group, key.member, turn, attempt=key.attempt, truncated=truncated or len(turns) >= config.max_turns
        )
        spent_s = sum(self._episodes.step_s(group, key.member, i, attempt=key.attempt) for i in range(turn))
        remaining_s = config.episode_timeout_s - spent_s
        knob = "step_timeout_s" if config.step_timeout_s <= remaining_s else "episode_timeout_s"
        limit_s = min(config.step_timeout_s, remaining_s)
        now = asyncio.get_running_loop().time
        queued_s = now()
        async with self._slots:
            waited_s = (now() - queued_s) * scale
            await asyncio.sleep(min(step.seconds, limit_s) / scale)
        if step.seconds > limit_s:
            duration = "never ends" if math.isinf(step.seconds) else f"takes {step.seconds:g} s"
            error = f"step {len(turns)} {duration}, environment.{knob} = {getattr(config, knob):g} s"
            return HostedStepResult(ended=True, error=error, environment_s=limit_s, waited_s=waited_s)
        if step.error:
            return HostedStepResult(ended=True, error=step.error, environment_s=step.seconds, waited_s=waited_s)
        messages = () if step.ended else (Message("tool", str(step.tokens)),)
        return HostedStepResult(
            messages=messages, ended=step.ended, reward=step.reward, environment_s=step.seconds, waited_s=waited_s
        )

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        step = self._episodes.step_result(abs(key.group), key.member, 0, attempt=key.attempt, truncated=True)
        return HostedStepResult(ended=True, reward=step.reward)

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        """Do nothing: no episode is open."""

    async def close(self) -> None:
        """Do nothing: no episode is open."""

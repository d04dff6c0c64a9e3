"""Episodes of user classes with Gymnasium's `reset` and `step`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import raised_as
from staleflow.tasks.environments.episode import (
    EnvStepResult,
    EpisodeFailed,
    EpisodeStart,
    error_with_location,
    final_result,
    observation_messages,
    parse_observation,
)
from staleflow.tasks.rendering.task_source import Prompt
from staleflow.tasks.settings.knobs import shorten


class GymEnvironment:
    """An environment whose episodes are objects with `reset(seed) -> (observation, info)` and `step(action) ->
    (observation, reward, terminated, truncated, info)`, plain methods or coroutines."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def episode(self, start: EpisodeStart) -> GymEpisode:
        return GymEpisode(self._make, start)


class GymEpisode:
    """An episode of a class with `reset` and `step`. Rewards of steps are summed."""

    def __init__(self, make: Callable[[], Any], start: EpisodeStart) -> None:
        self._make, self._start = make, start
        self._env: Any = None
        self._reward = 0.0
        self._num_steps = 0

    async def begin(self) -> Prompt:
        self._env = await self._call("cannot be created", self._make)
        options = {"index": self._start.index, "held_out": self._start.held_out}
        with_options = {"options": options} if _takes(self._env.reset, "options") else {}
        result = await self._call("reset raised", self._env.reset, seed=self._start.seed, **with_options)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise EpisodeFailed(f"reset must return (observation, info), not {shorten(result)}")
        return parse_observation(result[0], "the first observation")

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        if truncated:
            return await self.end_early()
        self._num_steps += 1
        label = f"step {self._num_steps}"
        result = await self._call(f"{label} raised", self._env.step, text)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], Mapping):
            raise EpisodeFailed(
                f"{label} must return (observation, reward, terminated, truncated, info), not {shorten(result)}"
            )
        observation, reward, terminated, env_truncated, info = result
        self._reward += final_result(reward, label=f"the reward of {label}").reward
        if terminated or env_truncated or last:
            return final_result(self._reward, info.get("parts"), label=f"the reward of {label}")
        return EnvStepResult(messages=observation_messages(observation, f"the observation of {label}"))

    async def end_early(self) -> EnvStepResult:
        return final_result(self._reward)

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        if callable(close):
            await self._call("close raised", close)

    def kill(self) -> None:
        """Do nothing: plain methods run to their end before this is called, and a coroutine is cancelled with its
        caller."""

    async def _call(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a user's method. Raises EpisodeFailed."""
        with raised_as(EpisodeFailed, label, Exception, SystemExit, describe=error_with_location):
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            result = outside_event_loop(lambda: function(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result


def outside_event_loop(function: Callable[[], Any]) -> Any:
    """Call a function as if no event loop were running, so that a plain method may use asyncio.run."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function()
    finally:
        asyncio._set_running_loop(loop)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of that name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

"""Episodes that are coroutines, `async def play(session, task) -> reward`, which ask the model for each turn.

Agents are coroutines too (tasks/episodes/agents.py); both share `CoroutineEpisodeBase`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from staleflow.stores.errors import raised_as
from staleflow.tasks.environments.episode import (
    ENVIRONMENT_ROLE,
    EnvStepResult,
    EpisodeFailed,
    EpisodeStart,
    error_with_location,
    final_result,
    parse_observation,
)
from staleflow.tasks.rendering.task_source import Message, Prompt

T = TypeVar("T")


class EpisodeTruncated(Exception):
    """Raised by `ask` when the episode ends before the coroutine: the last turn was truncated by the token limit, or no
    further turn is allowed. Its text is the truncated turn, empty if there is none. The coroutine may catch it and
    return a reward; otherwise the reward is `session.reward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The task of a coroutine's episode. rng: random numbers, seeded by the task's seed."""

    index: int
    held_out: bool
    seed: int
    options: Mapping[str, Any]
    rng: random.Random

    @classmethod
    def of(cls, start: EpisodeStart, options: Mapping[str, Any]) -> AgentTask:
        return cls(
            index=start.index, held_out=start.held_out, seed=start.seed, options=options, rng=random.Random(start.seed)
        )


class Session:
    """A coroutine's connection to the model."""

    def __init__(self) -> None:
        self.reward: Any = 0.0
        """Reward of an episode that is truncated."""
        self._next_prompt: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
        self._turn_future: asyncio.Future[str] | None = None

    async def ask(self, *messages: Any) -> str:
        """Ask the model for a turn after these messages: texts, or mappings with role and content. The messages of the
        first call are the prompt, which may depend only on the task."""
        if self._turn_future is not None:
            raise RuntimeError("ask was called before the previous call returned; await one call after the other")
        is_text = len(messages) == 1 and isinstance(messages[0], str)
        chat = [{"role": ENVIRONMENT_ROLE, "content": m} if isinstance(m, str) else m for m in messages]
        prompt = parse_observation(messages[0] if is_text else chat, "the argument of ask")
        self._turn_future = asyncio.get_running_loop().create_future()
        self._next_prompt.set_result(prompt)
        return await self._turn_future

    def _set_turn(self, text: str, *, truncated: bool) -> None:
        """Let the waiting `ask` return, or raise EpisodeTruncated."""
        future = self._turn_future
        assert future is not None
        self._next_prompt = asyncio.get_running_loop().create_future()
        self._turn_future = None
        if truncated:
            future.set_exception(EpisodeTruncated(text))
        else:
            future.set_result(text)


Play = Callable[[Session, AgentTask], Awaitable[Any]]


class CoroutineEnvironment:
    """An environment that is a coroutine."""

    def __init__(self, play: Play, options: Mapping[str, Any]) -> None:
        self._play, self._options = play, options

    def episode(self, start: EpisodeStart) -> CoroutineEpisode:
        return CoroutineEpisode(self._play, self._options, start)


class CoroutineEpisodeBase:
    """Base of episodes that run as a coroutine, which requests the model's turns and returns a reward.

    runner: the coroutine, in messages.
    """

    runner: ClassVar[str]

    def __init__(self) -> None:
        self._running_coroutine: asyncio.Future[Any] | None = None

    def _run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start the coroutine function."""
        self._running_coroutine = asyncio.ensure_future(without_exit(self.runner, function, *args))

    async def _next_request(self, request: asyncio.Future[T]) -> T | EnvStepResult:
        """Wait for the coroutine's next request, or for its end. Raises EpisodeFailed."""
        assert self._running_coroutine is not None
        await asyncio.wait({request, self._running_coroutine}, return_when=asyncio.FIRST_COMPLETED)
        return self._end() if self._running_coroutine.done() else request.result()

    def _end(self) -> EnvStepResult:
        """Return the reward of a coroutine that has ended. Raises EpisodeFailed."""
        assert self._running_coroutine is not None
        if self._running_coroutine.cancelled():
            raise EpisodeFailed(f"{self.runner} was cancelled")
        error = self._running_coroutine.exception()
        if error is None:
            return final_result(self._running_coroutine.result(), label=f"what {self.runner} returned")
        if (result := self._result_after_error(error)) is not None:
            return result
        if isinstance(error, EpisodeFailed):
            raise error
        raise EpisodeFailed(f"{self.runner} raised: {error_with_location(error)}") from error

    def _result_after_error(self, error: BaseException) -> EnvStepResult | None:
        """Return the result of an episode whose coroutine raised an error. None if the error makes the episode fail."""
        raise NotImplementedError

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self._running_coroutine is not None:
            self._running_coroutine.cancel()


class CoroutineEpisode(CoroutineEpisodeBase):
    """An episode of a user's coroutine."""

    runner = "play"

    def __init__(self, play: Play, options: Mapping[str, Any], start: EpisodeStart) -> None:
        super().__init__()
        self._play = play
        self._task = AgentTask.of(start, options)
        self._session: Session | None = None

    async def begin(self) -> Prompt:
        self._session = Session()
        self._run(self._play, self._session, self._task)
        first = await self._next_request(self._session._next_prompt)
        if isinstance(first, EnvStepResult):
            raise EpisodeFailed("play returned before its first call of session.ask; call it at least once")
        return first

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        assert self._session is not None
        self._session._set_turn(text, truncated=truncated)
        request = await self._next_request(self._session._next_prompt)
        if isinstance(request, EnvStepResult):
            return request
        if truncated or last:
            return await self.end_early()
        return EnvStepResult(messages=(Message(ENVIRONMENT_ROLE, request),) if isinstance(request, str) else request)

    async def end_early(self) -> EnvStepResult:
        assert self._session is not None
        self._session._set_turn("", truncated=True)
        result = await self._next_request(self._session._next_prompt)
        if not isinstance(result, EnvStepResult):
            raise EpisodeFailed("play called ask after EpisodeTruncated; return a reward then, or do not catch it")
        return result

    def _result_after_error(self, error: BaseException) -> EnvStepResult | None:
        if not isinstance(error, EpisodeTruncated):
            return None
        assert self._session is not None
        return final_result(self._session.reward, label="session.reward")


async def without_exit(runner: str, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Await a coroutine function and return its result. Raises EpisodeFailed instead of SystemExit, which would end the
    event loop and all other episodes."""
    with raised_as(EpisodeFailed, f"{runner} raised", SystemExit, describe=error_with_location):
        return await function(*args)

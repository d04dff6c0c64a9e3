"""Interface of one episode of an environment, of any kind and in any process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from staleflow.stores.errors import type_and_message
from staleflow.stores.printable import printable
from staleflow.tasks.rendering.reward_values import InvalidReward, parse_reward
from staleflow.tasks.rendering.task_source import Message, Prompt, prompt_of
from staleflow.tasks.settings import user_code

ENVIRONMENT_ROLE = "environment"
"""Message role of an observation that an environment returns as plain text, and of tokens between two turns that belong
to no message."""
MAX_ERROR_CHARS = 500
"""Maximum characters of an error; longer ones are truncated."""

MAX_MESSAGE_CHARS = 1_000_000
"""Maximum characters of one message of an observation: some 250,000 tokens of English text."""


class EpisodeFailed(RuntimeError):
    """An environment raised an error, hung, died or returned an invalid value. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """Arguments of an episode's reset. Equal arguments start equal episodes. Seeds of held-out tasks differ from those
    of training tasks."""

    index: int
    held_out: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStepResult:
    """Result of one environment step. reward, parts: reward of the whole episode and its parts, once it has ended.
    answer: text that a verifier scores, instead of `reward` and `parts`."""

    messages: tuple[Message, ...] = ()
    ended: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None


class Episode(Protocol):
    """One episode of an environment. Its methods raise EpisodeFailed; the caller enforces the timeouts."""

    async def begin(self) -> Prompt:
        """Create and reset the environment. Returns its first observation; empty if it has none."""
        ...

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        """Execute a turn of the model in the environment. truncated: a token limit ended the turn, so the episode ends
        here. last: no further turn can be taken."""
        ...

    async def end_early(self) -> EnvStepResult:
        """End the episode before its next turn, because no tokens are left for it. Returns the result so far."""
        ...

    async def close(self) -> None:
        """Release the environment's resources after its end."""
        ...

    def kill(self) -> None:
        """Stop at once, even during a step, without waiting."""
        ...


class Environment(Protocol):
    """A loaded environment, which creates episodes."""

    def episode(self, start: EpisodeStart) -> Episode:
        """Create an episode that has not begun."""
        ...


class CallEnvironment:
    """An environment whose episodes are single calls of a coroutine function, with the only turn as the argument.

    The function may raise EpisodeFailed. A call that takes too long is ended by killing its process.
    """

    def __init__(self, call: Callable[[EpisodeStart, str], Awaitable[EnvStepResult]]) -> None:
        self.call = call

    def episode(self, start: EpisodeStart) -> CallEpisode:
        return CallEpisode(self, start)


class CallEpisode:
    """Episode of a `CallEnvironment`: one call."""

    def __init__(self, environment: CallEnvironment, start: EpisodeStart) -> None:
        self._environment, self._start = environment, start

    async def begin(self) -> Prompt:
        return ""

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        return await self._environment.call(self._start, text)

    async def end_early(self) -> EnvStepResult:
        raise EpisodeFailed("it has a single turn")

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def kill(self) -> None:
        """Do nothing: whoever runs the call in a process of its own kills that."""


def parse_observation(value: object, label: str) -> Prompt:
    """Convert an observation to a text or messages of built-in strings, because the receiving process may lack numpy's
    or the user's classes. Raises EpisodeFailed. label: name of the value in errors."""
    try:
        observation = prompt_of(value)
        if isinstance(observation, str):
            return _to_plain_text(observation)
        return tuple(Message(_to_plain_text(message.role), _to_plain_text(message.content)) for message in observation)
    except ValueError as error:
        raise EpisodeFailed(f"{label} {error}") from error


def _to_plain_text(text: str) -> str:
    """Return a text as a built-in string of bounded length. Raises ValueError; its message follows the value's name."""
    if len(text) > MAX_MESSAGE_CHARS:
        raise ValueError(f"has {len(text)} characters; at most {MAX_MESSAGE_CHARS} are allowed")
    try:
        return text.encode("utf-8").decode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"is not valid Unicode: {error.reason} at character {error.start}") from error


def observation_messages(value: object, label: str) -> tuple[Message, ...]:
    """Convert an observation to messages for the model. Raises EpisodeFailed."""
    observation = parse_observation(value, label)
    return (Message(ENVIRONMENT_ROLE, observation),) if isinstance(observation, str) else observation


def final_result(reward: object, parts: object = None, *, label: str = "the reward") -> EnvStepResult:
    """Build the result of an episode's last step from its reward and the reward's parts by name. Raises EpisodeFailed
    if the reward is not a number."""
    try:
        reward_value, reward_parts = parse_reward(reward if parts is None else (reward, parts))
    except InvalidReward as error:
        raise EpisodeFailed(str(error).replace("the reward", label, 1)) from error
    return EnvStepResult(ended=True, reward=reward_value, parts=reward_parts)


def error_line(error: BaseException) -> str:
    """Format an environment's error as one line of text."""
    return printable(type_and_message(error), MAX_ERROR_CHARS)


def error_with_location(error: BaseException) -> str:
    """Format an environment's error as one line of text, with the file and line of user code that raised it."""
    location = user_code.user_code_line(error)
    return f"{error_line(error)} ({location})" if location else error_line(error)


def record_of(start: EpisodeStart, prompt: Prompt) -> dict[str, Any]:
    """Build the record of a task: its prompt, and the start of its episodes."""
    as_json = prompt if isinstance(prompt, str) else [message._asdict() for message in prompt]
    return {"prompt": as_json, "index": start.index, "held_out": start.held_out, "seed": start.seed}


def start_of(record: Mapping[str, Any]) -> EpisodeStart:
    """Return the start of episodes from their task's record."""
    return EpisodeStart(index=int(record["index"]), held_out=bool(record["held_out"]), seed=int(record["seed"]))

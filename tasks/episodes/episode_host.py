"""The episodes of one environment host.

A key has one episode, which is never stepped twice for the same turn: a repeated request gets the same result. Each
call of an environment has a timeout. After it the call is not awaited any longer and the environment's process is
killed. So an environment that hangs, crashes or takes too much memory ends only its own episode, with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.stores.printable import printable
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.environments.child_programs import ChildPrograms
from staleflow.tasks.environments.episode import (
    ENVIRONMENT_ROLE,
    EnvStepResult,
    Episode,
    EpisodeFailed,
    error_line,
    error_with_location,
)
from staleflow.tasks.environments.forked_episodes import ForkServerLost
from staleflow.tasks.environments.user_tools import TOOL_ROLE
from staleflow.tasks.episodes.agents import AgentEpisode
from staleflow.tasks.episodes.episode_makers import EpisodeMaker, environment_maker, tool_maker
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.episodes.tools import check_tools
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Prompt, Record, prompt_of
from staleflow.tasks.settings.seeds import task_seed
from staleflow.tasks.sources.reward_process import ScoringSettings
from staleflow.tasks.sources.task_sources import RecordWithOrigin, SourceSettings

MAX_REASON_CHARS = 1000
"""Maximum length of the reason why an episode failed."""
MAX_ENDED_EPISODES = 10_000
"""Number of ended episodes whose last result is kept for repeated requests."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHostSettings:
    """Settings from which an environment host builds its EpisodeHost.

    Args:
        source: The environment, or the task source whose answers are scored.
        scoring: How the answers of single-turn tasks are scored; None for environments, which return their own rewards.
        environment_sources: With several task sources, the settings of those that are environments, by the source's
            name. Tasks of other sources have a single turn.
    """

    source: SourceSettings
    scoring: ScoringSettings | None = None
    environment_sources: Mapping[str, SourceSettings] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Message roles that observations of this run will have; empty if agents choose them."""
        if self.needs_token_ids:
            return ()
        return (ENVIRONMENT_ROLE,) if self.scoring is None else (TOOL_ROLE,)

    def environment_key(self, record: Record) -> str | None:
        """Key of the environment of a task; None if its answer is scored."""
        if isinstance(record, RecordWithOrigin) and record.origin in self.environment_sources:
            return record.origin
        return "" if self.scoring is None else None

    @property
    def needs_token_ids(self) -> bool:
        """Whether episodes need the token ids and logprobs of turns as well as their texts."""
        return any(source.is_agent_source for source in (self.source, *self.environment_sources.values()))

    def build(self) -> EpisodeHost:
        return EpisodeHost(self)


@dataclass(slots=True)
class HostedEpisode:
    """An open episode of this host. turns: the texts of the turns requested so far."""

    turns: tuple[str, ...]
    step_task: asyncio.Task[HostedStepResult] = field(init=False)
    """Task that returns the result of the last requested turn."""
    episode: Episode | None = None
    num_turns: int = 0
    """Number of turns that the environment has executed."""
    spent_s: float = 0.0
    """Seconds spent in calls of the environment."""
    replayed_observations: list[tuple[Message, ...]] = field(default_factory=list)
    """Observations of turns that were executed again, which are returned with the next result."""
    programs: ChildPrograms = field(default_factory=ChildPrograms)
    """Programs that the environment has started, if it runs on this event loop."""


class EpisodeHost:
    """Runs the episodes of one environment host. Use from one event loop."""

    def __init__(self, settings: EpisodeHostSettings) -> None:
        self._settings = settings
        self._config = settings.source.environment_config
        self._entries: dict[EpisodeKey, HostedEpisode] = {}
        self._ended_results: dict[EpisodeKey, tuple[tuple[str, ...], HostedStepResult]] = {}
        self._slots = asyncio.Semaphore(self._config.concurrency)
        self._makers: dict[tuple[str | None, bool], EpisodeMaker] = {}
        """Makers of episodes, by (key of the environment, whether it is that of held-out tasks)."""
        self._makers_lock = threading.Lock()
        self._release_tasks: set[asyncio.Task[None]] = set()
        self._score_thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._endpoint = EndpointServer(settings.source.endpoint)

    async def check(self) -> None:
        """Raise ConfigError if an environment cannot be created, two of its resets with one seed differ, or a tool does
        not work."""
        settings = self._settings
        if settings.scoring is not None:
            await check_tools((await asyncio.to_thread(self._get_maker, None, False)).tools, self._config)
        else:
            await self._check_environment("", settings.source)
        for name, source in settings.environment_sources.items():
            with raised_as(ConfigError, f"task {name!r}", ConfigError):
                await self._check_environment(name, source)

    async def _check_environment(self, name: str, source: SourceSettings) -> None:
        for held_out in (False, True) if source.task.eval_source else (False,):
            key, name_in_job = ("eval_source", source.task.eval_source) if held_out else ("source", source.task.source)
            label = f"task.{key} = {name_in_job!r}"
            maker = await asyncio.to_thread(self._get_maker, name, held_out)
            seed = task_seed(source.seed, 0, held_out=held_out)
            start = {"index": 0, "held_out": held_out, "seed": seed}
            prompts: list[Prompt] = []
            for _ in range(2):
                episode, programs = maker.make(start), ChildPrograms()
                try:
                    with programs.as_owner():
                        prompts.append(await self._with_timeout(episode.begin(), "reset"))
                        await self._with_timeout(episode.close(), "close")
                except EpisodeFailed as error:
                    raise ConfigError(f"{label}: {error}") from error
                finally:
                    episode.kill()
                    programs.close()
            if prompts[0] != prompts[1]:
                raise ConfigError(f"{label}: {_NOT_REPRODUCIBLE}")

    @property
    def needs_token_ids(self) -> bool:
        return self._settings.needs_token_ids

    async def step(
        self,
        key: EpisodeKey,
        record: Record,
        turns: Sequence[str],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None = None,
    ) -> HostedStepResult:
        """Execute the model's last turn in its episode. Errors of the environment are returned, never raised.

        Args:
            key: Key of the episode.
            record: Record of its task.
            turns: The texts of all turns so far. If this host does not have the episode, or has it with other turns, a
                repeatable environment executes the earlier ones again.
            truncated: Whether a token limit ended the last turn, so that the episode ends with the reward so far.
            latest_turn: The last turn, for episodes that need token ids.
        """
        new_turns = tuple(turns)
        if not new_turns:
            return _error_result("the request has no turn; send at least one")
        if (ended_result := self._ended_results.get(key)) is not None:
            if ended_result[0] == new_turns:
                return ended_result[1]
            if ended_result[0] == new_turns[: len(ended_result[0])]:
                return _error_result(
                    f"the episode has ended with turn {len(ended_result[0])}; it cannot take another one"
                )
            del self._ended_results[key]
        entry = self._entries.get(key)
        if entry is not None and entry.turns != new_turns[: len(entry.turns)]:
            self.cancel([key])
            entry = None
        if entry is None:
            if len(new_turns) > 1 and not (await self._maker_of(key, record)).repeatable:
                error = "this host does not have the episode, and its environment is not repeatable; start it again"
                return replace(_error_result(error), lost=True)
            entry = self._entries.get(key)  # another request may have created it in the meantime
        if entry is None:
            entry = self._entries[key] = HostedEpisode(new_turns)
            entry.step_task = asyncio.ensure_future(
                self._run_turns(key, record, entry, None, new_turns, truncated=truncated, latest_turn=latest_turn)
            )
        elif entry.turns != new_turns:
            entry.turns = new_turns
            previous = entry.step_task
            entry.step_task = asyncio.ensure_future(
                self._run_turns(key, record, entry, previous, new_turns, truncated=truncated, latest_turn=latest_turn)
            )
        step_task = entry.step_task
        try:
            return await asyncio.shield(step_task)
        except asyncio.CancelledError:
            if step_task.cancelled():
                return _error_result("the episode was cancelled")
            raise

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        """End an episode that has no tokens left for another turn, with the reward so far."""
        entry = self._entries.get(key)
        if entry is None:
            ended_result = self._ended_results.get(key)
            return _error_result("the episode was cancelled") if ended_result is None else ended_result[1]
        entry.step_task = asyncio.ensure_future(self._end_truncated(key, record, entry, entry.step_task))
        return await asyncio.shield(entry.step_task)

    async def _end_truncated(
        self, key: EpisodeKey, record: Record, entry: HostedEpisode, previous: asyncio.Task[HostedStepResult]
    ) -> HostedStepResult:
        await asyncio.wait({previous})
        assert entry.episode is not None
        spent_s, waited_s, queued_s = entry.spent_s, 0.0, time.monotonic()
        try:
            async with self._slots:
                waited_s = time.monotonic() - queued_s
                step_result = await self._with_episode_timeout(entry, entry.episode.end_early(), "the early end")
                result = await self._hosted_result(key, record, step_result)
        except EpisodeFailed as error:
            result = _failed_result(error)
        result = replace(result, environment_s=entry.spent_s - spent_s, waited_s=waited_s)
        self._end(key, entry, entry.turns, result)
        return result

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        """Drop episodes without waiting. Running steps are cancelled and blocking environments killed."""
        for key in keys:
            self._ended_results.pop(key, None)
            entry = self._entries.pop(key, None)
            if entry is not None:
                entry.step_task.cancel()
                if entry.episode is not None:
                    entry.episode.kill()
                entry.programs.close()

    async def close(self) -> None:
        """End all episodes. Agents that wait for a turn get a reply on which they retry, before their keys become
        invalid."""
        self._endpoint.drain()
        self.cancel(list(self._entries))
        for task in list(self._release_tasks):
            task.cancel()
        await asyncio.gather(*self._release_tasks, return_exceptions=True)
        self._score_thread.shutdown(wait=False, cancel_futures=True)
        await self._endpoint.stop()
        for maker in self._makers.values():
            await asyncio.to_thread(maker.close)
        self._makers.clear()

    async def _run_turns(
        self,
        key: EpisodeKey,
        record: Record,
        entry: HostedEpisode,
        previous: asyncio.Task[HostedStepResult] | None,
        turns: tuple[str, ...],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None,
    ) -> HostedStepResult:
        """Execute the turns that the environment has not executed yet. previous: an earlier request, which is awaited
        first."""
        if previous is not None:
            await asyncio.wait({previous})
        spent_s, waited_s, queued_s = entry.spent_s, 0.0, time.monotonic()
        start = entry.num_turns
        try:
            async with self._slots:
                waited_s = time.monotonic() - queued_s
                if entry.episode is None:
                    await self._begin(key, record, entry)
                result = HostedStepResult()
                for turn_number, text in enumerate(turns[start:], start + 1):
                    if result.ended:
                        raise EpisodeFailed(f"it ended with turn {turn_number - 1}; it cannot take another one")
                    is_newest = turn_number == len(turns)
                    if is_newest and latest_turn is not None and isinstance(entry.episode, AgentEpisode):
                        entry.episode.set_turn(latest_turn)
                    result = await self._step(key, record, entry, text, turn_number, truncated=truncated and is_newest)
                    if not is_newest:
                        entry.replayed_observations.append(result.messages)
        except EpisodeFailed as error:
            result = _failed_result(error)
        result = replace(
            result,
            environment_s=entry.spent_s - spent_s,
            waited_s=waited_s,
            replayed=tuple(entry.replayed_observations),
        )
        entry.replayed_observations = []
        if result.ended:
            self._end(key, entry, turns, result)
        return result

    async def _begin(self, key: EpisodeKey, record: Record, entry: HostedEpisode) -> None:
        with raised_as(EpisodeFailed, "the environment cannot be created", ConfigError, KeyError, describe=error_line):
            entry.episode = (await self._maker_of(key, record)).make(record)
        prompt = await self._with_episode_timeout(entry, entry.episode.begin(), "reset")
        if prompt != prompt_of(record["prompt"]):
            raise EpisodeFailed(_NOT_REPRODUCIBLE)

    async def _step(
        self, key: EpisodeKey, record: Record, entry: HostedEpisode, text: str, turn_number: int, *, truncated: bool
    ) -> HostedStepResult:
        assert entry.episode is not None
        last = turn_number >= self._config.max_turns
        result: EnvStepResult = await self._with_episode_timeout(
            entry, entry.episode.step(text, truncated=truncated, last=last), f"step {turn_number}"
        )
        entry.num_turns = turn_number
        return await self._hosted_result(key, record, result)

    async def _hosted_result(self, key: EpisodeKey, record: Record, result: EnvStepResult) -> HostedStepResult:
        """Return an environment's result to the caller, with the score of its answer if it has one."""
        if result.answer is not None:
            return await self._score_answer(key, result.answer, record)
        return HostedStepResult(messages=result.messages, ended=result.ended, reward=result.reward, parts=result.parts)

    async def _score_answer(self, key: EpisodeKey, answer: str, record: Record) -> HostedStepResult:
        """Score the last turn of an episode, within reward.timeout_s."""
        score = (await self._maker_of(key, record)).score
        assert score is not None
        try:
            response = await asyncio.get_running_loop().run_in_executor(self._score_thread, score, answer, record)
        except RuntimeError as error:  # it is closed
            raise EpisodeFailed(error_line(error)) from error
        return HostedStepResult(ended=True, reward=response.reward, parts=response.parts, error=response.error)

    async def _with_episode_timeout(self, entry: HostedEpisode, request: Coroutine[Any, Any, T], label: str) -> T:
        """Await a request within the timeouts of a step and of the episode. Raises EpisodeFailed."""
        started_s = time.monotonic()
        try:
            with entry.programs.as_owner():
                return await self._with_timeout(request, label, self._config.episode_timeout_s - entry.spent_s)
        finally:
            entry.spent_s += time.monotonic() - started_s

    async def _with_timeout(self, request: Coroutine[Any, Any, T], label: str, remaining_s: float = math.inf) -> T:
        """Await a request for up to environment.step_timeout_s, and no longer than `remaining_s`, the remaining seconds
        of the episode. After that it is cancelled, but not awaited, because it may ignore the cancellation. Raises
        EpisodeFailed."""
        task = asyncio.ensure_future(request)
        try:
            await asyncio.wait({task}, timeout=max(0.0, min(self._config.step_timeout_s, remaining_s)))
        finally:
            if not task.done():
                task.cancel()
            # Reads the error of a task that is not awaited any longer, so that asyncio does not log it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not task.done():
            knob = "step_timeout_s" if self._config.step_timeout_s <= remaining_s else "episode_timeout_s"
            limit = getattr(self._config, knob)
            raise EpisodeFailed(f"{label} took longer than environment.{knob} = {limit:g} s")
        if task.cancelled():
            raise EpisodeFailed(f"{label} was cancelled by the environment")
        try:
            return task.result()
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"{label} raised: {error_with_location(error)}") from error

    def _end(self, key: EpisodeKey, entry: HostedEpisode, turns: tuple[str, ...], result: HostedStepResult) -> None:
        """Keep an episode's last result, and release its environment in the background."""
        self._entries.pop(key, None)
        self._ended_results[key] = (turns, result)
        while len(self._ended_results) > MAX_ENDED_EPISODES:
            del self._ended_results[next(iter(self._ended_results))]
        if entry.episode is not None:
            release_task = asyncio.ensure_future(self._release(entry, entry.episode, with_close=not result.error))
            self._release_tasks.add(release_task)
            release_task.add_done_callback(self._release_tasks.discard)

    async def _release(self, entry: HostedEpisode, episode: Episode, *, with_close: bool) -> None:
        try:
            if with_close:
                with contextlib.suppress(EpisodeFailed):
                    await self._with_timeout(episode.close(), "close")
        finally:
            episode.kill()
            entry.programs.close()

    async def _maker_of(self, key: EpisodeKey, record: Record) -> EpisodeMaker:
        """Return the maker of a task's episodes. Raises ConfigError."""
        return await asyncio.to_thread(self._get_maker, self._settings.environment_key(record), key.held_out)

    def _get_maker(self, name: str | None, held_out: bool) -> EpisodeMaker:
        """Return the maker of training or held-out episodes. name: key of the environment; None: answers are scored.
        Raises ConfigError."""
        settings = self._settings
        source = settings.environment_sources.get(name or "", settings.source)
        is_eval_source = held_out and name is not None and bool(source.task.eval_source)
        with self._makers_lock:
            if (name, is_eval_source) not in self._makers:
                if name is None:
                    assert settings.scoring is not None
                    self._makers[name, is_eval_source] = tool_maker(settings.scoring, self._config)
                else:
                    self._makers[name, is_eval_source] = environment_maker(source, is_eval_source, self._endpoint)
            return self._makers[name, is_eval_source]


_NOT_REPRODUCIBLE = "two resets with the same seed differ; seed all random numbers by the seed argument of reset"


def _failed_result(error: EpisodeFailed) -> HostedStepResult:
    """The result of a step that failed; lost if its fork server died, which is not the environment's failure."""
    return replace(_error_result(str(error)), lost=isinstance(error, ForkServerLost))


def _error_result(error: str) -> HostedStepResult:
    return HostedStepResult(ended=True, error=" ".join(printable(error, MAX_REASON_CHARS).split()))

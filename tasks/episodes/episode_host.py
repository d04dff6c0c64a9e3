"""The episodes of one environment host.

An episode belongs to its key, and is never stepped twice for the same turn: a repeated request gets the same result.
Every request to an environment has a deadline, and nothing waits for one that was missed: the environment is abandoned,
its process killed. So a hung, crashed or greedy environment ends its own episode, with an error, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.stores.printable import printable
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.environments.child_programs import ChildPrograms
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.environment_loader import open_environment, traits_of
from staleflow.tasks.environments.episode import (
    OBSERVED,
    EnvStepResult,
    Episode,
    EpisodeFailed,
    error_and_line,
    error_line,
    start_of,
)
from staleflow.tasks.environments.fork_server import ForkSettings
from staleflow.tasks.environments.forked_episodes import ForkedEpisode, ForkServer
from staleflow.tasks.environments.user_tools import TOOL_ROLE
from staleflow.tasks.episodes.agents import AgentEpisode
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.episodes.tools import Tool, ToolEpisode, check_tools, tools_of
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Prompt, Record, prompt_of
from staleflow.tasks.settings.seeds import task_seed
from staleflow.tasks.settings.source_kinds import SourceType, is_agent, open_source
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import LabelledRecord, SourceSettings

MAX_REASON_CHARS = 1000
"""Maximum length of the reason why an episode failed."""
MAX_ENDED_EPISODES = 10_000
"""Number of ended episodes whose last result is kept for repeated requests."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings of an environment host.

    Args:
        scoring: How the answers of single-turn tasks are scored; None for environments, which return their own rewards.
        environments: With several task sources, the settings of those that are environments, by the source's name.
            Tasks of other sources have a single turn.
    """

    source: SourceSettings
    scoring: ScoringSettings | None = None
    environments: Mapping[str, SourceSettings] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of observations that are known before a run."""
        if self.needs_token_ids:
            return ()
        return (OBSERVED,) if self.scoring is None else (TOOL_ROLE,)

    def environment_of(self, record: Record) -> str | None:
        """Key of the environment of a task; None if its answer is scored."""
        if isinstance(record, LabelledRecord) and record.label in self.environments:
            return record.label
        return "" if self.scoring is None else None

    @property
    def needs_token_ids(self) -> bool:
        """Whether episodes need the token ids and logprobs of turns as well as their texts."""
        return any(source.is_agent_source for source in (self.source, *self.environments.values()))

    def build(self) -> EpisodeHost:
        return EpisodeHost(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMaker:
    """Creates episodes of an environment.

    Args:
        repeatable: See EnvironmentTraits.
        score: The verifier of single-turn answers.
        close: Releases what the episodes share.
        tools: Tools that episodes of tasks with a verifier may call.
    """

    make: Callable[[Record], Episode]
    repeatable: bool
    score: Callable[[str, Record], ScoredResponse] | None = None
    close: Callable[[], None] = lambda: None
    tools: Mapping[str, Tool] = field(default_factory=dict)


@dataclass(slots=True)
class HostedEpisode:
    """An open episode of this host."""

    turns: tuple[str, ...]
    answer: asyncio.Task[HostedStepResult] = field(init=False)
    """The step result of the last turn."""
    episode: Episode | None = None
    num_turns: int = 0
    """Number of turns that the environment has executed."""
    spent_s: float = 0.0
    observations: list[tuple[Message, ...]] = field(default_factory=list)
    programs: ChildPrograms = field(default_factory=ChildPrograms)
    """That the environment has started, if it is on this event loop."""


class EpisodeHost:
    """The episodes of one environment host. Use from one event loop."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._limits = settings.source.limits
        self._hosted: dict[EpisodeKey, HostedEpisode] = {}
        self._ended: dict[EpisodeKey, tuple[tuple[str, ...], HostedStepResult]] = {}
        self._slots = asyncio.Semaphore(self._limits.concurrency)
        self._makers: dict[tuple[str | None, bool], EpisodeMaker] = {}
        """By (key of the environment, whether it is that of held-out tasks)."""
        self._making = threading.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._endpoint = EndpointServer(settings.source.endpoint)

    async def check(self) -> None:
        """Raise ConfigError if the environment cannot be created, or two resets with one seed differ."""
        settings = self._settings
        if settings.scoring is not None:
            await check_tools((await asyncio.to_thread(self._maker, None, False)).tools, self._limits)
        else:
            await self._check_environment("", settings.source)
        for name, source in settings.environments.items():
            with raised_as(ConfigError, f"task {name!r}", ConfigError):
                await self._check_environment(name, source)

    async def _check_environment(self, name: str, source: SourceSettings) -> None:
        for held_out in (False, True) if source.task.eval_source else (False,):
            where = f"{'task.eval_source' if held_out else 'task.source'} = " + repr(
                source.task.eval_source if held_out else source.task.source
            )
            maker = await asyncio.to_thread(self._maker, name, held_out)
            seed = task_seed(source.seed, 0, held_out=held_out)
            start = {"index": 0, "held_out": held_out, "seed": seed}
            begun: list[Prompt] = []
            for _ in range(2):
                episode, programs = maker.make(start), ChildPrograms()
                try:
                    with programs.owning():
                        begun.append(
                            await self._within(episode.begin(), self._limits.step_timeout_s, "reset", "step_timeout_s")
                        )
                        await self._within(episode.close(), self._limits.step_timeout_s, "close", "step_timeout_s")
                except EpisodeFailed as error:
                    raise ConfigError(f"{where}: {error}") from error
                finally:
                    episode.kill()
                    programs.close()
            if begun[0] != begun[1]:
                raise ConfigError(f"{where}: {_UNLIKE}")

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
        newest: SampledTurn | None = None,
    ) -> HostedStepResult:
        """Execute the model's last turn in its episode. Errors of the environment are returned, never raised.

        Args:
            key: the episode.
            record: of its task.
            turns: the texts of all turns so far. If this host does not have the episode, or has it with other turns, a
                repeatable environment executes the earlier ones again.
            truncated: a token limit ended the last turn, so the episode ends with the reward so far.
            newest: the last turn, for episodes that need token ids.
        """
        requested = tuple(turns)
        if not requested:
            return _failed("an action is needed: the model has taken no turn yet")
        if (last := self._ended.get(key)) is not None:
            if last[0] == requested:
                return last[1]
            if last[0] == requested[: len(last[0])]:
                return _failed(f"the episode ended with turn {len(last[0])}; it cannot take another one")
            del self._ended[key]
        hosted = self._hosted.get(key)
        if hosted is not None and hosted.turns != requested[: len(hosted.turns)]:
            self.cancel([key])
            hosted = None
        if hosted is None:
            if len(requested) > 1 and not (await self._maker_of(key, record)).repeatable:
                error = "this host does not have the episode, and its environment cannot be set back; start it again"
                return replace(_failed(error), lost=True)
            hosted = self._hosted.get(key)  # it may have been asked for meanwhile
        if hosted is None:
            hosted = self._hosted[key] = HostedEpisode(requested)
            hosted.answer = asyncio.ensure_future(
                self._advance(key, record, hosted, None, requested, truncated=truncated, newest=newest)
            )
        elif hosted.turns != requested:
            hosted.turns = requested
            before = hosted.answer
            hosted.answer = asyncio.ensure_future(
                self._advance(key, record, hosted, before, requested, truncated=truncated, newest=newest)
            )
        answer = hosted.answer
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                return _failed("the episode was cancelled")
            raise

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        """End an episode that has no tokens left for another turn. Its reward is the reward so far."""
        hosted = self._hosted.get(key)
        if hosted is None:
            return self._ended[key][1] if key in self._ended else _failed("the episode was cancelled")
        hosted.answer = asyncio.ensure_future(self._stop(key, record, hosted, hosted.answer))
        return await asyncio.shield(hosted.answer)

    async def _stop(
        self, key: EpisodeKey, record: Record, hosted: HostedEpisode, previous: asyncio.Task[HostedStepResult]
    ) -> HostedStepResult:
        await asyncio.wait({previous})
        assert hosted.episode is not None
        spent_s, waited_s, queued_s = hosted.spent_s, 0.0, time.monotonic()
        try:
            async with self._slots:
                waited_s = time.monotonic() - queued_s
                result = await self._timed(hosted, hosted.episode.end_early(), "the early end")
                answer = await self._hosted_result(key, record, result)
        except EpisodeFailed as error:
            answer = _failed(str(error))
        answer = replace(answer, seconds=hosted.spent_s - spent_s, waited_s=waited_s)
        self._end(key, hosted, hosted.turns, answer)
        return answer

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        """Drop episodes without waiting. Running steps are cancelled and blocking environments killed."""
        for key in keys:
            self._ended.pop(key, None)
            hosted = self._hosted.pop(key, None)
            if hosted is not None:
                hosted.answer.cancel()
                if hosted.episode is not None:
                    hosted.episode.kill()
                hosted.programs.close()

    async def close(self) -> None:
        """End all episodes. Agents that wait for a turn get a reply on which they retry, before their keys become
        invalid."""
        self._endpoint.drain()
        self.cancel(list(self._hosted))
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._scoring.shutdown(wait=False, cancel_futures=True)
        await self._endpoint.stop()
        for maker in self._makers.values():
            maker.close()
        self._makers.clear()

    async def _advance(
        self,
        key: EpisodeKey,
        record: Record,
        hosted: HostedEpisode,
        previous: asyncio.Task[HostedStepResult] | None,
        turns: tuple[str, ...],
        *,
        truncated: bool,
        newest: SampledTurn | None,
    ) -> HostedStepResult:
        """Execute the turns that the environment has not executed yet. previous: a request that must end first."""
        if previous is not None:
            await asyncio.wait({previous})
        spent_s, waited_s, queued_s = hosted.spent_s, 0.0, time.monotonic()
        first = hosted.num_turns
        try:
            async with self._slots:
                waited_s = time.monotonic() - queued_s
                if hosted.episode is None:
                    await self._begin(key, record, hosted)
                answer = HostedStepResult()
                for number, text in enumerate(turns[first:], first + 1):
                    if answer.ended:
                        raise EpisodeFailed(f"it ended with turn {number - 1}; it cannot take another one")
                    is_newest = number == len(turns)
                    if is_newest and newest is not None and isinstance(hosted.episode, AgentEpisode):
                        hosted.episode.set_turn(newest)
                    answer = await self._step(key, record, hosted, text, number, truncated=truncated and is_newest)
                    if not is_newest:
                        hosted.observations.append(answer.messages)
        except EpisodeFailed as error:
            answer = _failed(str(error))
        answer = replace(
            answer, seconds=hosted.spent_s - spent_s, waited_s=waited_s, replayed=tuple(hosted.observations)
        )
        hosted.observations = []
        if answer.ended:
            self._end(key, hosted, turns, answer)
        return answer

    async def _begin(self, key: EpisodeKey, record: Record, hosted: HostedEpisode) -> None:
        with raised_as(EpisodeFailed, "the environment cannot be made", ConfigError, KeyError, describe=error_line):
            hosted.episode = (await self._maker_of(key, record)).make(record)
        prompt = await self._timed(hosted, hosted.episode.begin(), "reset")
        if prompt != prompt_of(record["prompt"]):
            raise EpisodeFailed(_UNLIKE)

    async def _step(
        self, key: EpisodeKey, record: Record, hosted: HostedEpisode, text: str, number: int, *, truncated: bool
    ) -> HostedStepResult:
        assert hosted.episode is not None
        last = number >= self._limits.max_turns
        result: EnvStepResult = await self._timed(
            hosted, hosted.episode.step(text, truncated=truncated, last=last), f"step {number}"
        )
        hosted.num_turns = number
        return await self._hosted_result(key, record, result)

    async def _hosted_result(self, key: EpisodeKey, record: Record, result: EnvStepResult) -> HostedStepResult:
        """Return an environment's result to the caller, with the score of its answer if it has one."""
        if result.answer is not None:
            return await self._scored(key, result.answer, record)
        return HostedStepResult(messages=result.messages, ended=result.ended, reward=result.reward, parts=result.parts)

    async def _scored(self, key: EpisodeKey, answer: str, record: Record) -> HostedStepResult:
        """Score the last turn of an episode, within reward.timeout_s."""
        score = (await self._maker_of(key, record)).score
        assert score is not None
        try:
            scored = await asyncio.get_running_loop().run_in_executor(self._scoring, score, answer, record)
        except RuntimeError as error:  # it is closed
            raise EpisodeFailed(error_line(error)) from error
        return HostedStepResult(ended=True, reward=scored.reward, parts=scored.parts, error=scored.error)

    async def _timed(self, hosted: HostedEpisode, request: Coroutine[Any, Any, T], label: str) -> T:
        """Await a request within the timeouts of a step and of the episode. Raises EpisodeFailed."""
        remaining_s = self._limits.episode_timeout_s - hosted.spent_s
        knob = "step_timeout_s" if self._limits.step_timeout_s <= remaining_s else "episode_timeout_s"
        started_s = time.monotonic()
        try:
            with hosted.programs.owning():
                return await self._within(request, min(self._limits.step_timeout_s, remaining_s), label, knob)
        finally:
            hosted.spent_s += time.monotonic() - started_s

    async def _within(self, request: Coroutine[Any, Any, T], limit_s: float, label: str, knob: str) -> T:
        """Await a request for up to `limit_s`. After that it is cancelled, but not awaited, as it may ignore that.
        Raises EpisodeFailed."""
        task = asyncio.ensure_future(request)
        try:
            await asyncio.wait({task}, timeout=max(0.0, limit_s))
        finally:
            if not task.done():
                task.cancel()
            task.add_done_callback(_retrieve_exception)
        if not task.done():
            limit = getattr(self._limits, knob)
            raise EpisodeFailed(f"{label} took longer than environment.{knob} = {limit:g} s")
        if task.cancelled():
            raise EpisodeFailed(f"{label} was cancelled from within")
        try:
            return task.result()
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"{label} raised: {error_and_line(error)}") from error

    def _end(self, key: EpisodeKey, hosted: HostedEpisode, turns: tuple[str, ...], answer: HostedStepResult) -> None:
        """Keep an episode's last answer, and release its environment in the background."""
        self._hosted.pop(key, None)
        self._ended[key] = (turns, answer)
        while len(self._ended) > MAX_ENDED_EPISODES:
            del self._ended[next(iter(self._ended))]
        if hosted.episode is not None:
            closing = asyncio.ensure_future(self._release(hosted, hosted.episode, gently=not answer.error))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _release(self, hosted: HostedEpisode, episode: Episode, *, gently: bool) -> None:
        try:
            if gently:
                with contextlib.suppress(EpisodeFailed):
                    await self._within(episode.close(), self._limits.step_timeout_s, "close", "step_timeout_s")
        finally:
            episode.kill()
            hosted.programs.close()

    async def _maker_of(self, key: EpisodeKey, record: Record) -> EpisodeMaker:
        """Return the maker of a task's episodes. Raises ConfigError."""
        return await asyncio.to_thread(self._maker, self._settings.environment_of(record), key.held_out)

    def _maker(self, name: str | None, held_out: bool) -> EpisodeMaker:
        """Return the maker of training or held-out episodes. name: key of the environment; None: answers are scored.
        Raises ConfigError."""
        settings = self._settings
        source = settings.environments.get(name or "", settings.source)
        other = held_out and name is not None and bool(source.task.eval_source)
        with self._making:
            if (name, other) not in self._makers:
                if name is None:
                    assert settings.scoring is not None
                    self._makers[name, other] = tool_episodes(settings.scoring, self._limits)
                else:
                    self._makers[name, other] = environment_maker(source, other, self._endpoint)
            return self._makers[name, other]


_UNLIKE = (
    "reset with the same seed gives another first observation; seed all random numbers by the seed that reset is given"
)


def environment_maker(source: SourceSettings, other: bool, endpoint: EndpointServer) -> EpisodeMaker:
    """Build the maker of an environment's episodes, isolated as the job says. Raises ConfigError. other: the
    environment of held-out tasks. endpoint: the endpoint of agents."""
    key = "task.eval_source" if other else "task.source"
    task = source.task
    reference, options = (task.eval_source, source.eval_options) if other else (task.source, source.options)
    if is_agent(reference):
        return agent_episodes(source.limits, reference, options, key, endpoint)
    traits = traits_of(reference, key)
    if source.limits.isolation == "process" or traits.blocking:
        server = ForkServer(
            ForkSettings(source=reference, options=dict(options), key=key, memory_mib=source.limits.memory_mib)
        )
        server.start()
        return EpisodeMaker(
            make=lambda record: ForkedEpisode(server, start_of(record)),
            repeatable=traits.repeatable,
            close=server.close,
        )
    environment = open_environment(reference, options, key)
    return EpisodeMaker(make=lambda record: environment.episode(start_of(record)), repeatable=traits.repeatable)


def agent_episodes(
    limits: EnvironmentConfig, reference: str, options: Mapping[str, Any], key: str, endpoint: EndpointServer
) -> EpisodeMaker:
    """Build the maker of an agent's episodes. Unless the job says otherwise, coroutines run on the host's event loop,
    and other code in one process per episode. Raises ConfigError."""
    agent: LoadedAgent = open_source(SourceType.AGENT, reference, options, f"{key} = {reference!r}")
    if not (limits.isolation == "process" or agent.blocking):
        return EpisodeMaker(make=lambda record: AgentEpisode(endpoint, start_of(record), agent), repeatable=False)
    forks = ForkServer(ForkSettings(source=reference, options=dict(options), key=key, memory_mib=limits.memory_mib))
    forks.start()

    def make(record: Record) -> Episode:
        start = start_of(record)

        async def run(args: AgentArgs) -> Any:
            episode = ForkedEpisode(forks, start)
            try:
                await episode.begin()
                result = await episode.step(json.dumps(args[:2]), truncated=False, last=False)
            finally:
                episode.kill()
            return result.reward, dict(result.parts)

        return AgentEpisode(endpoint, start, replace(agent, run=run))

    return EpisodeMaker(make=make, repeatable=False, close=forks.close)


def tool_episodes(scoring: ScoringSettings, limits: EnvironmentConfig) -> EpisodeMaker:
    """Build the maker of episodes of tasks with a verifier, in which the model may call tools. Raises ConfigError."""
    tools = tools_of(limits)
    scorer = Scorer(scoring)
    scorer.check()

    def close() -> None:
        scorer.close()
        for tool in tools.values():
            if tool.server is not None:
                tool.server.close()

    return EpisodeMaker(
        make=lambda record: ToolEpisode(record, tools, limits),
        repeatable=True,
        score=lambda text, record: scorer.score([(text, record)])[0],
        close=close,
        tools=tools,
    )


def _failed(error: str) -> HostedStepResult:
    return HostedStepResult(ended=True, error=" ".join(printable(error, MAX_REASON_CHARS).split()))


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Read the error of a task that nobody waits for any longer, so that nothing is logged."""
    if not task.cancelled():
        task.exception()

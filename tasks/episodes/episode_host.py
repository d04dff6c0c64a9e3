"""All episodes of one environment host.

An episode belongs to its key, and is never stepped twice for the same turn: whoever asks again gets the same answer.
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

from staleflow.stores.errors import ConfigError
from staleflow.stores.printable import printable
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.environments.child_programs import ChildPrograms
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.environment_loader import open_environment, traits_of
from staleflow.tasks.environments.episode import OBSERVED, EnvStepResult, Episode, EpisodeFailed, start_of, told
from staleflow.tasks.environments.fork_server import ForkSettings
from staleflow.tasks.environments.forked_episodes import ForkedEpisode, ForkServer
from staleflow.tasks.environments.user_tools import GIVEN_BACK
from staleflow.tasks.episodes.agents import AgentEpisode
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent
from staleflow.tasks.episodes.step_results import Answer, EpisodeKey
from staleflow.tasks.episodes.tools import Tool, ToolEpisode, check_tools, tools_of
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Prompt, Record, prompt_of
from staleflow.tasks.settings.seeds import task_seed
from staleflow.tasks.settings.source_kinds import SourceType, is_agent, open_source
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings

LONGEST_FAILURE = 1000
"""Characters of the reason why an episode failed."""
KEPT_ENDED = 10_000
"""Episodes that have ended whose last answer is kept for whoever asks again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings of an environment host; see TaskConfig and EnvironmentConfig. scoring: of tasks of a single turn, whose
    answers are scored; None for environments, which reward their episodes themselves."""

    source: SourceSettings
    limits: EnvironmentConfig
    scoring: ScoringSettings | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of what is said to the model after its turns, as far as that is known beforehand."""
        if self.needs_token_ids:
            return ()
        return (OBSERVED,) if self.scoring is None else (GIVEN_BACK,)

    @property
    def needs_token_ids(self) -> bool:
        """Whether its episodes are told the ids and logprobs of turns, and not only their texts."""
        return self.source.is_agent_source

    def build(self) -> EpisodeHost:
        return EpisodeHost(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMaker:
    """Makes episodes of an environment. repeatable: see Traits. score: the verifier of answers that have yet to be
    scored. close: releases what its episodes share. tools: that episodes of tasks with a verifier may call."""

    make: Callable[[Record], Episode]
    repeatable: bool
    score: Callable[[str, Record], ScoredResponse] | None = None
    close: Callable[[], None] = lambda: None
    tools: Mapping[str, Tool] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """An episode of this host."""

    turns: tuple[str, ...]
    answer: asyncio.Task[Answer] = field(init=False)
    """To the last of the turns."""
    episode: Episode | None = None
    num_taken: int = 0
    """Turns that the environment has taken."""
    spent_s: float = 0.0
    said: list[tuple[Message, ...]] = field(default_factory=list)
    programs: ChildPrograms = field(default_factory=ChildPrograms)
    """That the environment has started, if it is on this event loop."""


class EpisodeHost:
    """The episodes of one environment host. Used from one event loop."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._held: dict[EpisodeKey, _Held] = {}
        self._ended: dict[EpisodeKey, tuple[tuple[str, ...], Answer]] = {}
        self._places = asyncio.Semaphore(settings.limits.concurrency)
        self._kinds: dict[bool, EpisodeMaker] = {}
        self._making = threading.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._endpoint = EndpointServer(settings.source.endpoint)

    async def check(self) -> None:
        """Raise ConfigError if the environment cannot be made, or begins in two ways with one seed."""
        if self._settings.scoring is not None:
            kind = await asyncio.to_thread(self._kind, False)
            await check_tools(kind.tools, self._limits)
            return
        for held_out in (False, True) if self._settings.source.evaluation else (False,):
            source = self._settings.source
            where = f"{'task.eval_source' if held_out else 'task.source'} = " + repr(
                source.evaluation if held_out else source.source
            )
            kind = await asyncio.to_thread(self._kind, held_out)
            seed = task_seed(source.seed, 0, held_out=held_out)
            start = {"index": 0, "held_out": held_out, "seed": seed}
            begun: list[Prompt] = []
            for _ in range(2):
                episode, programs = kind.make(start), ChildPrograms()
                try:
                    with programs.owning():
                        begun.append(
                            await self._within(episode.begin(), self._limits.step_timeout_s, "reset", "step_timeout_s")
                        )
                        await self._within(episode.close(), self._limits.step_timeout_s, "close", "step_timeout_s")
                except EpisodeFailed as error:
                    raise ConfigError(f"{where}: {error}") from error
                finally:
                    episode.abandon()
                    programs.close()
            if begun[0] != begun[1]:
                raise ConfigError(f"{where}: {_UNLIKE}")

    @property
    def needs_token_ids(self) -> bool:
        return self._settings.needs_token_ids

    async def act(
        self,
        key: EpisodeKey,
        record: Record,
        turns: Sequence[str],
        *,
        cut: bool,
        newest: SampledTurn | None = None,
    ) -> Answer:
        """Let the environment take the last of the model's `turns`, and answer. Never raises for what goes wrong in the
        environment.

        key, record: the episode, and its task's. turns: the texts of all turns so far. If this host does not have the
        episode, or has it with other turns, a repeatable environment takes the earlier ones again. cut: the last turn
        was cut short, so the episode ends with the reward so far. newest: the last turn, for episodes that hear of ids.
        """
        asked = tuple(turns)
        if not asked:
            return _failed("an action is needed: the model has taken no turn yet")
        if (found := self._ended.get(key)) is not None:
            if found[0] == asked:
                return found[1]
            if found[0] == asked[: len(found[0])]:
                return _failed(f"the episode ended with turn {len(found[0])}; it cannot take another one")
            del self._ended[key]
        held = self._held.get(key)
        if held is not None and held.turns != asked[: len(held.turns)]:
            self.cancel([key])
            held = None
        if held is None:
            if len(asked) > 1 and not (await asyncio.to_thread(self._kind, key.held_out)).repeatable:
                error = "this host does not have the episode, and its environment cannot be set back; start it again"
                return replace(_failed(error), lost=True)
            held = self._held.get(key)  # it may have been asked for meanwhile
        if held is None:
            held = self._held[key] = _Held(asked)
            held.answer = asyncio.ensure_future(self._advance(key, record, held, None, asked, cut=cut, newest=newest))
        elif held.turns != asked:
            held.turns = asked
            before = held.answer
            held.answer = asyncio.ensure_future(self._advance(key, record, held, before, asked, cut=cut, newest=newest))
        answer = held.answer
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                return _failed("the episode was cancelled")
            raise

    async def end(self, key: EpisodeKey, record: Record) -> Answer:
        """End an episode whose environment has answered, but whose model has no room for another turn: with the reward
        so far."""
        held = self._held.get(key)
        if held is None:
            return self._ended[key][1] if key in self._ended else _failed("the episode was cancelled")
        held.answer = asyncio.ensure_future(self._stop(key, record, held, held.answer))
        return await asyncio.shield(held.answer)

    async def _stop(self, key: EpisodeKey, record: Record, held: _Held, before: asyncio.Task[Answer]) -> Answer:
        await asyncio.wait({before})
        spent_s, waited_s, asked_s = held.spent_s, 0.0, time.monotonic()
        try:
            async with self._places:
                waited_s = time.monotonic() - asked_s
                answer = await self._step(key, record, held, held.turns[-1], held.num_taken, cut=True)
        except EpisodeFailed as error:
            answer = _failed(str(error))
        answer = replace(answer, seconds=held.spent_s - spent_s, waited_s=waited_s)
        self._end(key, held, held.turns, answer)
        return answer

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        """Forget episodes. Steps that run are cancelled, environments that block are abandoned; nothing is awaited."""
        for key in keys:
            self._ended.pop(key, None)
            held = self._held.pop(key, None)
            if held is not None:
                held.answer.cancel()
                if held.episode is not None:
                    held.episode.abandon()
                held.programs.close()

    async def close(self) -> None:
        """End all episodes. Agents that wait for a turn are told to try again before their keys are void."""
        self._endpoint.refuse()
        self.cancel(list(self._held))
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._scoring.shutdown(wait=False, cancel_futures=True)
        await self._endpoint.stop()
        for kind in self._kinds.values():
            kind.close()
        self._kinds.clear()

    async def _advance(
        self,
        key: EpisodeKey,
        record: Record,
        held: _Held,
        before: asyncio.Task[Answer] | None,
        turns: tuple[str, ...],
        *,
        cut: bool,
        newest: SampledTurn | None,
    ) -> Answer:
        """Take the turns that the environment has not taken yet. before: a request that must be answered first."""
        if before is not None:
            await asyncio.wait({before})
        spent_s, waited_s, asked_s = held.spent_s, 0.0, time.monotonic()
        first = held.num_taken
        try:
            async with self._places:
                waited_s = time.monotonic() - asked_s
                if held.episode is None:
                    await self._begin(key, record, held)
                answer = Answer()
                for number, text in enumerate(turns[first:], first + 1):
                    if answer.ended:
                        raise EpisodeFailed(f"it ended with turn {number - 1}; it cannot take another one")
                    is_newest = number == len(turns)
                    if is_newest and newest is not None and isinstance(held.episode, AgentEpisode):
                        held.episode.hear(newest)
                    answer = await self._step(key, record, held, text, number, cut=cut and is_newest)
                    if not is_newest:
                        held.said.append(answer.messages)
        except EpisodeFailed as error:
            answer = _failed(str(error))
        answer = replace(answer, seconds=held.spent_s - spent_s, waited_s=waited_s, replayed=tuple(held.said))
        held.said = []
        if answer.ended:
            self._end(key, held, turns, answer)
        return answer

    async def _begin(self, key: EpisodeKey, record: Record, held: _Held) -> None:
        try:
            kind = await asyncio.to_thread(self._kind, key.held_out)
            held.episode = kind.make(record)
        except (ConfigError, KeyError) as error:
            raise EpisodeFailed(f"the environment cannot be made: {told(error)}") from error
        prompt = await self._timed(held, held.episode.begin(), "reset")
        if prompt != prompt_of(record["prompt"]):
            raise EpisodeFailed(_UNLIKE)

    async def _step(self, key: EpisodeKey, record: Record, held: _Held, text: str, number: int, *, cut: bool) -> Answer:
        assert held.episode is not None
        last = number >= self._limits.max_turns
        said: EnvStepResult = await self._timed(held, held.episode.step(text, cut=cut, last=last), f"step {number}")
        held.num_taken = number
        if said.answer is not None:
            return await self._scored(key, said.answer, record)
        return Answer(messages=said.messages, ended=said.ended, reward=said.reward, parts=said.parts)

    async def _scored(self, key: EpisodeKey, answer: str, record: Record) -> Answer:
        """The end of an episode whose last turn is scored, within reward.timeout_s."""
        score = self._kind(key.held_out).score
        assert score is not None
        try:
            scored = await asyncio.get_running_loop().run_in_executor(self._scoring, score, answer, record)
        except RuntimeError as error:  # it is closed
            raise EpisodeFailed(told(error)) from error
        return Answer(ended=True, reward=scored.reward, parts=scored.parts, error=scored.error)

    async def _timed(self, held: _Held, request: Coroutine[Any, Any, T], what: str) -> T:
        """The result of a request, within the limits of a step and of the episode. Raises EpisodeFailed."""
        left_s = self._limits.episode_timeout_s - held.spent_s
        knob = "step_timeout_s" if self._limits.step_timeout_s <= left_s else "episode_timeout_s"
        begin = time.monotonic()
        try:
            with held.programs.owning():
                return await self._within(request, min(self._limits.step_timeout_s, left_s), what, knob)
        finally:
            held.spent_s += time.monotonic() - begin

    async def _within(self, request: Coroutine[Any, Any, T], limit_s: float, what: str, knob: str) -> T:
        """The result of a request. It is cancelled after `limit_s`, but not waited for: it may ignore that. Raises
        EpisodeFailed."""
        task = asyncio.ensure_future(request)
        try:
            await asyncio.wait({task}, timeout=max(0.0, limit_s))
        finally:
            if not task.done():
                task.cancel()
            task.add_done_callback(_heard)
        if not task.done():
            limit = getattr(self._limits, knob)
            raise EpisodeFailed(f"{what} took longer than environment.{knob} = {limit:g} s")
        if task.cancelled():
            raise EpisodeFailed(f"{what} was cancelled from within")
        try:
            return task.result()
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"{what} raised: {told(error, line=True)}") from error

    def _end(self, key: EpisodeKey, held: _Held, turns: tuple[str, ...], answer: Answer) -> None:
        """Keep an episode's last answer, and release its environment in the background."""
        self._held.pop(key, None)
        self._ended[key] = (turns, answer)
        while len(self._ended) > KEPT_ENDED:
            del self._ended[next(iter(self._ended))]
        if held.episode is not None:
            closing = asyncio.ensure_future(self._release(held, held.episode, gently=not answer.error))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _release(self, held: _Held, episode: Episode, *, gently: bool) -> None:
        try:
            if gently:
                with contextlib.suppress(EpisodeFailed):
                    await self._within(episode.close(), self._limits.step_timeout_s, "close", "step_timeout_s")
        finally:
            episode.abandon()
            held.programs.close()

    def _kind(self, held_out: bool) -> EpisodeMaker:
        """How episodes are made; held-out ones may be of another environment. Raises ConfigError."""
        scoring = self._settings.scoring
        other = held_out and scoring is None and bool(self._settings.source.evaluation)
        with self._making:
            if other not in self._kinds:
                self._kinds[other] = (
                    environment_kind(self._settings, other, self._endpoint)
                    if scoring is None
                    else tool_episodes(scoring, self._limits)
                )
            return self._kinds[other]


_UNLIKE = (
    "reset with the same seed gives another first observation; seed all random numbers by the seed that reset is given"
)


def environment_kind(settings: EpisodeSettings, other: bool, endpoint: EndpointServer) -> EpisodeMaker:
    """Episodes of an environment, isolated as the job says. other: that of held-out tasks. endpoint: of agents. Raises
    ConfigError."""
    source = settings.source
    key = "task.eval_source" if other else "task.source"
    named, options = (source.evaluation, source.evaluation_options) if other else (source.source, source.options)
    if is_agent(named):
        return agent_episodes(settings, named, options, key, endpoint)
    traits = traits_of(named, key)
    if settings.limits.isolation == "process" or traits.blocking:
        server = ForkServer(
            ForkSettings(source=named, options=dict(options), key=key, memory_mib=settings.limits.memory_mib)
        )
        server.start()
        return EpisodeMaker(
            make=lambda record: ForkedEpisode(server, start_of(record)),
            repeatable=traits.repeatable,
            close=server.close,
        )
    environment = open_environment(named, options, key)
    return EpisodeMaker(make=lambda record: environment.episode(start_of(record)), repeatable=traits.repeatable)


def agent_episodes(
    settings: EpisodeSettings, named: str, options: Mapping[str, Any], key: str, endpoint: EndpointServer
) -> EpisodeMaker:
    """Episodes of an agent: a coroutine runs on the host's loop, all else in a process each, unless the job says
    otherwise. Raises ConfigError."""
    agent: LoadedAgent = open_source(SourceType.AGENT, named, options, f"{key} = {named!r}")
    limits = settings.limits
    if not (limits.isolation == "process" or agent.blocking):
        return EpisodeMaker(make=lambda record: AgentEpisode(endpoint, start_of(record), agent), repeatable=False)
    forks = ForkServer(ForkSettings(source=named, options=dict(options), key=key, memory_mib=limits.memory_mib))
    forks.start()

    def make(record: Record) -> Episode:
        start = start_of(record)

        async def run(told: AgentArgs) -> Any:
            episode = ForkedEpisode(forks, start)
            try:
                await episode.begin()
                said = await episode.step(json.dumps(told[:2]), cut=False, last=False)
            finally:
                episode.abandon()
            return said.reward, dict(said.parts)

        return AgentEpisode(endpoint, start, replace(agent, run=run))

    return EpisodeMaker(make=make, repeatable=False, close=forks.close)


def tool_episodes(scoring: ScoringSettings, limits: EnvironmentConfig) -> EpisodeMaker:
    """Episodes of tasks with a verifier, in which the model may call tools. Raises ConfigError."""
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


def _failed(error: str) -> Answer:
    return Answer(ended=True, error=" ".join(printable(error, LONGEST_FAILURE).split()))


def _heard(task: asyncio.Task[Any]) -> None:
    """Read the error of a task that nobody waits for any longer, so that nothing is logged."""
    if not task.cancelled():
        task.exception()

"""Random multi-turn episodes from hypothesis, run on the real trajectory server and two real rollout instances without
a cluster, on any engine.

`plans` draws a plan; `play` runs it and checks after every turn, interrupt and observation that

- each request has exactly the prompt, the sampled tokens and the env tokens so far;
- the server has, bit for bit and in order, the tokens and logprobs that the engines returned, and the env tokens;
- a token counts as sampled if an engine sampled it, and its version is the one its engine had at that time, checked by
  the requests running when weights were loaded and by its logprob under the weights of that version.

A new engine needs a `Subject`; tests/tasks/test_random_episodes.py has two.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import numpy as np

from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import RunHeader
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Trajectory,
    TrajectoryId,
)
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.actors.parameter_server import PublishedWeights
from staleflow.tasks.actors.rollout_instance import RequestOutcome, RolloutInstance
from staleflow.tasks.actors.server_messages import ObservationItem, RewardItem, RouteItem
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.engines.base import Engine, Request
from staleflow.tasks.rendering.task_source import Message, Task
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.advantage import DrGrpo, OverlongPenalty
from tests.support.memory_store import MemoryStore
from tests.support.watched_engine import WatchedEngine, WatchedSettings

MAX_TOKENS, TURN_TOKENS, MAX_PROMPT = 60, 14, 40
"""Maximum tokens of a response, of one turn, and of a prompt: a model for 100 tokens is enough."""
FIRST, COUNT = 4, 10
"""First id and number of ids of the tokens of prompts and observations; a model must know them."""
PATIENCE_S = 60.0
NO_VERSION = -1


# -- what happens ------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The next operation on an episode. GO: route it, sample its turn to the end, or add an observation of `number`
    tokens, depending on its state. STOP, MOVE: interrupt its turn after `number` tokens; MOVE: and continue elsewhere.
    PULL: an instance loads newer weights, that of the episode after `number` tokens. SAVE: deliver running tokens and
    continue. FAIL: its environment fails. END: its episode ends with its turn. ABORT: it ends at once. Preceding
    operations happen first if the episode is not that far; nothing happens if it is further."""

    kind: str
    episode: int
    number: int


KINDS = ("GO",) * 6 + ("STOP", "STOP", "MOVE", "MOVE", "PULL", "PULL", "SAVE", "FAIL", "END", "ABORT")


@dataclass(frozen=True, slots=True)
class Plan:
    """prompts: length of each episode's prompt in tokens. turns: number of turns after which an episode ends."""

    prompts: tuple[int, ...]
    turns: int
    steps: tuple[Step, ...]


def plans(most_episodes: int = 4) -> st.SearchStrategy[Plan]:
    """Return plans of up to this many episodes. Episodes that are unfinished after the last step are run to their
    end."""
    step = st.builds(Step, st.sampled_from(KINDS), st.integers(0, most_episodes - 1), st.integers(0, 10))
    steps = st.lists(st.lists(step, max_size=12), max_size=12)  # of lists: hypothesis draws some five elements of each
    return st.builds(
        Plan,
        st.lists(st.integers(1, MAX_PROMPT), min_size=1, max_size=most_episodes).map(tuple),
        st.integers(1, 5),
        steps.map(lambda parts: tuple(itertools.chain(*parts))),
    )


# -- the engine under test ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test. engine: that of instance i, idle, with an empty cache, at version 0; it is not closed.
    weights: the file of a version. logprobs: of tokens[first:], each under the weights of its version, computed
    independently of the engine. check_idle: raises AssertionError unless an engine without requests has freed
    everything."""

    engine: Callable[[int], Engine]
    weights: Callable[[int], Path]
    logprobs: Callable[[list[int], int, list[int]], Sequence[float]]
    check_idle: Callable[[Engine], None] = lambda engine: None


# -- the server --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlayedPrompts:
    """Prompts of given lengths, and a tokenizer of numbers: the content of a message lists its ids."""

    lengths: tuple[int, ...]
    max_new_tokens: int = MAX_TOKENS
    held_out_notice: str = ""
    eval_sets: tuple[EvaluationSet, ...] = ()
    agent_sources: frozenset[int] = frozenset()

    def build(self) -> PlayedPrompts:
        return self

    def task(self, number: int) -> Task:
        return Task(prompt=str(number), record={})

    def tasks(self, numbers: Sequence[int], source: int = 0) -> list[Task]:
        return [self.task(number) for number in numbers]

    def response_tokens(self, source: int = 0) -> int:
        return self.max_new_tokens

    def encode(self, task: Task) -> tuple[int, ...]:
        return words(int(str(task.prompt)), self.lengths[int(str(task.prompt))])

    def text(self, response: Sequence[int]) -> str:
        return " ".join(map(str, response))

    def bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: tuple[Message, ...], source: int = 0
    ) -> list[int]:
        return [int(word) for message in messages for word in message.content.split()]


class InMemoryServer(TrajectoryServer):
    """The trajectory server with an in-memory store."""

    class Stores:
        @staticmethod
        def create(path: Path, header: RunHeader) -> MemoryStore:
            return MemoryStore(header)

    store_class: ClassVar[Any] = Stores

    def held(self, trajectory: TrajectoryId) -> Trajectory:
        return self._in_flight.live[trajectory]


def words(key: int, count: int) -> tuple[int, ...]:
    """Return this many token ids, which depend on the key."""
    return tuple(FIRST + (3 * key + 7 * i + i * i // 5) % COUNT for i in range(count))


def server(plan: Plan, folder: Path) -> InMemoryServer:
    header = RunHeader(run="episodes", eta=0, groups_per_step=1, group_size=1, members_started_per_group=1)
    prompts: Any = PlayedPrompts(plan.prompts)
    settings = ServerSettings(
        commit_s=60.0,
        prompts=prompts, reward_settings="none", group_size=1, members_started_per_group=1, advantage=DrGrpo(),
        overlong=OverlongPenalty(ramp_tokens=0, penalty=0.0, max_length=MAX_TOKENS), max_error_share=1.0,
        store=str(folder / "store"), header=header, max_turn_tokens=TURN_TOKENS, keeps_kv=True,
    )  # fmt: skip
    return InMemoryServer(settings, 0.0)


# -- playing -----------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """The expected value of a token after the prompt. Env tokens have NO_VERSION."""

    id: int
    version: int
    logprob: float
    instance: str


@dataclass(slots=True)
class Episode:
    """The expected content of an episode. on: the instance it runs on or ran on last."""

    id: TrajectoryId
    prompt: tuple[int, ...]
    state: str = "QUEUED"
    route_number: int = 0
    on: int = 0
    next_on: int | None = None
    version: int = 0
    """Version of its first route: no later route may be to an instance with an older version."""
    turns: int = 0
    response: list[Token] = field(default_factory=list)
    answered: int = 0
    """Number of response tokens up to the last observation."""

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.response]


def play(subject: Subject, plan: Plan) -> Counter[str]:
    """Run a plan. Returns counts of what happened. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table(subject, plan, Path(folder))
        asyncio.run(table.play())
    return table.counts


class Table:
    """Two instances, a server, and episodes in progress."""

    def __init__(self, subject: Subject, plan: Plan, folder: Path) -> None:
        self._subject, self._plan = subject, plan
        self._episodes = [Episode(TrajectoryId(i), words(i, length)) for i, length in enumerate(plan.prompts)]
        self._engines = [WatchedEngine(subject.engine(i), self._check_request) for i in range(2)]
        self._folder = folder
        self.counts: Counter[str] = Counter(episodes=len(plan.prompts))

    async def play(self) -> None:
        self._server = server(self._plan, self._folder)
        self._instances = [
            RolloutInstance(WatchedSettings(engine=e), InstanceId(f"i{n}"), 1, 30.0, 0.0)
            for n, e in enumerate(self._engines)
        ]
        self._told = asyncio.Condition()
        listening = [asyncio.create_task(self._listen(i)) for i in range(2)]
        playing = asyncio.create_task(self._play())
        try:
            await asyncio.wait([playing, *listening], return_when=asyncio.FIRST_COMPLETED)
            for item in (*listening, playing):
                if item.done():
                    item.result()
        finally:
            for item in (playing, *listening):
                item.cancel()
            await asyncio.gather(playing, *listening, return_exceptions=True)
            for instance in self._instances:
                await instance.abort(tuple(e.id for e in self._episodes))
                await instance.close()
            await self._server.close()

    async def _play(self) -> None:
        await self._server.draw(0, len(self._episodes))
        for step in self._plan.steps:
            episode = self._episodes[step.episode % len(self._episodes)]
            await getattr(self, f"_{step.kind.lower()}")(episode, step.number)
        for episode in self._episodes:
            while episode.state != "DONE":
                ends = episode.state == "ACTING" and episode.turns >= self._plan.turns
                await (self._end if ends else self._go)(episode, 3)
        for instance in self._instances:  # tokens cached on the instance of an earlier turn
            await instance.abort(tuple(episode.id for episode in self._episodes))
        for engine in self._engines:
            load = engine.load_statistics()
            assert (load.running, load.kv_tokens) == (0, 0)
            self.counts["cached tokens"] += load.cached_tokens - engine.cached_before
            self._subject.check_idle(engine.engine)

    # -- steps ---------------------------------------------------------------------------------------------------

    async def _go(self, episode: Episode, number: int) -> None:
        match episode.state:
            case "QUEUED":
                await self._route(episode, number)
            case "RUNNING":
                await self._until(lambda: episode.state != "RUNNING")
            case "ACTING" if episode.turns >= self._plan.turns:
                await self._end(episode, number)
            case "ACTING":
                await self._answer(episode, number)

    async def _stop(self, episode: Episode, number: int) -> None:
        await self._run(episode, number)
        if episode.state != "RUNNING":
            return
        one = self._instances[episode.on]
        for outcome in await one.interrupt(self._server, (episode.id,)):
            assert outcome == RequestOutcome(
                trajectory=episode.id, route_number=episode.route_number, num_tokens=outcome.num_tokens
            )
            self._take(episode)
            assert outcome.num_tokens == len(episode.response)
            episode.state = "QUEUED"
            self.counts["interrupts"] += 1
            self._check(episode)
        await self._until(lambda: episode.state != "RUNNING")  # if it has finished, its end is reported

    async def _move(self, episode: Episode, number: int) -> None:
        await self._stop(episode, number)
        if episode.state in {"QUEUED", "ACTING"} and episode.route_number:
            episode.next_on = 1 - episode.on

    async def _pull(self, episode: Episode, number: int) -> None:
        on = episode.on if episode.state == "RUNNING" else number % 2
        await self._sampled(episode, number)
        newest = max(engine.version for engine in self._engines)
        version = PolicyVersion(newest + (self._engines[on].version == newest))
        within = any(e.state == "RUNNING" and e.on == on for e in self._episodes)
        path = self._subject.weights(version)
        published = PublishedWeights(
            version=version,
            fingerprint=fingerprint(weight_folder.read(path)),
            probe_tokens=(),
            probe_logprobs=(),
            drift_limit=1.0,
        )
        check = await self._instances[on].pull(published, str(path))
        assert check.outcome == "verified", check
        self.counts["pulls within turns" if within else "pulls between turns"] += 1

    async def _save(self, episode: Episode, number: int) -> None:
        await self._run(episode, number)
        await self._instances[episode.on].flush(self._server)
        self.counts["deliveries within turns"] += episode.state == "RUNNING"

    async def _fail(self, episode: Episode, number: int) -> None:
        await self._act(episode)
        if episode.state == "DONE":
            return
        await self._server.restart([(episode.id, len(episode.response), episode.route_number)])
        await self._instances[episode.on].abort((episode.id,))
        episode.response.clear()
        episode.turns = episode.answered = 0
        episode.state = "QUEUED"
        self.counts["restarts"] += 1
        self._check(episode)

    async def _end(self, episode: Episode, number: int) -> None:
        await self._act(episode)
        if episode.state == "DONE":
            return
        item = RewardItem(episode.id, len(episode.response), episode.route_number, ScoredResponse(reward=0.5))
        (held,) = await self._server.record_rewards([item])
        assert held == ScoredResponse(reward=0.5)
        await self._instances[episode.on].abort((episode.id,))
        self._check(episode)
        episode.state = "DONE"

    async def _abort(self, episode: Episode, number: int) -> None:
        if episode.state == "DONE":
            return
        await self._sampled(episode, number)
        episode.state = "DONE"
        await self._instances[episode.on].abort((episode.id,))
        ending = Ending(
            trajectory=episode.id,
            group=GroupId(episode.id),
            fate=Fate.ABORTED,
            reason=AbortReason.SURPLUS_MEMBER,
            step=0,
        )
        await self._server.discard((ending,), (PolicyVersion(episode.version),))
        self.counts["aborts"] += 1

    async def _route(self, episode: Episode, number: int) -> None:
        on = number % 2 if episode.next_on is None else episode.next_on
        if self._engines[on].version < episode.version:
            on = 1 - on
        if episode.route_number and on != episode.on:
            self.counts["migrations"] += 1
        if not episode.route_number:
            episode.version = self._engines[on].version
        episode.route_number, episode.on, episode.next_on = episode.route_number + 1, on, None
        episode.state = "RUNNING"
        item = RouteItem(
            trajectory=episode.id, route_number=episode.route_number, version=PolicyVersion(episode.version)
        )
        await self._instances[on].route(self._server, (item,))

    async def _answer(self, episode: Episode, number: int) -> None:
        given = words(episode.id + len(episode.response), number)
        message = Message("tool", " ".join(map(str, given)))
        text = ObservationItem(
            trajectory=episode.id, num_tokens=len(episode.response), route_number=episode.route_number,
            messages=(message,), seconds=0.5, replayed=(),
        )  # fmt: skip
        (taken,) = await self._server.add_observations([text])
        if taken.problem:
            assert taken.problem == "full" and len(episode.response) + number >= MAX_TOKENS
            await self._end(episode, number)
            return
        episode.response += [Token(token, NO_VERSION, 0.0, "") for token in given]
        episode.answered = len(episode.response)
        assert taken.num_tokens == len(episode.response)
        episode.state = "QUEUED"
        self.counts["answers of no tokens"] += not number
        self._check(episode)

    async def _run(self, episode: Episode, number: int) -> None:
        """Start a waiting turn, and wait until it has this many tokens or has ended."""
        if episode.state == "QUEUED":
            await self._route(episode, number)
        await self._sampled(episode, number)

    async def _act(self, episode: Episode) -> None:
        """Let a waiting or running turn end."""
        while episode.state in {"QUEUED", "RUNNING"}:
            await self._go(episode, 0)

    # -- what is told --------------------------------------------------------------------------------------------

    async def _listen(self, number: int) -> None:
        while True:
            outcomes = await self._instances[number].next_events(self._server, 0.01)
            async with self._told:
                for outcome in outcomes:
                    self._hear(outcome)
                self._told.notify_all()

    def _hear(self, outcome: RequestOutcome) -> None:
        episode = self._episodes[outcome.trajectory]
        assert not outcome.error
        if episode.state != "RUNNING" or outcome.route_number != episode.route_number:
            assert episode.state == "DONE", "event of a turn that does not run"
            return
        self._take(episode)
        assert outcome.num_tokens == len(episode.response)
        episode.state = "ACTING"
        episode.turns += 1
        self.counts["turns"] += 1
        self._check(episode)

    async def _until(self, come: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._told:
            await self._told.wait_for(come)

    async def _sampled(self, episode: Episode, number: int) -> None:
        """Wait until the turn has this many tokens or has ended."""
        deadline = time.monotonic() + PATIENCE_S
        begin = len(episode.response)
        while episode.state == "RUNNING":
            assert time.monotonic() < deadline
            progress = dict((await self._instances[episode.on].report()).progress)
            if progress.get(episode.id, 0) >= begin + number:
                return
            await asyncio.sleep(0.001)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_request(self, request: Request) -> None:
        """Called in a thread of an instance while its route is awaited, so the episode does not change."""
        episode = self._episodes[request.trajectory]
        assert (request.route_number, request.tokens) == (episode.route_number, (*episode.prompt, *episode.ids))
        assert request.num_response_tokens == len(episode.response)
        in_turn = len(episode.response) - episode.answered
        assert request.max_new_tokens == min(MAX_TOKENS - len(episode.response), TURN_TOKENS - in_turn)
        assert request.keep_kv and not request.greedy

    def _take(self, episode: Episode) -> None:
        """Add the output of an engine for the latest route of an episode to its expected content."""
        engine = self._engines[episode.on]
        result = engine.results[episode.id, episode.route_number]
        sampling = engine.sampling[episode.id, episode.route_number]
        first = len(episode.response)
        assert result.start == first
        new = [
            Token(int(token), int(segment.version), float(logprob), segment.instance)
            for segment in result.segments
            for token, logprob in zip(segment.tokens, segment.logprobs, strict=True)
        ]
        assert [token.id for token in new[: len(sampling.seen)]] == sampling.seen
        assert len(new) <= sampling.request.max_new_tokens
        if result.finish is not FinishReason.UNFINISHED:
            assert new
        for position, token in enumerate(new, first):
            low = high = sampling.version
            for load in sampling.loads:
                low = load.version if position >= load.after else low
                high = load.version if position >= load.before else high
            assert low <= token.version <= high, f"position {position}: version {token.version}, not {low} to {high}"
        episode.response += new
        expected = self._subject.logprobs([*episode.prompt, *episode.ids], len(episode.prompt) + first,
                                          [token.version for token in new])  # fmt: skip
        np.testing.assert_allclose([token.logprob for token in new], expected, atol=3e-4)

    def _check(self, episode: Episode) -> None:
        """Compare what the server has of an episode with the expected content."""
        held = self._server.held(episode.id)
        assert tuple(held.prompt_tokens.tolist()) == episode.prompt
        assert held.response_tokens.tolist() == episode.ids
        assert held.versions.tolist() == [token.version for token in episode.response]
        assert held.logprobs.tolist() == [token.logprob for token in episode.response]
        assert held.sampled.tolist() == [token.version != NO_VERSION for token in episode.response]
        instances = [s.instance if isinstance(s, Segment) else "" for s in held.spans for _ in s.tokens]
        assert instances == [token.instance for token in episode.response]

"""The rollout instance: an actor around one engine in one worker process.

Invariants: a trajectory's tokens are with the trajectory server before the driver learns that it was sampled; a
response that has ended is never continued, even if its instance was lost before the driver learned of the end; a
request is never sampled under a version older than its Route command names, nor one of an evaluation under any other
(checked here, not only decided elsewhere); no token leaves that was sampled under weights which were not checked.
Every spool_s seconds the server gets the tokens of running requests: if this process is lost, other instances continue
from there. Each delivery starts where the one before it ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from staleflow.stores.errors import ActorLost, ProtocolViolation, WeightsRefused
from staleflow.stores.trajectory import InstanceId, TrajectoryId, is_evaluation
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.draft_corpus import NewResponses
from staleflow.tasks.actors.published_weights import PublishedWeights
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.engines.base import Engine, EngineLoad, Failed, Request, SampledTokens
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.engines.engine_settings import EngineSettings

T = TypeVar("T")

LEARN_S = 1.0
"""Seconds between two requests for other responses to draft from, while the engine drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """The result of a request, as ids and lengths for the driver. error: empty if the request succeeded."""

    trajectory: TrajectoryId
    route_number: int
    tokens: int
    error: str = ""
    drafted_tokens: int = 0
    """Drafted tokens that were verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""


@remote_methods
class RolloutInstance:
    """The rollout instance's Dask actor. Slow work runs in two threads: one executes commands in order, one waits for
    events."""

    def __init__(
        self,
        engine_settings: EngineSettings,
        instance: InstanceId,
        threads: int,
        call_s: float,
        spool_s: float,
        drafts: bool = False,
        run: str = "",
        resumed: bool = False,
    ):
        """Build the engine, or take over the engine of an actor that was lost.

        Args:
            spool_s: seconds between two deliveries of running responses' tokens; 0 for none.
            drafts: whether the engine gets other responses from the server, to draft from them.
            run: the run's folder; with it, the engine outlives this actor if that is dropped without being closed.
            resumed: whether such an engine may be here.
        """
        self._instance = instance
        self._call_s = call_s
        self._drafts = drafts
        self._sent: frozenset[TrajectoryId] = frozenset()
        """Other responses to the prompts of running requests that the engine has."""
        self._requested_s = 0.0
        """When they were last fetched from the server, on the loop's clock."""
        handed_over = engine_handover.take_over(run if resumed else "", engine_settings, instance)
        self._took_over = handed_over is not None
        self._engine: Engine = handed_over or build_engine(engine_settings, instance, threads)
        if run:
            engine_handover.register(run, engine_settings, self._engine, self)
        self._commands = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._closed = False
        self._asleep = False
        self._pulling: asyncio.Future[WeightCheck] | None = None
        """The running pull: tokens sampled meanwhile are delivered once the weights are checked."""
        self._refused = ""
        """Why no token is delivered any more; empty while tokens are."""
        self._undelivered: list[SampledTokens | Failed] = []
        self._stopped: list[SampledTokens] = []
        """Interrupted requests that are not yet with the server."""
        self._undelivered_turns: list[SampledTokens] = []
        """Requests that were routed here and had ended already."""
        self._spool_s = spool_s
        self._spooled_s: float | None = None
        """When running responses' tokens were last delivered, on the loop's clock."""
        self._delivered: dict[TrajectoryId, tuple[int, int]] = {}
        """(route number, tokens) of running responses that the server has."""
        self._unreported: dict[TrajectoryId, int] = {}
        """Tokens of running responses that the server has, where the number has changed since the last report."""

    async def took_over(self) -> bool:
        """Whether the engine was taken over from a lost actor, and so has weights loaded."""
        return self._took_over

    async def route(self, server: Any, items: tuple[RouteItem, ...]) -> None:
        """Start sampling trajectories, after the tokens that the server has. Trajectories that are no longer live are
        skipped; a complete response is reported as sampled."""
        requests: list[Request | SampledTokens] = await call_actor(
            server, "requests", items, timeout_s=self._call_s, actor_name="server"
        )

        def submit() -> list[SampledTokens]:
            if self._asleep:
                raise ProtocolViolation(f"{self._instance} sleeps, and is to sample {len(requests)} trajectories")
            serves, pending = self._engine.version, [r for r in requests if isinstance(r, Request)]
            for request in pending:
                min_version = request.version
                if (
                    min_version is None
                    or serves < min_version
                    or (is_evaluation(request.trajectory) and serves != min_version)
                ):
                    raise ProtocolViolation(
                        f"{self._instance} serves version {serves}, trajectory {request.trajectory} needs {min_version}"
                    )
            self._engine.submit(pending)
            return [r for r in requests if isinstance(r, SampledTokens)]

        # Added on the event loop, as `next_events` takes them: between two threads one could be lost.
        self._undelivered_turns += await self._command(submit)
        if self._drafts:
            await self._learn(server)

    async def interrupt(self, server: Any, trajectories: tuple[TrajectoryId, ...]) -> list[RequestOutcome]:
        """Stop sampling trajectories, and send their tokens to the server. If sending fails, the tokens are sent with
        the next delivery or the next call."""
        self._stopped += await self._command(self._engine.interrupt, trajectories)
        outcomes = await self._deliver(server, self._stopped)
        self._stopped = []
        return outcomes

    async def flush(self, server: Any) -> None:
        """Send the tokens of running trajectories to the server. Sampling goes on."""
        await self._spool(server)

    async def abort(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        """Stop sampling trajectories, and discard their tokens."""
        await self._command(self._engine.abort, trajectories)

    async def set_draft_length(self, length: int) -> None:
        """Set the maximum number of draft tokens per request in one decode step."""
        await self._command(self._engine.set_draft_length, length)
        self._requested_s = -math.inf  # what there is to draft from is asked for at once

    async def logprobs(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Return the logprobs of tokens[1:], nats, under the engine's current weights."""
        return await self._command(self._engine.logprobs, tokens)

    async def pull(self, published: PublishedWeights, path: str) -> WeightCheck:
        """Load published weights, then check the weights and the logprobs computed with them. Idempotent. Tokens are
        delivered only after the check has passed. Raises WeightsRefused if the engine cannot load them."""
        pulling = self._pulling = asyncio.ensure_future(self._command(self._load, published, path))
        try:
            check: WeightCheck = await asyncio.shield(pulling)
        except ActorLost:
            raise
        except Exception as error:
            self._refused = f"{self._instance} cannot load version {published.version}: {error}"
            raise WeightsRefused(self._refused, self._instance) from error
        finally:
            if self._pulling is pulling and pulling.done():
                self._pulling = None
        return check

    def _load(self, published: PublishedWeights, path: str) -> WeightCheck:
        loaded = self._engine.load(published.version, Path(path))
        self._asleep = False
        if published.probe:
            loaded = dataclasses.replace(loaded, probe=self._engine.logprobs(published.probe))
        check = published.check(self._instance, loaded)
        if check.refused:
            self._refused = f"{self._instance} is out of service: {check.refused}"
            self._engine.reset(self._instance)  # nothing is sampled any more
        return check

    async def sleep(self) -> None:
        """Free the engine's device until the next pull. Raises ProtocolViolation if the engine has requests."""
        await self._command(self._engine.sleep)
        self._asleep = True

    async def _may_deliver(self, timeout_s: float) -> bool:
        """Return True if the weights under which tokens were sampled are checked. Waits up to `timeout_s` for a
        pull."""
        if (pulling := self._pulling) is not None:
            await asyncio.wait({pulling}, timeout=timeout_s)
            if pulling.done() and self._pulling is pulling:
                self._pulling = None
        return self._pulling is None and not self._refused

    async def next_events(self, server: Any, timeout_s: float) -> list[RequestOutcome]:
        """Wait up to `timeout_s` for requests to end. Returns their outcomes once the server has their tokens. When
        tokens of running requests are due for delivery, delivers those and returns no outcomes."""
        if not await self._may_deliver(timeout_s):
            if self._refused:
                await asyncio.sleep(timeout_s)
            return []
        if self._spool_is_due() and not self._undelivered and not self._undelivered_turns:
            await self._spool(server)
            return []
        if self._drafts and asyncio.get_running_loop().time() >= self._requested_s + LEARN_S:
            await self._learn(server)
        if not self._undelivered and not self._undelivered_turns:
            loop = asyncio.get_running_loop()
            self._undelivered = await loop.run_in_executor(self._waiting, self._engine.events, timeout_s)
            if not await self._may_deliver(timeout_s):
                return []
        turns, self._undelivered_turns = self._undelivered_turns, []
        self._undelivered += turns
        outcomes = await self._deliver(server, self._undelivered)
        self._undelivered = []
        return outcomes

    async def report(self) -> EngineLoad:
        """Return the engine's current load, and the tokens that reached the server since the last report."""
        load = await asyncio.to_thread(self._engine.load_statistics)  # it may wait for the engine's lock
        delivered, self._unreported = tuple(self._unreported.items()), {}
        return dataclasses.replace(load, delivered=delivered)

    async def close(self) -> None:
        self._closed = True
        self._commands.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)
        engine_handover.unregister(self._engine)
        await asyncio.to_thread(self._engine.close)

    def _spool_is_due(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._spooled_s is None:
            self._spooled_s = now
        return 0 < self._spool_s <= now - self._spooled_s

    async def _spool(self, server: Any) -> None:
        """Send the tokens of running responses to the server."""
        loop = asyncio.get_running_loop()
        self._spooled_s = loop.time()
        running: list[SampledTokens] = await loop.run_in_executor(self._waiting, self._engine.peek)
        totals = await self._send(server, [s for s in running if _end(s) > s.start])
        self._delivered = {
            s.trajectory: (s.route_number, totals[s.trajectory]) for s in running if s.trajectory in totals
        }
        self._unreported |= totals

    async def _learn(self, server: Any) -> None:
        """Fetch responses to the prompts that the engine drafts for, and give them to it. A server that is lost or late
        fails no command: drafts change nothing that is sampled."""
        self._requested_s = asyncio.get_running_loop().time()
        running: tuple[TrajectoryId, ...] = await asyncio.to_thread(self._engine.drafting_trajectories)
        if not running:
            return
        try:
            responses: NewResponses = await call_actor(
                server, "other_responses", running, self._sent, timeout_s=self._call_s, actor_name="server"
            )
        except ActorLost:
            return
        self._sent = responses.sent
        self._engine.add_draft_responses(responses.responses)

    async def _deliver(
        self, server: Any, ended: list[SampledTokens] | list[SampledTokens | Failed]
    ) -> list[RequestOutcome]:
        totals = await self._send(server, [e for e in ended if isinstance(e, SampledTokens)])
        outcomes = []
        for e in ended:
            tokens, error = totals.get(e.trajectory, 0), e.error if isinstance(e, Failed) else ""
            if isinstance(e, SampledTokens) and e.trajectory in totals and tokens < _end(e):
                error = _not_finite(e) or f"the trajectory server has {tokens} of its first {e.start} tokens"
            drafted, accepted = (e.drafted_tokens, e.accepted_tokens) if isinstance(e, SampledTokens) else (0, 0)
            outcome = RequestOutcome(
                trajectory=e.trajectory,
                route_number=e.route_number,
                tokens=tokens,
                error=error,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
            )
            outcomes.append(outcome)
        return outcomes

    async def _send(self, server: Any, sampled: list[SampledTokens]) -> dict[TrajectoryId, int]:
        """Send the tokens that the server does not have yet. Returns its number of tokens of each trajectory, but for
        those that have ended or are routed elsewhere."""
        if not sampled:
            return {}
        if not await self._may_deliver(self._call_s):
            raise WeightsRefused(self._refused or f"{self._instance} is loading weights", self._instance)

        async def deliver(parts: list[SampledTokens]) -> dict[TrajectoryId, int]:
            totals: dict[TrajectoryId, int] = await call_actor(
                server, "deliver", parts, timeout_s=self._call_s, actor_name="server"
            )
            return totals

        parts = [_after(s, self._delivered.get(s.trajectory)) for s in sampled]
        totals = await deliver(parts)
        short = [s for s, part in zip(sampled, parts, strict=True) if totals.get(s.trajectory, part.start) < part.start]
        return totals | await deliver(short) if short else totals  # it has less than it once said: all of it again

    async def _command(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the thread of commands. Raises ActorLost if this actor is closed."""
        if self._closed:
            raise ActorLost(f"{self._instance} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._commands, function, *args)


def _end(sampled: SampledTokens) -> int:
    """Return the number of tokens of the response up to the last sampled one."""
    return sampled.start + sum(len(s.tokens) for s in sampled.segments)


def _not_finite(sampled: SampledTokens) -> str:
    """Return an error text for the first token whose logprob is infinite or NaN; empty if there is none."""
    start = sampled.start
    for segment in sampled.segments:
        if (index := segment.num_finite) < len(segment.tokens):
            return (
                f"token {start + index} of the response has a logprob of {segment.logprobs[index]} under version "
                f"{segment.version} on {segment.instance}; every sampled token needs a finite one"
            )
        start += len(segment.tokens)
    return ""


def _after(sampled: SampledTokens, delivered: tuple[int, int] | None) -> SampledTokens:
    """Drop the tokens that the server has. delivered: (route number, tokens) of the latest delivery; one of another
    route number does not count."""
    if delivered is None or delivered[0] != sampled.route_number or delivered[1] <= sampled.start:
        return sampled
    skip = delivered[1] - sampled.start
    segments = []
    for segment in sampled.segments:
        undelivered = segment.drop_first(min(skip, len(segment.tokens)))
        skip -= len(segment.tokens) - len(undelivered.tokens)
        if len(undelivered.tokens):
            segments.append(undelivered)
    return dataclasses.replace(sampled, start=min(delivered[1], _end(sampled)), segments=tuple(segments))

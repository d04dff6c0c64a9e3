"""The rollout instance: an actor around one engine in one worker process.

Invariants:
- A trajectory's tokens reach the trajectory server before the driver learns that it was sampled.
- A response that has ended is never continued, even if its instance was lost before the driver learned of the end.
- A request is never sampled under a version older than its Route command names, and a request of an evaluation only
  under that version.
- Tokens that were sampled under unchecked weights are never delivered.

Every delivery_interval_s seconds the server gets the tokens of running requests: if this process is lost, other
instances continue from there. Each delivery starts where the one before it ended.
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
from staleflow.tasks.actors.draft_corpus import NewResponses, ResponseKey
from staleflow.tasks.actors.parameter_server import PublishedWeights
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.engines.base import Engine, EngineLoad, FailedRequest, Request, SampledTokens
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.engines.engine_settings import EngineSettings

T = TypeVar("T")

DRAFT_FETCH_S = 1.0
"""Seconds between two fetches of other responses to draft from, while the engine drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """The result of a request, as ids and lengths for the driver. error: empty if the request succeeded."""

    trajectory: TrajectoryId
    route_number: int
    num_tokens: int
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
        delivery_interval_s: float,
        fetches_drafts: bool = False,
        run_folder: str = "",
        resumed: bool = False,
    ):
        """Build the engine, or take over the engine of an actor that was lost.

        Args:
            delivery_interval_s: seconds between two deliveries of running responses' tokens; 0 for none.
            fetches_drafts: whether responses for the engine to draft from are fetched from the server.
            run_folder: the run's folder; if set, the engine survives this actor if that is dropped without being
                closed.
            resumed: whether such an engine may be in this process.
        """
        self._instance = instance
        self._call_s = call_s
        self._fetches_drafts = fetches_drafts
        self._known_response_keys: frozenset[ResponseKey] = frozenset()
        """Other responses to the prompts of running requests that the engine has."""
        self._drafts_fetched_s = 0.0
        """Time of the last fetch of other responses, on the loop's clock."""
        existing_engine = engine_handover.take_over(run_folder if resumed else "", engine_settings, instance)
        self._took_over = existing_engine is not None
        self._engine: Engine = existing_engine or build_engine(engine_settings, instance, threads)
        if run_folder:
            engine_handover.register(run_folder, engine_settings, self._engine, self)
        self._command_thread = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._event_thread = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._closed = False
        self._asleep = False
        self._latest_pull: asyncio.Future[WeightCheck] | None = None
        """The pull that began last: tokens sampled while it runs are delivered once the weights are checked."""
        self._refusal_reason = ""
        """Why no more tokens are delivered; empty while they are."""
        self._undelivered_events: list[SampledTokens | FailedRequest] = []
        self._interrupted: list[SampledTokens] = []
        """Interrupted requests that are not yet with the server."""
        self._not_sampled: list[SampledTokens | FailedRequest] = []
        """Requests that were routed here and had ended already, or could not be sampled."""
        self._delivery_interval_s = delivery_interval_s
        self._last_delivery_s: float | None = None
        """Time of the last delivery of running responses' tokens, on the loop's clock."""
        self._delivered_tokens: dict[TrajectoryId, tuple[int, int]] = {}
        """(route number, tokens) of running responses that the server has."""
        self._unreported_tokens: dict[TrajectoryId, int] = {}
        """Tokens of running responses that the server has, where the number has changed since the last report."""

    async def took_over(self) -> bool:
        """Whether the engine was taken over from a lost actor, and so has weights loaded."""
        return self._took_over

    async def route(self, server: Any, items: tuple[RouteItem, ...]) -> None:
        """Start sampling trajectories, after the tokens that the server has. Trajectories that are no longer live are
        skipped; a complete response is reported as sampled, and an evaluation's request for a version that the engine
        no longer serves as failed."""
        requests: list[Request | SampledTokens] = await call_actor(
            server, "record_routes", items, timeout_s=self._call_s, actor_name="server"
        )

        def submit() -> list[SampledTokens | FailedRequest]:
            if self._asleep:
                raise ProtocolViolation(f"{self._instance} sleeps, but was sent {len(requests)} trajectories to sample")
            engine_version = self._engine.version
            sampling_requests: list[Request] = []
            not_sampled: list[SampledTokens | FailedRequest] = [r for r in requests if isinstance(r, SampledTokens)]
            for request in requests:
                if isinstance(request, SampledTokens):
                    continue
                mismatch = (
                    f"{self._instance} serves version {engine_version}, trajectory {request.trajectory} needs "
                    f"{request.version}"
                )
                if request.version is None or engine_version < request.version:
                    raise ProtocolViolation(mismatch)
                if is_evaluation(request.trajectory) and engine_version != request.version:
                    # Its pull had to load a newer version: the coordinator abandons the evaluation.
                    not_sampled.append(
                        FailedRequest(trajectory=request.trajectory, route_number=request.route_number, error=mismatch)
                    )
                else:
                    sampling_requests.append(request)
            self._engine.submit(sampling_requests)
            return not_sampled

        not_sampled = await self._command(submit)
        # Added on the event loop without waiting in between: `next_events` replaces the list while a call waits.
        self._not_sampled += not_sampled
        if self._fetches_drafts:
            await self._fetch_draft_responses(server)

    async def interrupt(self, server: Any, trajectories: tuple[TrajectoryId, ...]) -> list[RequestOutcome]:
        """Stop sampling trajectories, and send their tokens to the server. If sending fails, the next interrupt sends
        and reports them too."""
        outputs = await self._command(self._engine.interrupt, trajectories)
        self._interrupted = outputs = [*self._interrupted, *outputs]
        outcomes = await self._deliver(server, outputs)
        self._interrupted = self._interrupted[len(outputs) :]
        return outcomes

    async def flush(self, server: Any) -> None:
        """Send the tokens of running trajectories to the server. Sampling goes on."""
        await self._deliver_running(server)

    async def abort(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        """Stop sampling trajectories, and discard their tokens."""
        await self._command(self._engine.abort, trajectories)

    async def logprobs(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Return the logprobs of tokens[1:], nats, under the engine's current weights."""
        (scores,) = await self._command(self._engine.score, [tokens])
        return scores.logprobs

    async def pull(self, published: PublishedWeights, path: str) -> WeightCheck:
        """Load published weights, then check the weights and the logprobs computed with them. Idempotent. Tokens are
        delivered only after the check has passed. Raises WeightsRefused if the engine cannot load them."""
        self._latest_pull = asyncio.ensure_future(self._command(self._load, published, path))
        try:
            check: WeightCheck = await asyncio.shield(self._latest_pull)
        except ActorLost:
            raise
        except Exception as error:
            self._refusal_reason = f"{self._instance} cannot load version {published.version}: {error}"
            raise WeightsRefused(self._refusal_reason, self._instance) from error
        return check

    def _load(self, published: PublishedWeights, path: str) -> WeightCheck:
        load_result = self._engine.load(published.version, Path(path))
        self._asleep = False
        probe_tokens = published.probe_tokens
        probe_logprobs = self._engine.score([probe_tokens])[0].logprobs if probe_tokens else ()
        check = published.check(self._instance, load_result, probe_logprobs)
        if check.refused:
            self._refusal_reason = f"{self._instance} is out of service: {check.refused}"
            self._engine.reset(self._instance)  # it stops sampling
        return check

    async def sleep(self) -> None:
        """Free the engine's device until the next pull. Raises ProtocolViolation if the engine has requests."""
        await self._command(self._engine.sleep)
        self._asleep = True

    async def _may_deliver(self, timeout_s: float) -> bool:
        """Return True if the weights under which tokens were sampled are checked. Waits up to `timeout_s` for a pull,
        and for pulls that begin meanwhile."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self._latest_pull is not None and self._is_pulling and loop.time() < end_s:
            await asyncio.wait({self._latest_pull}, timeout=end_s - loop.time())
        return not self._is_pulling and not self._refusal_reason

    @property
    def _is_pulling(self) -> bool:
        return self._latest_pull is not None and not self._latest_pull.done()

    async def next_events(self, server: Any, timeout_s: float) -> list[RequestOutcome]:
        """Wait up to `timeout_s` for requests to end. Returns their outcomes once the server has their tokens. When
        tokens of running requests are due for delivery, delivers those and returns no outcomes."""
        if not await self._may_deliver(timeout_s):
            if self._refusal_reason:
                await asyncio.sleep(timeout_s)
            return []
        until_delivery_s = self._seconds_until_delivery()
        if until_delivery_s <= 0 and not self._undelivered_events and not self._not_sampled:
            await self._deliver_running(server)
            return []
        if self._fetches_drafts and asyncio.get_running_loop().time() >= self._drafts_fetched_s + DRAFT_FETCH_S:
            await self._fetch_draft_responses(server)
        if not self._undelivered_events and not self._not_sampled:
            loop, wait_s = asyncio.get_running_loop(), min(timeout_s, until_delivery_s)
            self._undelivered_events = await loop.run_in_executor(self._event_thread, self._engine.events, wait_s)
            if not await self._may_deliver(timeout_s):
                return []
        not_sampled, self._not_sampled = self._not_sampled, []
        self._undelivered_events += not_sampled
        outcomes = await self._deliver(server, self._undelivered_events)
        self._undelivered_events = []
        return outcomes

    async def report(self) -> EngineLoad:
        """Return the engine's current load, and the tokens that reached the server since the last report."""
        load = await asyncio.to_thread(self._engine.load_statistics)  # it may wait for the engine's lock
        delivered, self._unreported_tokens = tuple(self._unreported_tokens.items()), {}
        return dataclasses.replace(load, delivered=delivered)

    async def close(self) -> None:
        self._closed = True
        self._command_thread.shutdown(wait=False, cancel_futures=True)
        self._event_thread.shutdown(wait=False, cancel_futures=True)
        engine_handover.unregister(self._engine)
        await asyncio.to_thread(self._engine.close)

    def _seconds_until_delivery(self) -> float:
        """Return the seconds until running responses' tokens are due for delivery; infinity if they never are."""
        now = asyncio.get_running_loop().time()
        if self._last_delivery_s is None:
            self._last_delivery_s = now
        return self._last_delivery_s + self._delivery_interval_s - now if self._delivery_interval_s else math.inf

    async def _deliver_running(self, server: Any) -> None:
        """Send the tokens of running responses to the server. Does nothing while weights are loaded, which may take
        longer than a call."""
        loop = asyncio.get_running_loop()
        running: list[SampledTokens] = await loop.run_in_executor(self._event_thread, self._engine.peek)
        if self._is_pulling:
            return
        self._last_delivery_s = loop.time()
        num_tokens = await self._send(server, [s for s in running if _response_end(s) > s.start])
        self._delivered_tokens = {
            s.trajectory: (s.route_number, num_tokens[s.trajectory]) for s in running if s.trajectory in num_tokens
        }
        self._unreported_tokens |= num_tokens

    async def _fetch_draft_responses(self, server: Any) -> None:
        """Fetch responses to the prompts for which the engine drafts, and add them to the engine. A lost or slow server
        is ignored, because drafts never change the sampled tokens."""
        self._drafts_fetched_s = asyncio.get_running_loop().time()
        running: tuple[TrajectoryId, ...] = await asyncio.to_thread(self._engine.drafting_trajectories)
        if not running:
            return
        try:
            responses: NewResponses = await call_actor(
                server,
                "draft_responses",
                running,
                self._known_response_keys,
                timeout_s=self._call_s,
                actor_name="server",
            )
        except ActorLost:
            return
        self._known_response_keys = responses.known_keys
        self._engine.add_draft_responses(responses.responses)

    async def _deliver(
        self, server: Any, events: list[SampledTokens] | list[SampledTokens | FailedRequest]
    ) -> list[RequestOutcome]:
        num_tokens = await self._send(server, [event for event in events if isinstance(event, SampledTokens)])
        outcomes = []
        for e in events:
            tokens, error = num_tokens.get(e.trajectory, 0), e.error if isinstance(e, FailedRequest) else ""
            if isinstance(e, SampledTokens) and e.trajectory in num_tokens and tokens < _response_end(e):
                error = _non_finite_error(e) or f"the trajectory server has {tokens} of its first {e.start} tokens"
            drafted_tokens, accepted_tokens = (
                (e.drafted_tokens, e.accepted_tokens) if isinstance(e, SampledTokens) else (0, 0)
            )
            outcome = RequestOutcome(
                trajectory=e.trajectory,
                route_number=e.route_number,
                num_tokens=tokens,
                error=error,
                drafted_tokens=drafted_tokens,
                accepted_tokens=accepted_tokens,
            )
            outcomes.append(outcome)
        return outcomes

    async def _send(self, server: Any, sampled: list[SampledTokens]) -> dict[TrajectoryId, int]:
        """Send the tokens that the server does not have yet. Returns the server's number of tokens of each trajectory,
        except for those that have ended or are routed elsewhere."""
        if not sampled:
            return {}
        if not await self._may_deliver(self._call_s):
            raise WeightsRefused(self._refusal_reason or f"{self._instance} is loading weights", self._instance)

        async def deliver(tokens: list[SampledTokens]) -> dict[TrajectoryId, int]:
            num_tokens: dict[TrajectoryId, int] = await call_actor(
                server, "deliver", tokens, timeout_s=self._call_s, actor_name="server"
            )
            return num_tokens

        undelivered = [_drop_delivered(s, self._delivered_tokens.get(s.trajectory)) for s in sampled]
        num_tokens = await deliver(undelivered)
        # The server may have fewer tokens of a trajectory than it reported before: then send all of them again.
        incomplete = [
            s for s, u in zip(sampled, undelivered, strict=True) if num_tokens.get(s.trajectory, u.start) < u.start
        ]
        return num_tokens | await deliver(incomplete) if incomplete else num_tokens

    async def _command(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the thread of commands. Raises ActorLost if this actor is closed."""
        if self._closed:
            raise ActorLost(f"{self._instance} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._command_thread, function, *args)


def _response_end(sampled: SampledTokens) -> int:
    """Return the number of tokens of the response up to the last sampled one."""
    return sampled.start + sum(len(s.tokens) for s in sampled.segments)


def _non_finite_error(sampled: SampledTokens) -> str:
    """Return an error text for the first token whose logprob is infinite or NaN; empty if there is none."""
    start = sampled.start
    for segment in sampled.segments:
        if (index := segment.finite_prefix_length) < len(segment.tokens):
            return (
                f"token {start + index} of the response has a logprob of {segment.logprobs[index]} under version "
                f"{segment.version} on {segment.instance}; every sampled token needs a finite one"
            )
        start += len(segment.tokens)
    return ""


def _drop_delivered(sampled: SampledTokens, delivered: tuple[int, int] | None) -> SampledTokens:
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
    return dataclasses.replace(sampled, start=min(delivered[1], _response_end(sampled)), segments=tuple(segments))

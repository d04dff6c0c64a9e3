"""The rollout instance: one engine in one worker process, behind methods that only hand over and take.

Invariants: a trajectory's tokens are with the trajectory server before the driver hears that it was sampled; a response
that has ended is never continued, even if its instance was lost before the driver heard of the end; a request is never
sampled under a version older than its Route names (checked here, and not only decided elsewhere).
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stores.errors import ProtocolViolation
from stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from tasks.actors.calls import call
from tasks.engines.answering import answers
from tasks.engines.base import Engine, EngineLoad, EngineSettings, Failed, Loaded, Request, Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteItem:
    """A Route command as it travels."""

    trajectory: TrajectoryId
    epoch: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the driver hears of a request: ids and lengths. error empty: it was sampled."""

    trajectory: TrajectoryId
    epoch: int
    tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluated prompt: sampled token ids."""

    tokens: tuple[int, ...]


class RolloutInstance:
    """The Dask actor. All slow work runs in two threads of its own: one for commands, in order, one for waiting."""

    def __init__(
        self, engine_settings: EngineSettings, instance: InstanceId, threads: int, max_new_tokens: int, call_s: float
    ):
        self._instance = instance
        self._max_new_tokens = max_new_tokens
        self._call_s = call_s
        self._engine: Engine = engine_settings.build(instance, threads)
        self._commands = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._undelivered: list[Sampled | Failed] = []
        self._whole: list[Sampled] = []
        """Routed here, and found to have ended already."""

    async def route(self, server: Any, items: tuple[RouteItem, ...]) -> None:
        """Start sampling these, from the tokens the server holds. Trajectories that are no longer alive are left out;
        responses that are whole already are answered as sampled."""
        routed = tuple((i.trajectory, i.epoch) for i in items)
        payloads = await call(server, "payloads", routed, within_s=self._call_s, who="trajectory server")

        def submit() -> None:
            requests = []
            for item in items:
                if item.trajectory not in payloads:
                    continue
                if self._engine.version < item.version:
                    raise ProtocolViolation(
                        f"{self._instance} serves version {self._engine.version}, trajectory {item.trajectory} "
                        f"needs {item.version}"
                    )
                prompt, sampled, finish = payloads[item.trajectory]
                if finish is not FinishReason.UNFINISHED:
                    self._whole.append(
                        Sampled(trajectory=item.trajectory, epoch=item.epoch, segments=(), finish=finish)
                    )
                    continue
                requests.append(
                    Request(
                        trajectory=item.trajectory,
                        epoch=item.epoch,
                        tokens=(*prompt, *sampled),
                        max_new_tokens=self._max_new_tokens - len(sampled),
                        num_prior=len(sampled),
                    )
                )
            self._engine.submit(requests)

        await self._command(submit)

    async def interrupt(self, server: Any, trajectories: tuple[TrajectoryId, ...]) -> list[Outcome]:
        """Stop these, hand what they have to the server."""
        stopped: list[Sampled] = await self._command(self._engine.interrupt, trajectories)
        return await self._deliver(server, stopped)

    async def abort(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        """Stop these and forget them."""
        await self._command(self._engine.abort, trajectories)

    async def pull(self, version: PolicyVersion, path: str, probe: tuple[int, ...]) -> Loaded:
        """Load published weights, and say what they make of the probe's tokens; idempotent."""

        def load() -> Loaded:
            loaded = self._engine.load(version, Path(path))
            return dataclasses.replace(loaded, probe=self._engine.logprobs(probe) if probe else ())

        loaded: Loaded = await self._command(load)
        return loaded

    async def next_events(self, server: Any, timeout_s: float) -> list[Outcome]:
        """Long poll: what ended, as soon as something did; its tokens are with the server by then."""
        if not self._undelivered and not self._whole:
            loop = asyncio.get_running_loop()
            self._undelivered = await loop.run_in_executor(self._waiting, self._engine.events, timeout_s)
        whole, self._whole = self._whole, []
        self._undelivered += whole
        outcomes = await self._deliver(server, self._undelivered)
        self._undelivered = []
        return outcomes

    async def report(self) -> EngineLoad:
        """What the engine is doing."""
        return self._engine.load_statistics()

    async def evaluate(self, prompts: list[tuple[int, ...]], greedy: bool, deadline_s: float) -> list[Evaluated]:
        """Sample one response to each prompt with the present weights. Only while nothing else runs here."""

        def run() -> list[Evaluated]:
            found = answers(
                self._engine, prompts, max_new_tokens=self._max_new_tokens, greedy=greedy, deadline_s=deadline_s
            )
            return [Evaluated(tokens=tokens) for tokens in found]

        result: list[Evaluated] = await asyncio.get_running_loop().run_in_executor(self._waiting, run)
        return result

    async def close(self) -> None:
        self._commands.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    async def _deliver(self, server: Any, ended: list[Sampled] | list[Sampled | Failed]) -> list[Outcome]:
        sampled = [e for e in ended if isinstance(e, Sampled)]
        totals: dict[TrajectoryId, int] = {}
        if sampled:
            totals = await call(server, "deliver", sampled, within_s=self._call_s, who="trajectory server")
        return [
            Outcome(
                trajectory=e.trajectory,
                epoch=e.epoch,
                tokens=totals.get(e.trajectory, 0),
                error=e.error if isinstance(e, Failed) else "",
            )
            for e in ended
        ]

    async def _command(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._commands, function, *args)

"""A wrapper of any engine that records requests and results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import (
    Engine,
    EngineLoad,
    FailedRequest,
    LoadResult,
    PromptResponses,
    Request,
    SampledTokens,
    TokenScores,
)
from staleflow.tasks.engines.engine_settings import EngineSettings
from staleflow.tasks.settings.knobs import parameter

Ending = TypeVar("Ending", SampledTokens, SampledTokens | FailedRequest)
UNKNOWN = 2**31
"""More tokens than any response has."""


@dataclass(slots=True)
class InstanceLoad:
    """A load of weights during a request: tokens of its response before and after the load. If the request has ended
    since, its last tokens may be from either."""

    before: int
    after: int
    version: int


@dataclass(slots=True)
class Sampling:
    """A submitted request. seen: its first tokens as returned by peek while it ran."""

    request: Request
    version: int
    loads: list[InstanceLoad] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)


class WatchedEngine:
    """An engine that records requests and results. check: called with every request."""

    def __init__(self, engine: Engine, check: Callable[[Request], None]) -> None:
        self.engine = engine
        self._check = check
        self._listening = threading.Lock()
        self.cached_before = engine.load_statistics().cached_tokens
        self.sampling: dict[tuple[TrajectoryId, int], Sampling] = {}
        self.results: dict[tuple[TrajectoryId, int], SampledTokens] = {}

    @property
    def version(self) -> PolicyVersion:
        return self.engine.version

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check(request)
            self.sampling[request.trajectory, request.route_number] = Sampling(request, self.version)
        self.engine.submit(requests)

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        return self._gave(self.engine.interrupt(trajectories))

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        with self._listening:
            return self._gave(self.engine.events(timeout_s))

    def peek(self) -> list[SampledTokens]:
        seen = self.engine.peek()
        for item in seen:
            tokens = [int(t) for s in item.segments for t in s.tokens]
            sampling = self.sampling[item.trajectory, item.route_number]
            assert tokens[: len(sampling.seen)] == sampling.seen
            sampling.seen = tokens
        return seen

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self.engine.abort(trajectories)

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        latest = {trajectory: sampling for (trajectory, _), sampling in self.sampling.items()}
        loads = {t: InstanceLoad(before, UNKNOWN, version) for t, before in self.engine.load_statistics().progress}
        for trajectory, load in loads.items():
            latest[trajectory].loads.append(load)
        loaded = self.engine.load(version, weights)
        for trajectory, after in self.engine.load_statistics().progress:
            loads[trajectory].after = after
        return loaded

    def sleep(self) -> None:
        self.engine.sleep()

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        return self.engine.score(sequences, temperature)

    def load_statistics(self) -> EngineLoad:
        return self.engine.load_statistics()

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        return self.engine.drafting_trajectories()

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        self.engine.add_draft_responses(responses)

    def reset(self, instance: InstanceId) -> None:
        self.engine.reset(instance)

    def close(self) -> None:
        """Wait until no events are expected: the engine is used by the next plan."""
        with self._listening:
            pass

    def _gave(self, endings: list[Ending]) -> list[Ending]:
        for ending in endings:
            assert isinstance(ending, SampledTokens), ending
            assert (ending.trajectory, ending.route_number) not in self.results, "ended twice"
            self.results[ending.trajectory, ending.route_number] = ending
        return endings


@dataclass(frozen=True, kw_only=True)
class WatchedSettings(EngineSettings):
    """Settings that return an existing engine."""

    engine: WatchedEngine = parameter()

    def build(self, instance: InstanceId, threads: int) -> WatchedEngine:
        return self.engine

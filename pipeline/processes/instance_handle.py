"""The driver's view of a rollout instance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.engines.base import EngineLoad

COUNTS = ("prefilled_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
"""Fields of EngineLoad that are counted since start, and metrics of a step of the same names."""


@dataclass(slots=True)
class InstanceHandle:
    """The driver's view of a rollout instance. tasks: the tasks of its InstanceLink."""

    placed: PlacedActor
    index: int
    outbox: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    version: PolicyVersion = PolicyVersion(0)
    fetched_version: PolicyVersion | None = None
    """The version that it fetches while it pulls; else None."""
    is_loading: bool = False
    """Whether its engine loads weights, during which it samples nothing."""
    fingerprint: str = ""
    """Fingerprint of the weights it holds; empty until its first pull."""
    drift: float = 0.0
    """Largest difference of its probe's logprobs from the trainer's after the latest pull, nats."""
    assigned_s: float = 0.0
    """Seconds in which it had trajectories to sample."""
    busy_s: float = 0.0
    """Seconds in which its engine worked."""
    tokens_sampled: int = 0
    initial_load: EngineLoad | None = None
    """Its load in its first report; what it did before, such as an evaluation, does not count."""
    load: EngineLoad | None = None
    """Its load in its latest report."""

    @property
    def counts(self) -> dict[str, int]:
        """Token counts of its engine since the engine's start, by the names COUNTS, as last reported."""
        if self.initial_load is None or self.load is None:
            return dict.fromkeys(COUNTS, 0)
        return {name: getattr(self.load, name) - getattr(self.initial_load, name) for name in COUNTS}

    @property
    def kept_tokens(self) -> int:
        """KV tokens that its engine has cached for later turns, as last reported."""
        return self.load.kept_tokens if self.load else 0

    @property
    def id(self) -> InstanceId:
        return InstanceId(self.placed.name)

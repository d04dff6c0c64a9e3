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
    fetching: PolicyVersion | None = None
    """The version it is about to serve, while it pulls."""
    loading: bool = False
    """Whether its engine loads weights, which has a deadline of its own: it need not sample meanwhile."""
    fingerprint: str = ""
    """Fingerprint of the weights it holds; empty until its first pull."""
    drift: float = 0.0
    """Largest difference of its probe's logprobs from the trainer's after the latest pull, nats."""
    # Its idle share comes from these: seconds the coordinator had work on it, seconds its engine worked.
    assigned_s: float = 0.0
    busy_s: float = 0.0
    tokens_sampled: int = 0
    before: EngineLoad | None = None
    """Its load when the driver first asked: what it did until then, such as an evaluation, does not count."""
    load: EngineLoad | None = None
    """Its load as last reported."""

    @property
    def counts(self) -> dict[str, int]:
        """Token counts of its engine since the engine's start, by the names COUNTS, as last reported."""
        if self.before is None or self.load is None:
            return dict.fromkeys(COUNTS, 0)
        return {name: getattr(self.load, name) - getattr(self.before, name) for name in COUNTS}

    @property
    def kept_tokens(self) -> int:
        """KV tokens that its engine has cached for later turns, as last reported."""
        return self.load.kept_tokens if self.load else 0

    @property
    def id(self) -> InstanceId:
        return InstanceId(self.placed.name)

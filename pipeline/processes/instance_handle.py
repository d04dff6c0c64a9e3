"""The driver's view of a rollout instance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.engines.base import EngineLoad

TOKEN_COUNTS = ("prefilled_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
"""Fields of EngineLoad that are counted since start, and metrics of a step of the same names."""


@dataclass(slots=True)
class InstanceHandle:
    """The driver's view of a rollout instance. tasks: the tasks of its InstanceLink."""

    placed_actor: PlacedActor
    index: int
    has_taken_over_engine: bool = False
    """Whether its engine is that of an earlier start of the run, which may have other weights than the base model."""
    outbox: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    version: PolicyVersion = PolicyVersion(0)
    fetched_version: PolicyVersion | None = None
    """The version that the instance is fetching; None if it does not pull."""
    is_loading: bool = False
    """Whether its engine is loading weights, and so does not sample."""
    is_fetching_again: bool = False
    """Whether it waits to fetch weights again, because no host could send them; at most deadlines.start_s."""
    fingerprint: str = ""
    """Fingerprint of its engine's weights; empty until its first pull."""
    drift: float = 0.0
    """Mean difference between its logprobs and the trainer's on the probe after the latest pull, nats."""
    assigned_s: float = 0.0
    """Seconds in which it had trajectories to sample."""
    busy_s: float = 0.0
    """Seconds in which its engine worked."""
    tokens_sampled: int = 0
    initial_load: EngineLoad | None = None
    """Its load in its first report. Work before that is not counted."""
    load: EngineLoad | None = None
    """Its load in its latest report."""

    @property
    def token_counts(self) -> dict[str, int]:
        """Token counts of its engine since the engine's start, by the names TOKEN_COUNTS, as last reported."""
        if self.initial_load is None or self.load is None:
            return dict.fromkeys(TOKEN_COUNTS, 0)
        return {name: getattr(self.load, name) - getattr(self.initial_load, name) for name in TOKEN_COUNTS}

    @property
    def kept_tokens(self) -> int:
        """KV tokens that its engine has cached for later turns, as last reported."""
        return self.load.kept_tokens if self.load else 0

    @property
    def id(self) -> InstanceId:
        return InstanceId(self.placed_actor.name)

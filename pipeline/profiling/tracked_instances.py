"""Integrates running requests and KV tokens of each instance over time, from event to event. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.stores.trajectory import InstanceId, TrajectoryId

MEMORY_FULL = 0.85
"""Share of the KV cache above which an instance counts as full: routing leaves the rest for growth."""


@dataclass(slots=True)
class RunningTrajectory:
    """A trajectory on an instance, with the time of its routing and the instance's sums at that time; see
    `TrackedInstance`."""

    route_number: int
    routed_s: float
    tokens_at_route: int
    delivered_tokens: int
    """Tokens it keeps if its instance is lost."""
    tokens: float
    """As last reported."""
    steps: float
    """Decode steps of its instance at that report."""
    prompt_tokens: int
    running_s: float
    kv_s: float
    pull_s: float
    prefilled: float


class ReportSums(NamedTuple):
    """Sums of an instance at the time of a report, see `TrackedInstance`."""

    updated_s: float
    length_changes: int
    pulls: int
    running_s: float
    kv_s: float
    prefilled: float


@dataclass(slots=True)
class TrackedInstance:
    """An instance and its sums since it joined, up to `updated_s`. Between two reports each of its trajectories is
    assumed to gain one token per `token_s`, the rate of those that have ended."""

    name: InstanceId
    kv_capacity: int
    max_running: int
    draft_length: int
    updated_s: float
    length_changes: int = 0
    """How often `draft_length` has changed."""
    reported: ReportSums | None = None
    running: dict[TrajectoryId, RunningTrajectory] = field(default_factory=dict)
    kv_tokens: float = 0.0
    token_s: float = math.inf
    steps: float = 0.0
    prefilled: float = 0.0
    pulling: bool = False
    pulls: int = 0
    running_s: float = 0.0
    kv_s: float = 0.0
    pull_s: float = 0.0

    def advance_to(self, now: float) -> None:
        passed_s, self.updated_s = now - self.updated_s, now
        steps = 0.0 if self.pulling else passed_s / self.token_s
        gained = steps * len(self.running)
        self.running_s += passed_s * len(self.running)
        self.kv_s += passed_s * (self.kv_tokens + gained / 2)
        self.pull_s += passed_s * self.pulling
        self.steps += steps
        self.kv_tokens += gained

    def tokens(self, trajectory: RunningTrajectory) -> float:
        """Estimate the response tokens of a running trajectory at `updated_s`."""
        return trajectory.tokens + self.steps - trajectory.steps

    @property
    def full(self) -> bool:
        return len(self.running) >= self.max_running

    @property
    def out_of_memory(self) -> bool:
        count = len(self.running)
        if not count or self.full:
            return False
        return self.kv_tokens * (count + 1) / count > MEMORY_FULL * self.kv_capacity


@dataclass(slots=True)
class FleetCounts:
    """Sums over all instances, updated incrementally: subtract an instance before it changes, and add it afterwards."""

    instances: int = 0
    full: int = 0
    out_of_memory: int = 0
    pulling: int = 0
    running: int = 0
    kv_tokens: float = 0.0

    def count(self, instance: TrackedInstance, sign: int) -> None:
        self.instances += sign
        self.full += sign * instance.full
        self.out_of_memory += sign * instance.out_of_memory
        self.pulling += sign * instance.pulling
        self.running += sign * len(instance.running)
        self.kv_tokens += sign * instance.kv_tokens

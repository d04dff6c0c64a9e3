"""Integrates running requests and KV tokens of each instance over time, from event to event. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.stores.trajectory import InstanceId, TrajectoryId

FULL_MEMORY_SHARE = 0.85
"""Share of the KV cache above which an instance counts as full: routing leaves the rest for growth."""


@dataclass(slots=True)
class RunningTrajectory:
    """A trajectory on an instance, with the time of its routing and the instance's sums at that time; see
    `TrackedInstance`."""

    route_number: int
    routed_s: float
    tokens_at_route: int
    delivered_tokens: int
    """Tokens that it keeps if its instance is lost."""
    tokens: float
    """Number of its tokens in the latest report."""
    steps: float
    """Decode steps of its instance at that report."""
    prompt_tokens: int
    trajectory_seconds: float
    kv_token_seconds: float
    pull_s: float
    prefilled_tokens: float


class ReportSums(NamedTuple):
    """Sums of an instance at the time of a report, see `TrackedInstance`."""

    updated_s: float
    num_length_changes: int
    num_pulls: int
    trajectory_seconds: float
    kv_token_seconds: float
    prefilled_tokens: float


@dataclass(slots=True)
class TrackedInstance:
    """An instance and its sums since it joined, up to `updated_s`. Between two reports each of its trajectories is
    assumed to gain one token per `token_s`, the rate of those that have ended."""

    name: InstanceId
    kv_capacity: int
    max_running: int
    draft_length: int
    updated_s: float
    num_length_changes: int = 0
    """Number of times that `draft_length` has changed."""
    last_report: ReportSums | None = None
    running: dict[TrajectoryId, RunningTrajectory] = field(default_factory=dict)
    kv_tokens: float = 0.0
    token_s: float = math.inf
    steps: float = 0.0
    prefilled_tokens: float = 0.0
    is_pulling: bool = False
    num_pulls: int = 0
    trajectory_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    pull_s: float = 0.0

    def advance_to(self, now: float) -> None:
        """Add the time up to `now` to the sums."""
        passed_s, self.updated_s = now - self.updated_s, now
        steps = 0.0 if self.is_pulling else passed_s / self.token_s
        new_tokens = steps * len(self.running)
        self.trajectory_seconds += passed_s * len(self.running)
        self.kv_token_seconds += passed_s * (self.kv_tokens + new_tokens / 2)
        self.pull_s += passed_s * self.is_pulling
        self.steps += steps
        self.kv_tokens += new_tokens

    def estimate_tokens(self, trajectory: RunningTrajectory) -> float:
        """Estimate the response tokens of a running trajectory at `updated_s`."""
        return trajectory.tokens + self.steps - trajectory.steps

    @property
    def is_full(self) -> bool:
        """Whether it runs as many trajectories as it may."""
        return len(self.running) >= self.max_running

    @property
    def is_out_of_memory(self) -> bool:
        """Whether another trajectory of mean size would not fit into its KV cache."""
        count = len(self.running)
        if not count or self.is_full:
            return False
        return self.kv_tokens * (count + 1) / count > FULL_MEMORY_SHARE * self.kv_capacity


@dataclass(slots=True)
class FleetCounts:
    """Sums over all instances, updated incrementally: subtract an instance before it changes, and add it afterwards."""

    num_instances: int = 0
    num_full: int = 0
    num_out_of_memory: int = 0
    num_pulling: int = 0
    num_running: int = 0
    kv_tokens: float = 0.0

    def add(self, instance: TrackedInstance, sign: int) -> None:
        """Add an instance (sign 1), or subtract it (sign -1)."""
        self.num_instances += sign
        self.num_full += sign * instance.is_full
        self.num_out_of_memory += sign * instance.is_out_of_memory
        self.num_pulling += sign * instance.is_pulling
        self.num_running += sign * len(instance.running)
        self.kv_tokens += sign * instance.kv_tokens

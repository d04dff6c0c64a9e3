"""What instances run and hold, between one event and the next. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.stores.trajectory import InstanceId, TrajectoryId

MEMORY_FULL = 0.85
"""Share of the KV cache above which an instance's next trajectory, of mean size, would not fit once it has grown:
routing leaves that much free."""


@dataclass(slots=True)
class Sampling:
    """A trajectory on an instance: what was known of both when it was routed there."""

    route_number: int
    since: float
    tokens_before: int
    delivered_tokens: int
    """Tokens it keeps if its instance is lost."""
    tokens: float
    """As last reported."""
    steps: float
    """Its instance's steps then."""
    prompt_tokens: int
    running_s: float
    kv_s: float
    pull_s: float
    prefilled: float


class AtReport(NamedTuple):
    """An instance and its sums at a report."""

    at: float
    told: int
    pulls: int
    running_s: float
    kv_s: float
    prefilled: float


@dataclass(slots=True)
class TrackedInstance:
    """An instance and its sums since it joined. at: when they were last brought up to date. Between two reports each of
    its trajectories is taken to gain tokens as those did that have ended."""

    name: InstanceId
    kv_capacity: int
    max_running: int
    draft_length: int
    at: float
    told: int = 0
    """How often `draft_length` has changed."""
    reported: AtReport | None = None
    running: dict[TrajectoryId, Sampling] = field(default_factory=dict)
    kv_tokens: float = 0.0
    token_s: float = math.inf
    steps: float = 0.0
    prefilled: float = 0.0
    pulling: bool = False
    pulls: int = 0
    running_s: float = 0.0
    kv_s: float = 0.0
    pull_s: float = 0.0

    def pass_to(self, now: float) -> None:
        passed_s, self.at = now - self.at, now
        steps = 0.0 if self.pulling else passed_s / self.token_s
        gained = steps * len(self.running)
        self.running_s += passed_s * len(self.running)
        self.kv_s += passed_s * (self.kv_tokens + gained / 2)
        self.pull_s += passed_s * self.pulling
        self.steps += steps
        self.kv_tokens += gained

    def tokens(self, held: Sampling) -> float:
        """Tokens of a trajectory it runs, by now."""
        return held.tokens + self.steps - held.steps

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
    """Counts over all instances, kept as each changes."""

    instances: int = 0
    full: int = 0
    out_of_memory: int = 0
    idle: int = 0
    pulling: int = 0
    running: int = 0
    kv_tokens: float = 0.0

    def count(self, one: TrackedInstance, sign: int) -> None:
        self.instances += sign
        self.full += sign * one.full
        self.out_of_memory += sign * one.out_of_memory
        self.idle += sign * (not one.running)
        self.pulling += sign * one.pulling
        self.running += sign * len(one.running)
        self.kv_tokens += sign * one.kv_tokens

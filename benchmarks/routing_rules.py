"""Routing rules to compare the default with: a job names them as users' rules, benchmarks.routing_rules:LeastRequests.

None wins over `deadline` by more than noise (docs/strategies.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from staleflow import Candidate, Loads, knob
from staleflow.pipeline.strategies.routing import BoolArray
from staleflow.tasks.emulation.cost_model import CostModel

ROUTING_RULES = {
    "random": "benchmarks.routing_rules:Random",
    "least_requests": "benchmarks.routing_rules:LeastRequests",
    "throughput_optimal": "benchmarks.routing_rules:ThroughputOptimal",
}
"""What a job file calls them, by their names in tables."""


@dataclass(frozen=True)
class Random:
    """A random instance."""

    rng: np.random.Generator

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int:
        return int(self.rng.choice(np.flatnonzero(fitting)))


@dataclass(frozen=True)
class LeastRequests:
    """The instance with the fewest running trajectories; ties go to the first."""

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int:
        return int(np.where(fitting, loads.running, np.inf).argmin())


@dataclass(frozen=True)
class ThroughputOptimal:
    """The rule of StaleFlow's authors (arXiv 2601.12784): the instance whose throughput gains most; declines if the
    gain is below mu times that of an empty instance."""

    cost: CostModel
    mu: float = knob(0.1, "least throughput gain, as a share of an empty instance's gain", low=0, high=1)

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        running, kv_tokens = loads.running, loads.kv_tokens
        gains = (running + 1) / self.cost.step_s_by_instance(running + 1, kv_tokens + work.kv_tokens)
        gains = np.where(fitting, gains - running / self.cost.step_s_by_instance(running, kv_tokens), -np.inf)
        best = int(gains.argmax())
        least = self.mu / self.cost.step_s(1, work.kv_tokens)
        return best if running[best] == 0 or gains[best] >= least else None

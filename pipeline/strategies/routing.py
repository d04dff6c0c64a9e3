"""Which instance samples a trajectory. Each rule takes the instances that may serve it and picks one, or declines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.cost import CostModel
from stores.trajectory import InstanceId


class Candidate(Protocol):
    """What a routing rule may see of an instance that has room and an admissible version."""

    @property
    def instance(self) -> InstanceId: ...
    @property
    def num_running(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...


class Routing(Protocol):
    """Decides on the speculative state; never modifies it. `candidates` is not empty."""

    def choose(self, needed_kv_tokens: int, candidates: Sequence[Candidate]) -> InstanceId | None: ...


class RoundRobin:
    """Each instance in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, needed_kv_tokens: int, candidates: Sequence[Candidate]) -> InstanceId | None:
        self._turn += 1
        return candidates[self._turn % len(candidates)].instance


class LeastRequests:
    """The instance with the fewest running trajectories; the first of equals."""

    def choose(self, needed_kv_tokens: int, candidates: Sequence[Candidate]) -> InstanceId | None:
        return min(candidates, key=lambda c: c.num_running).instance


class ThroughputOptimal:
    """The instance whose throughput gains most; declines when that gain is below mu times an empty instance's.

    Declined work stays in the queue, where it can still go to any instance and to a newer version.
    """

    def __init__(self, cost: CostModel, mu: float) -> None:
        self._cost = cost
        self._mu = mu

    def choose(self, needed_kv_tokens: int, candidates: Sequence[Candidate]) -> InstanceId | None:
        def gain(candidate: Candidate) -> float:
            return self._cost.marginal_gain(candidate.num_running, candidate.kv_tokens, needed_kv_tokens)

        best = max(candidates, key=gain)
        worth_it = best.num_running == 0 or gain(best) >= self._mu * self._cost.marginal_gain(0, 0, needed_kv_tokens)
        return best.instance if worth_it else None


ROUTING_NAMES = ("round_robin", "least_requests", "throughput_optimal")


def make_routing(name: str, cost: CostModel, mu: float) -> Routing:
    """The routing rule called `name`."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_requests":
            return LeastRequests()
        case "throughput_optimal":
            return ThroughputOptimal(cost, mu)
        case _:
            raise ValueError(f"no routing rule {name!r}; there are {', '.join(ROUTING_NAMES)}")

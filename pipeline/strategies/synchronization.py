"""When an instance pulls new weights. A pull interrupts what it runs, whose contexts are then prefilled again; not
pulling keeps it from work that may only start under a newer version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tasks.engines.cost_model import CostModel
from tasks.knobs import knob
from tasks.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingInstance:
    """An instance that serves an older version than the published one."""

    lag: int
    """Published version minus the one it serves, >= 1."""
    num_running: int
    max_running: int
    kv_tokens: int
    fed: int
    """How many more trajectories it would be given at the version it serves."""
    fed_if_pulled: int
    """And how many if it had the new version."""
    added_kv_tokens: float
    """KV tokens that each of these would bring."""
    interval_s: float
    """Seconds between published versions, as last seen."""
    pull_s: float
    """Seconds that loading new weights takes, as last seen; 0 before the first."""


class Synchronization(Protocol):
    @property
    def weighs(self) -> bool:
        """Whether it looks at `fed_if_pulled`: then it is worth working out."""
        ...

    def should_pull(self, instance: LaggingInstance) -> bool: ...


SYNCHRONIZATION: Registry[Synchronization] = Registry(
    "synchronization rule", "rollout.synchronization", contract=Synchronization
)
"""A rule may ask for `cost`, the cost model; without prefill if a pull interrupts nothing."""


@SYNCHRONIZATION.register("greedy")
class Greedy:
    """As soon as it lags."""

    weighs = False

    def should_pull(self, instance: LaggingInstance) -> bool:
        return True


@SYNCHRONIZATION.register("status")
@dataclass(frozen=True, slots=True)
class Status:
    """When it can no longer be fed at its version and its load has drained below a share of its capacity."""

    load_threshold: float = knob(0.5, "status: share of max_running below which an instance may pull", low=0, high=1)

    weighs = False

    def should_pull(self, instance: LaggingInstance) -> bool:
        return not instance.fed and instance.num_running <= self.load_threshold * instance.max_running


@SYNCHRONIZATION.register("hypothesis")
@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Suppose it had the new version: pull when what it would be fed then is worth the interruption.

    Gained: the rise in throughput, for as long as the next version takes to come. Lost: what it decodes now, for the
    seconds that loading and prefilling its contexts again take. Waiting makes both sides change: while it drains, less
    has to be prefilled and more is gained.
    """

    cost: CostModel

    weighs = True

    def should_pull(self, instance: LaggingInstance) -> bool:
        if not instance.num_running:
            return True  # nothing is interrupted
        now = self._rate(instance, instance.fed)
        then = self._rate(instance, instance.fed_if_pulled)
        stalled_s = instance.pull_s + self.cost.prefill * instance.kv_tokens
        return then > now and (then - now) * instance.interval_s >= now * stalled_s

    def _rate(self, instance: LaggingInstance, fed: int) -> float:
        """Tokens per second with `fed` more trajectories."""
        kv_tokens = instance.kv_tokens + fed * instance.added_kv_tokens
        return self.cost.throughput(instance.num_running + fed, kv_tokens)

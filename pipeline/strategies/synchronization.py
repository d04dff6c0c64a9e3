"""Synchronization rules: when an instance pulls new weights. A pull interrupts its running trajectories, whose contexts
are prefilled again; without one, it gets no work that may only start under a newer version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingInstance:
    """An instance that serves an older version than the published one."""

    lag: int
    """Published version minus the one it serves, >= 1."""
    num_running: int
    max_running: int
    kv_tokens: int
    fed: int
    """Number of trajectories that would be routed to it at the version it serves."""
    num_added_if_pulled: int
    """Number of trajectories that would be routed to it if it had the new version."""
    added_kv_tokens: float
    """KV tokens that each of these would add."""
    interval_s: float
    """Seconds between published versions, as last measured."""
    pull_s: float
    """Seconds to load new weights, as last measured; 0 before the first pull."""


class Synchronization(RegistryEntry, ABC):
    """A synchronization rule."""

    __slots__ = ()
    weighs = False
    """Whether the rule reads `num_added_if_pulled`; otherwise it is not computed."""

    @abstractmethod
    def should_pull(self, instance: LaggingInstance) -> bool:
        """Whether an instance pulls the published version now."""


SYNCHRONIZATION: Registry[Synchronization] = Registry(
    "synchronization rule", "rollout.synchronization", Synchronization
)
"""A rule may have the parameter `cost`, the cost model; without prefill if a pull interrupts nothing."""


@SYNCHRONIZATION.register("greedy")
@dataclass(frozen=True, slots=True)
class Greedy(Synchronization):
    """Pull as soon as the instance lags."""

    def should_pull(self, instance: LaggingInstance) -> bool:
        return True


@SYNCHRONIZATION.register("status")
@dataclass(frozen=True, slots=True)
class Status(Synchronization):
    """Pull when the instance gets no more work at its version and its load is below a share of its capacity."""

    load_threshold: float = knob(
        0.5, "largest load at which an instance may pull, as a share of max_running", low=0, high=1
    )

    def should_pull(self, instance: LaggingInstance) -> bool:
        return not instance.fed and instance.num_running <= self.load_threshold * instance.max_running


@SYNCHRONIZATION.register("hypothesis")
@dataclass(frozen=True, slots=True)
class Hypothesis(Synchronization):
    """Pull when the work that the new version would bring is worth the interruption.

    Gain: the rise in throughput, until the next version is due. Loss: the present throughput, for the seconds of
    loading and of prefilling the contexts again. Both change with time: as the instance drains, less has to be
    prefilled and more is gained.
    """

    cost: CostModel = parameter()

    weighs = True

    def should_pull(self, instance: LaggingInstance) -> bool:
        if not instance.num_running:
            return True  # nothing is interrupted
        now = self._rate(instance, instance.fed)
        then = self._rate(instance, instance.num_added_if_pulled)
        stalled_s = instance.pull_s + self.cost.prefill * instance.kv_tokens
        return then > now and (then - now) * instance.interval_s >= now * stalled_s

    def _rate(self, instance: LaggingInstance, fed: int) -> float:
        """Throughput in tokens/s with `fed` more trajectories."""
        kv_tokens = instance.kv_tokens + fed * instance.added_kv_tokens
        return self.cost.throughput(instance.num_running + fed, kv_tokens)

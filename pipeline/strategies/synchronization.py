"""Synchronization rules: when a rollout instance pulls new weights.

A pull interrupts the instance's running trajectories, whose contexts are prefilled again. Until it pulls, it cannot be
given work that requires a newer version.
"""

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
    """Published version minus the version it serves, >= 1."""
    num_running: int
    max_running: int
    kv_tokens: int
    num_added_without_pull: int
    """Number of trajectories that would be routed to it if it kept its version."""
    num_added_if_pulled: int
    """Number of trajectories that would be routed to it if it had the new version."""
    added_kv_tokens: float
    """KV tokens that each added trajectory would use."""
    interval_s: float
    """Seconds between published versions, as last measured."""
    pull_s: float
    """Seconds to load new weights, as last measured; 0 before the first pull."""


class Synchronization(RegistryEntry, ABC):
    """A synchronization rule."""

    __slots__ = ()
    needs_added_if_pulled = False
    """Whether the rule reads `num_added_if_pulled`; otherwise it is not computed."""

    @abstractmethod
    def should_pull(self, instance: LaggingInstance) -> bool:
        """Whether an instance should pull the published version now."""


SYNCHRONIZATION: Registry[Synchronization] = Registry(
    "synchronization rule", "rollout.synchronization", Synchronization
)
"""Rules may take `cost`, the cost model; its prefill cost is 0 if a pull does not interrupt running requests."""


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
        is_loaded = instance.num_running > self.load_threshold * instance.max_running
        return not is_loaded and not instance.num_added_without_pull


@SYNCHRONIZATION.register("hypothesis")
@dataclass(frozen=True, slots=True)
class Hypothesis(Synchronization):
    """Pull when the work that the new version would bring is worth the interruption.

    Gain: the rise in throughput, until the next version is due. Loss: the present throughput, for the seconds of
    loading and of prefilling the contexts again. Re-evaluated over time: as the instance drains, the loss shrinks and
    the gain grows.
    """

    cost: CostModel = parameter()

    needs_added_if_pulled = True

    def should_pull(self, instance: LaggingInstance) -> bool:
        if not instance.num_running:
            return True  # nothing is interrupted
        rate_now = self._rate(instance, instance.num_added_without_pull)
        rate_after_pull = self._rate(instance, instance.num_added_if_pulled)
        gain = (rate_after_pull - rate_now) * instance.interval_s
        stalled_s = instance.pull_s + self.cost.prefill * instance.kv_tokens
        return rate_after_pull > rate_now and gain >= rate_now * stalled_s

    def _rate(self, instance: LaggingInstance, num_added: int) -> float:
        """Throughput in tokens/s with `num_added` more trajectories."""
        kv_tokens = instance.kv_tokens + num_added * instance.added_kv_tokens
        return self.cost.throughput(instance.num_running + num_added, kv_tokens)

"""Cache affinity: decides whether the next turn of a trajectory goes to the instance that may have its context in the
KV cache, or to the instance that routing prefers, which must prefill the whole context. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.strategies.migration import InstanceLoad
from staleflow.tasks.emulation.cost_model import StepCosts


@dataclass(frozen=True, slots=True)
class CacheAffinity:
    """Compares the time of a prefill, which delays all requests of an instance, with slower decoding."""

    step_costs: StepCosts

    def prefers_cached(
        self, cached_load: InstanceLoad, preferred_load: InstanceLoad, kv_tokens: int, remaining_tokens: float
    ) -> bool:
        """Whether the trajectory goes to the instance with its cached context.

        Args:
            cached_load: Load of the instance that has the context.
            preferred_load: Load of the instance that routing prefers.
            kv_tokens: Length of the context.
            remaining_tokens: Tokens that the trajectory is expected to sample still.
        """

        def step_s(load: InstanceLoad) -> float:
            return self.step_costs.step_s(load.running + 1, load.kv_tokens + kv_tokens)

        prefill_s = self.step_costs.prefill * kv_tokens * (preferred_load.running + 1)
        return remaining_tokens * (step_s(cached_load) - step_s(preferred_load)) <= prefill_s

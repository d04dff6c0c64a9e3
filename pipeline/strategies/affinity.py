"""Cache affinity: decides whether the next turn of a trajectory goes to the instance that may have its context in the
KV cache, or to the instance that routing prefers, which must prefill the whole context. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.strategies.migration import Load
from staleflow.tasks.emulation.cost_model import StepCosts


@dataclass(frozen=True, slots=True)
class CacheAffinity:
    """Compares the time of a prefill, which delays all requests of an instance, with slower decoding."""

    cost: StepCosts

    def prefers_cached(self, cached_on: Load, other: Load, kv_tokens: int, remaining: float) -> bool:
        """Whether the trajectory goes to the instance with its cached context.

        Args:
            cached_on: Load of the instance that has the context.
            other: Load of the instance that routing prefers.
            kv_tokens: Length of the context.
            remaining: Tokens that the trajectory is expected to sample yet.
        """

        def step_s(load: Load) -> float:
            return self.cost.step_s(load.running + 1, load.kv_tokens + kv_tokens)

        prefill_s = self.cost.prefill * kv_tokens * (other.running + 1)
        return remaining * (step_s(cached_on) - step_s(other)) <= prefill_s

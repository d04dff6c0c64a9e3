"""Where the next turn of a trajectory goes: back to the instance that may still hold its context in its cache, or to
the one that routing prefers, which computes the whole context anew. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.strategies.migration import Load
from staleflow.tasks.emulation.cost_model import StepCosts


@dataclass(frozen=True, slots=True)
class CacheAffinity:
    """Weighs the seconds of a prefill, for which all that runs on an instance waits, against slower decoding."""

    cost: StepCosts

    def stays(self, home: Load, other: Load, kv_tokens: int, remaining: float) -> bool:
        """Whether a trajectory with a context of `kv_tokens` goes on at its `home`. other: the load of the instance
        that routing prefers. remaining: tokens it is expected to sample yet."""

        def step_s(load: Load) -> float:
            return self.cost.step_s(load.running + 1, load.kv_tokens + kv_tokens)

        prefill_s = self.cost.prefill * kv_tokens * (other.running + 1)
        return remaining * (step_s(home) - step_s(other)) <= prefill_s

"""What a decode step of a rollout instance costs: the model that routing and the simulator share. Pure arithmetic.

step_seconds(n, kv) = k1 * kv + max(k2, b + k3 * n) + k4 with n running trajectories holding kv KV tokens
(StaleFlow, arXiv 2601.12784): k1 attention over the cache, k2 the memory-bound floor of reading the weights,
b + k3 * n the compute-bound part, k4 what is the same for every step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients in seconds; k1 per KV token, k3 per running trajectory."""

    k1: float
    k2: float
    k3: float
    k4: float
    b: float

    def step_s(self, running: int, kv_tokens: int) -> float:
        """Seconds of one decode step, in which each running trajectory gains one token."""
        if running == 0:
            return 0.0
        return self.k1 * kv_tokens + max(self.k2, self.b + self.k3 * running) + self.k4

    def throughput(self, running: int, kv_tokens: int) -> float:
        """Tokens per second over all running trajectories."""
        return running / self.step_s(running, kv_tokens) if running else 0.0

    def marginal_gain(self, running: int, kv_tokens: int, added_kv_tokens: int) -> float:
        """Tokens per second gained by adding one trajectory that holds `added_kv_tokens`; may be negative."""
        after = self.throughput(running + 1, kv_tokens + added_kv_tokens)
        return after - self.throughput(running, kv_tokens)

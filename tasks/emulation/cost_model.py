"""The cost model of a rollout instance, in seconds: shared by routing, simulator and emulated engine. Pure arithmetic.

step_seconds(n, kv) = k1 * kv + max(k2, b + k3 * n) + k4 with n running trajectories holding kv KV tokens
(StaleFlow, arXiv 2601.12784): k1 attention over the cache, k2 the memory-bound floor of reading the weights,
b + k3 * n the compute-bound part, k4 the constant part. prefill: seconds per token of a prompt, or of a context that
is computed again after an interrupt. A token costs the same compute in a prompt as in a large decode batch, so k3 is
the natural estimate where prefill was not measured.

A step that verifies draft tokens computes each like `verify_share` tokens of further trajectories, without reading the
cache again: b + k3 * n * (1 + verify_share * length). It samples `tokens_per_step` tokens per trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from staleflow.tasks.settings.knobs import knob

Numbers = npt.NDArray[np.float64]

NUM_BISECTIONS = 30
"""Halvings of the interval from 0 to 1 in `probability_at`; the error is below 1e-9."""


def tokens_per_step(length: int, acceptance: float) -> float:
    """Mean tokens per request of a verification step with `length` draft tokens, if each is accepted with probability
    `acceptance` given that those before it are: 1 + a + a^2 + ... + a^length."""
    return float(sum(acceptance**k for k in range(length + 1)))


def probability_at(function: Callable[[float], float], value: float) -> float:
    """Return the probability at which an increasing function has a value; 0 or 1 if the value is out of its range."""
    low, high = 0.0, 1.0
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high if high == 1.0 else low


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The [rollout.cost] table of a job file: a decode step takes k1 * kv + max(k2, b + k3 * n) + k4 seconds.

    The defaults are a published fit of a 7B model; `staleflow profile` fits them to your own run.
    """

    k1: float = knob(3.35e-08, "seconds per KV token", low=0, high=10)
    k2: float = knob(0.0064, "seconds to read the weights, floor of the compute term", low=0, high=10)
    k3: float = knob(0.0001231, "seconds per running trajectory", low=0, high=10)
    k4: float = knob(0.0028, "constant seconds per step", low=0, high=10)
    b: float = knob(0.0027, "offset of the compute-bound term, seconds", low=0, high=10)
    prefill: float = knob(0.0001231, "seconds per token of a prompt, or of a recomputed context", low=0, high=10)
    verify_share: float = knob(1.0, "cost of verifying a draft token, as a share of k3", low=0)

    def scaled(self, factor: float) -> CostModel:
        """Return a copy of the model in which every time is multiplied by `factor`."""
        return CostModel(
            k1=self.k1 * factor, k2=self.k2 * factor, k3=self.k3 * factor, k4=self.k4 * factor, b=self.b * factor,
            prefill=self.prefill * factor, verify_share=self.verify_share,
        )  # fmt: skip

    def compute_s(self, running: float) -> float:
        """Seconds of a decode step without the attention over the KV cache."""
        return max(self.k2, self.b + self.k3 * running) + self.k4

    def step_s(self, running: float, kv_tokens: float) -> float:
        """Seconds of one decode step, in which each running trajectory gains one token. running: may be a mean."""
        return self.k1 * kv_tokens + self.compute_s(running) if running else 0.0

    def step_s_by_instance(self, running: Numbers, kv_tokens: Numbers) -> Numbers:
        """`step_s` of many instances at once. An empty instance costs as much as its first step without KV cache."""
        seconds: Numbers = self.k1 * kv_tokens + np.maximum(self.k2, self.b + self.k3 * running) + self.k4
        return seconds

    # -- speculation ---------------------------------------------------------------------------------------------

    def with_drafts(self, length: int, acceptance: float) -> CostModel:
        """Return the cost model of an instance that verifies `length` draft tokens per trajectory in every step.

        A step of the returned model is the share of a verification step in which each running trajectory gains one
        token on average. With length 0, returns this model.
        """
        if not length:
            return self
        share = 1.0 / tokens_per_step(length, acceptance)
        return CostModel(
            k1=self.k1 * share, k2=self.k2 * share, k3=self.k3 * (1.0 + self.verify_share * length) * share,
            k4=self.k4 * share, b=self.b * share, prefill=self.prefill, verify_share=self.verify_share,
        )  # fmt: skip

    # -- decoding in closed form: between two changes n is fixed and the cache grows by n a step ------------------

    def decode_s(self, running: int, kv_tokens: float, num_steps: float) -> float:
        """Seconds of `num_steps` consecutive decode steps that start with `kv_tokens` in the cache."""
        if not running:
            return 0.0
        kv_token_steps = kv_tokens * num_steps + running * num_steps * (num_steps - 1) / 2
        return self.k1 * kv_token_steps + self.compute_s(running) * num_steps

    def steps_within(self, running: int, kv_tokens: float, seconds: float) -> float:
        """Number of decode steps, not rounded, within `seconds`: the inverse of `decode_s`."""
        if not running or seconds <= 0:
            return 0.0
        quadratic = self.k1 * running / 2
        linear = self.k1 * (kv_tokens - running / 2) + self.compute_s(running)
        if quadratic * seconds < 1e-12 * linear * linear:  # the cache is negligible: linear in time
            return seconds / linear
        return (math.sqrt(linear * linear + 4 * quadratic * seconds) - linear) / (2 * quadratic)

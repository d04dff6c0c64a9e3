"""Checks an instance's weights and logprobs against the published version after a pull. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.engines.base import LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version as the trainer published it."""

    version: PolicyVersion
    fingerprint: str
    probe_tokens: tuple[int, ...]
    """Tokens whose logprobs are compared; empty where contexts are too short for any."""
    probe_logprobs: tuple[float, ...]
    """The trainer's logprobs of probe[1:], nats."""
    drift_limit: float
    """The largest mean difference that an instance may have, nats."""

    def check(self, instance: InstanceId, load_result: LoadResult) -> WeightCheck:
        """Check whether an instance may serve the weights that it has loaded."""
        drift = mean_difference(load_result.probe_logprobs, self.probe_logprobs)
        reasons = []
        if load_result.fingerprint != self.fingerprint:
            reasons.append(f"it has read {load_result.fingerprint}, {self.fingerprint} was published")
        if load_result.weights.contradicted:
            reasons.append(load_result.weights.line)
        if not drift <= self.drift_limit:  # nor NaN
            reasons.append(
                f"logprobs of the probe are {drift:.3g} nats off the trainer's on average, "
                f"rollout.logprob_drift_limit allows {self.drift_limit:.3g}"
            )
        return WeightCheck(
            instance=instance,
            version=self.version,
            fingerprint=load_result.fingerprint,
            weights=load_result.weights,
            drift=drift,
            limit=self.drift_limit,
            refused="; ".join(reasons),
        )


def mean_difference(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the mean |difference| of two lists of logprobs, in nats; 0 for empty lists.

    >>> mean_difference((-1.0, -2.0), (-1.5, -2.0))
    0.25
    """
    pairs = list(zip(first, second, strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))

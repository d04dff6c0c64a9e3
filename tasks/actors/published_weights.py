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
    probe: tuple[int, ...]
    """Tokens whose logprobs are compared; empty where contexts are too short for any."""
    logprobs: tuple[float, ...]
    """The trainer's logprobs of probe[1:], nats."""
    limit: float
    """The largest mean difference that an instance may have, nats."""

    def check(self, instance: InstanceId, loaded: LoadResult) -> WeightCheck:
        """Check whether an instance may serve the weights that it has loaded."""
        drift = mean_difference(loaded.probe, self.logprobs)
        reasons = []
        if loaded.fingerprint != self.fingerprint:
            reasons.append(f"it has read {loaded.fingerprint}, {self.fingerprint} was published")
        if loaded.weights.contradicted:
            reasons.append(loaded.weights.line)
        if not drift <= self.limit:  # nor NaN
            reasons.append(
                f"logprobs of the probe are {drift:.3g} nats off the trainer's on average, "
                f"rollout.logprob_drift_limit allows {self.limit:.3g}"
            )
        return WeightCheck(
            instance=instance,
            version=self.version,
            fingerprint=loaded.fingerprint,
            weights=loaded.weights,
            drift=drift,
            limit=self.limit,
            refused="; ".join(reasons),
        )


def mean_difference(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the mean |difference| of two lists of logprobs, in nats; 0 for empty lists.

    >>> mean_difference((-1.0, -2.0), (-1.5, -2.0))
    0.25
    """
    pairs = list(zip(first, second, strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))

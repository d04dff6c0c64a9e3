"""What an instance's weights and logprobs must agree with after a pull, and whether they do. Pure."""

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
    """The most that an instance's may differ on average, nats."""

    def check(self, instance: InstanceId, loaded: LoadResult) -> WeightCheck:
        """Whether an instance may serve what it has loaded."""
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


def mean_difference(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Mean |difference| of two lists of logprobs, nats; 0 for empty ones.

    >>> mean_difference((-1.0, -2.0), (-1.5, -2.0))
    0.25
    """
    pairs = list(zip(one, other, strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))

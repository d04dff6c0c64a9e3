"""Metrics of a training step, computed from sums over its tokens.

All tokens count of rows whose logprobs training computes anyway. The other rows are represented by a random sample,
each row of which counts several times, so that the sums are unbiased. Metrics that are ratios of sums have standard
errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from staleflow.tasks.training.loss import MAX_LOG_RATIO, TokenLoss, Tokens, log_ratio
from staleflow.tasks.training.microbatches import LogprobsByRow, Row

ENTROPY_CAP = 2.0
"""Cap of the weights in the estimate of the entropy, so that one token with a huge ratio does not dominate it."""
# "surprise": -log pi of a token, weighted for the estimate of the entropy.
SUM_NAMES = (
    "trained_tokens", "loss", "kl_reference", "tokens", "clipped_low", "clipped_high", "ratio", "ratio_squared",
    "kl_old", "kl_behaviour", "surprise", "surprise_weight",
)  # fmt: skip


@dataclass(slots=True)
class TokenSums:
    """Sums over tokens, which can be added up over processes. They stay on the device of the tokens until they are
    read, because reading waits for all operations that are queued there. totals: float64, in the order of SUM_NAMES."""

    totals: torch.Tensor = field(default_factory=lambda: torch.zeros(len(SUM_NAMES), dtype=torch.float64))

    @property
    def values(self) -> list[float]:
        """The sums, in the order of SUM_NAMES."""
        values: list[float] = self.totals.tolist()
        return values

    def add_loss(self, loss: torch.Tensor, tokens: Tokens, reference: torch.Tensor | None) -> None:
        """Add the loss of a trained micro-batch, and its distance to the reference policy if there is one."""
        self._add(trained_tokens=tokens.sampled.sum(), loss=loss.detach())
        if reference is not None:
            distance = log_ratio(reference, tokens.logprobs.detach()).double()
            self._add(kl_reference=_k3(distance).masked_fill(~tokens.sampled, 0).sum())

    def add(
        self, tokens: Tokens, result: TokenLoss, old_logprobs: torch.Tensor, multiplicity: float = 1.0
    ) -> torch.Tensor:
        """Add a micro-batch. Returns the sums over each of its N rows, [N, number of SUM_NAMES].

        Args:
            old_logprobs: [N, T] logprobs under the policy that the loss uses as the old policy.
            multiplicity: Number of micro-batches that it represents.
        """
        logprobs = tokens.logprobs.detach()
        log_ratios = log_ratio(logprobs, tokens.behaviour).double()
        ratio = log_ratios.exp()
        is_low = (ratio if result.ratio is None else result.ratio) < 1
        weight = ratio.clamp(max=ENTROPY_CAP)
        token_values = {
            "tokens": tokens.sampled.double(),
            "clipped_low": (result.clipped & is_low).double(),
            "clipped_high": (result.clipped & ~is_low).double(),
            "ratio": ratio,
            "ratio_squared": ratio**2,
            "kl_old": _k3(log_ratio(logprobs, old_logprobs).double()),
            "kl_behaviour": _k3(log_ratios),
            "surprise": -weight * logprobs,
            "surprise_weight": weight,
        }
        by_row = {name: values.masked_fill(~tokens.sampled, 0).sum(1) for name, values in token_values.items()}
        self._add(**{name: multiplicity * row.sum() for name, row in by_row.items()})
        zeros = torch.zeros(len(logprobs), dtype=torch.float64, device=logprobs.device)
        return torch.stack([by_row.get(name, zeros).double() for name in SUM_NAMES], 1)

    def metrics(self, epochs: int = 1, sample: RowSample | None = None) -> dict[str, float]:
        """Return means over the tokens, by name (see stores/metrics.py).

        Args:
            epochs: Number of times that each token was added.
            sample: The sampled rows that represent others; None if all rows were added.
        """
        sums = dict(zip(SUM_NAMES, self.values, strict=True))
        tokens = max(sums["tokens"], 1.0)
        means = {
            "clip_share": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
            "clip_share_low": sums["clipped_low"] / tokens,
            "clip_share_high": sums["clipped_high"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 1.0,
            "entropy": sums["surprise"] / sums["surprise_weight"] if sums["surprise_weight"] else 0.0,
            "kl_old": sums["kl_old"] / tokens,
            "kl_behaviour": sums["kl_behaviour"] / tokens,
            "kl_reference": sums["kl_reference"] / max(sums["trained_tokens"], 1.0),
            "tokens_trained": sums["trained_tokens"] / epochs,
        }
        slopes = _slopes(means, sums)
        standard_errors = {
            f"{name}_stderr": epochs * sample.standard_error(slopes[name]) if sample else 0.0 for name in slopes
        }
        return means | standard_errors

    @property
    def loss(self) -> float:
        """The sum of the losses of all micro-batches."""
        return self.values[SUM_NAMES.index("loss")]

    def _add(self, **sums: torch.Tensor) -> None:
        zero = torch.zeros_like(next(iter(sums.values())), dtype=torch.float64)
        addends = torch.stack([sums.get(name, zero).double() for name in SUM_NAMES])
        self.totals = self.totals.to(addends.device) + addends


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """A random sample of rows without replacement. rows: sums over each sampled row, in the order of SUM_NAMES.
    population_size: number of rows from which they were drawn."""

    rows: Sequence[Sequence[float]]
    population_size: int

    def standard_error(self, slopes: Mapping[str, float]) -> float:
        """Standard error of a metric due to this sample, by linearization (the delta method): that of the estimated
        total of slope x sum, with finite-population correction.

        Args:
            slopes: Derivatives of the metric by the sums, by name of the sum.

        >>> RowSample(rows=[[0.0] * 12] * 3, population_size=9).standard_error({"tokens": 1.0})
        0.0
        """
        count = len(self.rows)
        if count == self.population_size or count < 2:
            return 0.0
        indices = [SUM_NAMES.index(name) for name in slopes]
        linearized = np.asarray(self.rows)[:, indices] @ np.asarray(list(slopes.values()))
        share = 1 - count / self.population_size
        return float(self.population_size * math.sqrt(share * linearized.var(ddof=1) / count))


def mismatch_metrics(rows: Sequence[Row], trainer_logprobs: LogprobsByRow) -> dict[str, float]:
    """The differences between stored behaviour logprobs and the trainer's own over the fresh rows: absolute differences
    per token, nats, and KL(rollout || trainer) by the k3 estimate. Empty if there are no fresh rows. trainer_logprobs:
    the trainer's logprobs, at least of these rows."""
    indices = [i for i, row in enumerate(rows) if row.staleness == 0 and row.is_usable.any()]
    if not indices:
        return {}
    difference = np.concatenate([(trainer_logprobs[i] - rows[i].behaviour)[rows[i].is_usable] for i in indices])
    log_ratio = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch_mean": float(np.abs(difference).mean()),
        "mismatch_max": float(np.abs(difference).max()),
        "kl_rollout": float((np.exp(log_ratio) - log_ratio - 1).mean()),
    }


def _slopes(metrics: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Derivatives of the metrics with a standard error, by name of the metric and of the sum."""
    tokens, ratio, ratio_squared = (sums[name] or 1.0 for name in ("tokens", "ratio", "ratio_squared"))
    weight, ess = sums["surprise_weight"] or 1.0, metrics["ess"]
    return {
        "ess": {"ratio": 2 * ess / ratio, "tokens": -ess / tokens, "ratio_squared": -ess / ratio_squared},
        "entropy": {"surprise": 1 / weight, "surprise_weight": -metrics["entropy"] / weight},
        "kl_behaviour": {"kl_behaviour": 1 / tokens, "tokens": -metrics["kl_behaviour"] / tokens},
    }


def _k3(log_ratios: torch.Tensor) -> torch.Tensor:
    """The k3 estimate r - log r - 1 of KL(q || p), at tokens sampled from q, of log r = log p - log q."""
    return log_ratios.expm1() - log_ratios

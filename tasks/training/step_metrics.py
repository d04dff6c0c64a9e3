"""Metrics of a training step, computed from sums over its tokens.

Rows whose logprobs are computed anyway count with all of their tokens. The others are represented by a random sample of
rows, each of which counts for several: the sums are unbiased then, and the figures that are ratios of them come with
their standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from staleflow.tasks.training.loss import TokenLoss, Tokens, log_ratio

ENTROPY_CAP = 2.0
"""Cap of the weights of the entropy's estimate: one token whose ratio is huge must not be all of it."""
SUMS = (
    "trained", "loss", "kl_reference", "tokens", "low", "high", "ratio", "ratio_squared", "kl_old",
    "kl_behaviour", "surprise", "surprise_weight",
)  # fmt: skip


@dataclass(slots=True)
class TokenSums:
    """Sums over tokens, to which those of other processes can be added. values: in the order of SUMS."""

    values: list[float] = field(default_factory=lambda: [0.0] * len(SUMS))

    def add_loss(self, loss: torch.Tensor, tokens: Tokens, reference: torch.Tensor | None) -> None:
        """Add the loss of a trained micro-batch, and its distance to the reference policy if there is one."""
        self._add(trained=tokens.sampled.sum(), loss=loss.detach())
        if reference is not None:
            distance = log_ratio(reference, tokens.logprobs.detach()).double()
            self._add(kl_reference=_k3(distance).masked_fill(~tokens.sampled, 0).sum())

    def add(self, tokens: Tokens, result: TokenLoss, old: torch.Tensor, times: float = 1.0) -> list[list[float]]:
        """Add a micro-batch. Returns the sums over each of its rows, in the order of SUMS.

        Args:
            old: [N, T] logprobs under the policy that the loss takes as the old one.
            times: How many such micro-batches it stands for.
        """
        logprobs = tokens.logprobs.detach()
        log_ratios = log_ratio(logprobs, tokens.behaviour).double()
        ratio = log_ratios.exp()
        below = (ratio if result.ratio is None else result.ratio) < 1
        weight = ratio.clamp(max=ENTROPY_CAP)
        parts = {
            "tokens": tokens.sampled.double(),
            "low": (result.clipped & below).double(),
            "high": (result.clipped & ~below).double(),
            "ratio": ratio,
            "ratio_squared": ratio**2,
            "kl_old": _k3(log_ratio(logprobs, old).double()),
            "kl_behaviour": _k3(log_ratios),
            "surprise": -weight * logprobs,
            "surprise_weight": weight,
        }
        by_row = {name: values.masked_fill(~tokens.sampled, 0).sum(1) for name, values in parts.items()}
        self._add(**{name: times * row.sum() for name, row in by_row.items()})
        none = torch.zeros(len(logprobs), dtype=torch.float64, device=logprobs.device)
        rows: list[list[float]] = torch.stack([by_row.get(name, none).double() for name in SUMS], 1).tolist()
        return rows

    def metrics(self, epochs: int = 1, sample: RowSample | None = None) -> dict[str, float]:
        """Means over the tokens, by name (see stores/metrics.py).

        Args:
            epochs: How often each token was added.
            sample: The rows that others were represented by; None if all rows were added.
        """
        sums = dict(zip(SUMS, self.values, strict=True))
        tokens = max(sums["tokens"], 1.0)
        figures = {
            "clip_share": (sums["low"] + sums["high"]) / tokens,
            "clip_share_low": sums["low"] / tokens,
            "clip_share_high": sums["high"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 1.0,
            "entropy": sums["surprise"] / sums["surprise_weight"] if sums["surprise_weight"] else 0.0,
            "kl_old": sums["kl_old"] / tokens,
            "kl_behaviour": sums["kl_behaviour"] / tokens,
            "kl_reference": sums["kl_reference"] / max(sums["trained"], 1.0),
            "tokens_trained": sums["trained"] / epochs,
        }
        slopes = _slopes(figures, sums)
        errors = {f"{name}_stderr": epochs * sample.error(slopes[name]) if sample else 0.0 for name in slopes}
        return figures | errors

    @property
    def loss(self) -> float:
        """The sum of the losses of all micro-batches."""
        return self.values[SUMS.index("loss")]

    def _add(self, **sums: torch.Tensor) -> None:
        for name, value in zip(sums, torch.stack([s.double() for s in sums.values()]).tolist(), strict=True):
            self.values[SUMS.index(name)] += value


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """A random sample of rows without replacement. rows: sums over each sampled row, in the order of SUMS. population:
    number of rows from which they were drawn."""

    rows: Sequence[Sequence[float]]
    population: int

    def error(self, slopes: Mapping[str, float]) -> float:
        """Standard error of a metric due to this sample, by linearization (the delta method): that of the estimated
        total of slope x sum, with finite-population correction.

        Args:
            slopes: The figure's derivatives by the sums, by name.

        >>> RowSample(rows=[[0.0] * 12] * 3, population=9).error({"tokens": 1.0})
        0.0
        """
        count = len(self.rows)
        if count == self.population or count < 2:
            return 0.0
        indices = [SUMS.index(name) for name in slopes]
        linear = np.asarray(self.rows)[:, indices] @ np.asarray(list(slopes.values()))
        share = 1 - count / self.population
        return float(self.population * math.sqrt(share * linear.var(ddof=1) / count))


def _slopes(figures: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The derivatives of figures by sums, of those figures that have a standard error."""
    tokens, ratio, squared = (sums[name] or 1.0 for name in ("tokens", "ratio", "ratio_squared"))
    weight, ess = sums["surprise_weight"] or 1.0, figures["ess"]
    return {
        "ess": {"ratio": 2 * ess / ratio, "tokens": -ess / tokens, "ratio_squared": -ess / squared},
        "entropy": {"surprise": 1 / weight, "surprise_weight": -figures["entropy"] / weight},
        "kl_behaviour": {"kl_behaviour": 1 / tokens, "tokens": -figures["kl_behaviour"] / tokens},
    }


def _k3(log_ratios: torch.Tensor) -> torch.Tensor:
    """The k3 estimate r - log r - 1 of KL(q || p), at tokens sampled from q, of log r = log p - log q."""
    return log_ratios.expm1() - log_ratios

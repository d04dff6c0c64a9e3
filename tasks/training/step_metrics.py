"""Figures of a training step, from sums over its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """Running sums over tokens. Those of several processes add up, value by value. values: in the order of SUMS."""

    values: list[float] = field(default_factory=lambda: [0.0] * len(SUMS))

    def add_loss(self, loss: torch.Tensor, tokens: Tokens, reference: torch.Tensor | None) -> None:
        """Add a trained micro-batch's loss, and its distance to the reference policy if there is one."""
        self._add(trained=tokens.sampled.sum(), loss=loss.detach())
        if reference is not None:
            distance = log_ratio(reference, tokens.logprobs.detach()).double()
            self._add(kl_reference=_k3(distance).masked_fill(~tokens.sampled, 0).sum())

    def add(self, tokens: Tokens, result: TokenLoss, old: torch.Tensor, times: float = 1.0) -> None:
        """Add a micro-batch. old: [N, T] logprobs under the policy that the loss takes as the old one. times: how many
        such micro-batches it stands for."""
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
        self._add(**{name: times * part.masked_fill(~tokens.sampled, 0).sum() for name, part in parts.items()})

    def metrics(self, epochs: int = 1) -> dict[str, float]:
        """Means over the tokens, by name (see stores/metrics.py). epochs: how often each trained token was added."""
        sums = dict(zip(SUMS, self.values, strict=True))
        tokens = max(sums["tokens"], 1.0)
        return {
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

    @property
    def loss(self) -> float:
        """The sum of the losses of all micro-batches."""
        return self.values[SUMS.index("loss")]

    def _add(self, **sums: torch.Tensor) -> None:
        for name, value in zip(sums, torch.stack([s.double() for s in sums.values()]).tolist(), strict=True):
            self.values[SUMS.index(name)] += value


def _k3(log_ratios: torch.Tensor) -> torch.Tensor:
    """The k3 estimate r - log r - 1 of KL(q || p), at tokens sampled from q, of log r = log p - log q."""
    return log_ratios.expm1() - log_ratios

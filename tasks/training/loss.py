"""Token losses with off-policy corrections. Torch, pure; docs/losses.md explains the choice between them.

r = exp(log pi - log pi_ref). Behaviour logprobs are always the stored ones, token by token, so a trajectory that mixes
versions is corrected exactly. Importance weights are detached; a mask never shrinks the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.names import LOSS_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """name: ppo_clip, decoupled_ppo, cispo or tis. The ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    name: str
    clip_low: float
    clip_high: float
    weight_cap: float

    @property
    def needs_proximal(self) -> bool:
        """Whether it wants the trainer's own logprobs from before the step: one more forward pass."""
        return self.name == "decoupled_ppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """loss: [N, T], to be minimised, not yet masked or averaged. clipped: [N, T], where the clip cut the gradient."""

    loss: Tensor
    clipped: Tensor


def token_loss(
    settings: LossSettings, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor
) -> TokenLoss:
    """The loss of each token.

    logprobs: [N, T] under the policy being trained, with gradient. proximal: [N, T] under it before the step.
    behaviour: [N, T] under the policy that sampled. advantage: [N, 1].
    ppo_clip (1707.06347) and cispo (2506.13585) take the ratio to the behaviour policy; decoupled_ppo (2505.24298)
    clips around the proximal policy and weighs with min(pi_proximal / pi_behaviour, weight_cap); tis is ROLL Flash's
    truncated importance sampling (2510.11345), min(r, weight_cap).
    """
    if settings.name not in LOSS_NAMES:
        raise ValueError(f"no loss {settings.name!r}; there are {', '.join(LOSS_NAMES)}")
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    reference = proximal if settings.needs_proximal else behaviour
    ratio = torch.exp(logprobs - reference)
    if settings.name in ("ppo_clip", "decoupled_ppo"):
        clipped_ratio = ratio.clamp(low, high)
        surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
        clipped = (ratio * advantage > clipped_ratio * advantage).detach()
        if settings.needs_proximal:
            weight = torch.exp(proximal - behaviour).clamp(max=settings.weight_cap).detach()
            surrogate = weight * surrogate
        return TokenLoss(loss=-surrogate, clipped=clipped)
    top = high if settings.name == "cispo" else settings.weight_cap
    bottom = low if settings.name == "cispo" else 0.0
    weight = ratio.clamp(bottom, top).detach()
    return TokenLoss(loss=-weight * advantage * logprobs, clipped=(ratio.detach() != weight))

"""Token losses with off-policy corrections; docs/losses.md explains the choice between them.

r = exp(log pi - log pi_ref). Behaviour logprobs are always the stored ones, token by token, so a trajectory that mixes
versions is corrected exactly. Importance weights are detached; a mask never shrinks the denominator.

Formulas are methods of torch's tensors: a job file is read, and its loss chosen, without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stores.errors import ConfigError
from tasks.knobs import knob
from tasks.registry import Registry
from tasks.user_code import said

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses by token. loss: [N, T], not masked or averaged. clipped: [N, T], where clipping removed the gradient."""

    loss: Tensor
    clipped: Tensor


class Loss(Protocol):
    """A loss that a training step minimises."""

    @property
    def needs_proximal(self) -> bool:
        """Whether it needs the trainer's own logprobs from before the step, at the cost of one more forward pass."""
        ...

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        """The loss of each token, proportional to the advantage. At padding and at tokens that were given between turns
        all logprobs are 0, and the result is not used.

        logprobs: [N, T] under the policy being trained, with gradient. proximal: [N, T] under it before the step;
        arbitrary unless needs_proximal. behaviour: [N, T] under the policy that sampled. advantage: [N, 1].
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss from a user's file. Checks its results: one of another shape would silently be broadcast."""

    loss: Loss
    name: str

    @property
    def needs_proximal(self) -> bool:
        return bool(self.loss.needs_proximal)

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        try:
            result = self.loss.token_loss(logprobs, proximal, behaviour, advantage)
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(
                f"{LOSSES.key} = {self.name!r}: token_loss raised {type(error).__name__}: {said(error)}"
            ) from error
        for part in ("loss", "clipped"):
            given = getattr(result, part, None)
            if getattr(given, "shape", None) != logprobs.shape:
                raise ConfigError(
                    f"{LOSSES.key} = {self.name!r}: token_loss gave {part} of shape "
                    f"{tuple(getattr(given, 'shape', ()))}; it must be {tuple(logprobs.shape)}, one number per token"
                )
        return result


LOSSES: Registry[Loss] = Registry(
    "loss", "training.loss.name", contract=Loss, own=True, options="options", guarded=OwnLoss
)


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """Clipping of the ratio to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = knob(0.2, "the ratio is clipped at 1 - clip_low", low=0, high=1)
    clip_high: float = knob(0.28, "and at 1 + clip_high", low=0)

    def surrogate(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """PPO's surrogate: the ratio or the clipped ratio, times the advantage, whichever is smaller."""
        return (ratio * advantage).minimum(self.clip(ratio) * advantage)

    def cut(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Where the surrogate has no gradient."""
        return (ratio * advantage > self.clip(ratio) * advantage).detach()

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)


@dataclass(frozen=True, kw_only=True)
class _Capped:
    weight_cap: float = knob(5.0, "cap of pi_old / pi_rollout (decoupled_ppo), of the ratio (tis)", above=0)


@LOSSES.register("ppo_clip")
@dataclass(frozen=True, kw_only=True)
class PpoClip(_Clipped):
    """Clips the ratio to the behaviour policy (1707.06347)."""

    needs_proximal = False

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        ratio = (logprobs - behaviour).exp()
        return TokenLoss(loss=-self.surrogate(ratio, advantage), clipped=self.cut(ratio, advantage))


@LOSSES.register("decoupled_ppo")
@dataclass(frozen=True, kw_only=True)
class DecoupledPpo(_Capped, _Clipped):
    """Clips around the proximal policy and weighs with min(pi_proximal / pi_behaviour, weight_cap) (2505.24298)."""

    needs_proximal = True

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        ratio = (logprobs - proximal).exp()
        weight = (proximal - behaviour).exp().clamp(max=self.weight_cap).detach()
        return TokenLoss(loss=-(weight * self.surrogate(ratio, advantage)), clipped=self.cut(ratio, advantage))


@LOSSES.register("cispo")
@dataclass(frozen=True, kw_only=True)
class Cispo(_Clipped):
    """The clipped ratio to the behaviour policy as a weight, so that every token keeps a gradient (2506.13585)."""

    needs_proximal = False

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        ratio = (logprobs - behaviour).exp().detach()
        return _weighted(ratio, self.clip(ratio), logprobs, advantage)


@LOSSES.register("tis")
@dataclass(frozen=True, kw_only=True)
class Tis(_Capped):
    """ROLL Flash's truncated importance sampling, min(r, weight_cap) (2510.11345)."""

    needs_proximal = False

    def token_loss(self, logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> TokenLoss:
        ratio = (logprobs - behaviour).exp().detach()
        return _weighted(ratio, ratio.clamp(max=self.weight_cap), logprobs, advantage)


def _weighted(ratio: Tensor, weight: Tensor, logprobs: Tensor, advantage: Tensor) -> TokenLoss:
    return TokenLoss(loss=-weight * advantage * logprobs, clipped=(ratio != weight))

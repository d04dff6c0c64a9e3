"""Token losses with off-policy corrections; docs/losses.md explains the choice between them.

r = exp(log pi - log pi_ref). Behaviour logprobs are always the stored ones, token by token, so a trajectory that mixes
versions is corrected exactly. Importance weights are detached; a mask never shrinks the denominator. Log ratios are
clamped to +-MAX_LOG_RATIO, so that a wrong stored logprob cannot overflow; beyond it the ratio has no gradient.

Formulas use methods of tensors only, so that a job file can be read, and its loss chosen, without loading torch.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats at which log ratios are clamped. A ratio of e^20 is far beyond every clip and cap; e^89 overflows float32, and
infinity times a gradient of 0 is NaN."""
MAX_DISTANCE = 1e4
"""Nats at which distances of logprobs are clamped; beyond it one of the two policies excludes the token."""
MAX_RATIO = math.exp(MAX_LOG_RATIO) * (1 - 1e-6)
"""The ratio at which clamping begins, up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a micro-batch as a loss sees them: one row per trajectory, padded. At padding, and at tokens of
    environments, all logprobs are 0 and the result is ignored."""

    logprobs: Tensor  # [N, T] under the policy being trained, nats, with gradient
    proximal: Tensor  # [N, T] under it before the step; arbitrary unless the loss needs_proximal
    behaviour: Tensor  # [N, T] under the policy that sampled
    advantage: Tensor  # [N, 1]; [N, T] with a KL penalty in the reward
    sampled: Tensor  # [N, T] bool, false at padding and given tokens
    lags: Tensor  # [N, T] int, versions from the one that sampled a token to the one the step began with


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses by token.

    Args:
        loss: [N, T] losses, not masked or averaged.
        clipped: [N, T] bool, where a limit changed the loss: counted in the metrics `clip_low` and `clip_high`.
        ratio: [N, T] the ratio that is limited; it is below 1 where a token counts in `clip_low`. None: the ratio to
            the behaviour policy.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor | None = None


CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far below and above 1 a ratio is clipped by default."""


class Loss(RegistryEntry, ABC):
    """A loss that a training step minimizes."""

    __slots__ = ()

    @property
    @abstractmethod
    def needs_proximal(self) -> bool:
        """Whether the loss needs the trainer's own logprobs from before the step. If the step has several updates, they
        take one more forward pass."""

    @property
    def trains_zero_advantage(self) -> bool:
        """Whether the loss is not proportional to the advantage. Otherwise trajectories with an advantage of 0 are
        skipped."""
        return False

    @property
    def is_tokenwise(self) -> bool:
        """Whether the loss at each token depends on values of that token only. Long trajectories then take less
        time."""
        return False

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss compares the best with the worst response to a prompt, and both with the reference model."""
        return False

    @property
    def clip_range(self) -> tuple[float, float]:
        """Range of a token's ratio outside of which it is reported as clipped. Losses that do not clip tokens use
        PPO's."""
        return 1.0 - CLIP_LOW, 1.0 + CLIP_HIGH

    @abstractmethod
    def token_loss(self, tokens: Tokens) -> TokenLoss:
        """The losses of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoss(UserCode, Loss):
    """A loss from a user's file, whose token_loss takes either Tokens, or logprobs, proximal, behaviour and advantage.
    Checks the shapes of its results, because wrong ones would be broadcast silently."""

    @property
    def needs_proximal(self) -> bool:
        return bool(self.code.needs_proximal)

    @property
    def trains_zero_advantage(self) -> bool:
        return bool(getattr(self.code, "trains_zero_advantage", False))

    @property
    def is_tokenwise(self) -> bool:
        return bool(getattr(self.code, "is_tokenwise", False))

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        parts = [getattr(tokens, f.name) for f in fields(tokens)][:4]
        takes_all = len(inspect.signature(self.code.token_loss).parameters) == 1
        method, expected_shape = f"{LOSSES.key} = {self.name!r}: token_loss", tuple(tokens.logprobs.shape)
        with raised_as(ConfigError, f"{method} raised", Exception, SystemExit, describe=type_and_message):
            result = self.code.token_loss(*([tokens] if takes_all else parts))
        for part in ("loss", "clipped"):
            shape = tuple(getattr(getattr(result, part, None), "shape", ()))
            if shape != expected_shape:
                raise ConfigError(
                    f"{method} returned {part} of shape {shape}; it must be {expected_shape}, one number per token"
                )
        token_loss: TokenLoss = result
        return token_loss


LOSSES: Registry[Loss] = Registry("loss", "training.loss", Loss, user_code=UserLoss)


def log_distance(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[N, T] log pi_new - log pi_old for penalties. Limited only where a square would overflow, since a penalty must
    pull back from any distance."""
    return (logprobs - old_logprobs).clamp(-MAX_DISTANCE, MAX_DISTANCE)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[N, T] log pi_new - log pi_old, limited to +-MAX_LOG_RATIO."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return log_ratio(logprobs, old_logprobs).exp()


def _sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[N, 1] log ratio of whole trajectories, of one with branches that of each sequence: the sum over their sampled
    tokens, not clamped."""
    return (logprobs - old_logprobs).sum(1, keepdim=True)


def _segment_log_ratio(logprobs: Tensor, old_logprobs: Tensor, tokens: Tokens) -> Tensor:
    """[N, T] log ratio of the segment that each token is in, not clamped. A segment is a run of tokens that were
    sampled under one version."""
    is_sampled, was_sampled = tokens.sampled[:, 1:], tokens.sampled[:, :-1]
    starts = is_sampled & (~was_sampled | (tokens.lags[:, 1:] != tokens.lags[:, :-1]))
    segment_index = tokens.sampled.new_zeros(logprobs.shape).long()
    segment_index[:, 1:] = starts.long().cumsum(1)
    sums = logprobs.new_zeros(logprobs.shape).scatter_add(1, segment_index, logprobs - old_logprobs)
    return sums.gather(1, segment_index)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Clipping of the ratio to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = knob(CLIP_LOW, "the ratio is clipped at 1 - clip_low", low=0, high=1)
    clip_high: float = knob(CLIP_HIGH, "and at 1 + clip_high", low=0)

    @property
    def clip_range(self) -> tuple[float, float]:
        return 1.0 - self.clip_low, 1.0 + self.clip_high

    def surrogate(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """PPO's surrogate: the ratio or the clipped ratio, times the advantage, whichever is smaller."""
        return (ratio * advantage).minimum(self.clip(ratio) * advantage)

    def has_no_gradient(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] bool, where the surrogate has no gradient."""
        return ((ratio * advantage > self.clip(ratio) * advantage) | (ratio >= MAX_RATIO)).detach()

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(*self.clip_range)


@dataclass(frozen=True, kw_only=True)
class _WeightCap:
    weight_cap: float = knob(5.0, "cap of the weight: of pi_old / pi_rollout, with tis of the ratio", above=0)


@LOSSES.register("ppo_clip")
@dataclass(frozen=True, kw_only=True)
class PpoClip(Clip, Loss):
    """Clips the ratio to the behaviour policy (1707.06347)."""

    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        ratio = _ratio(tokens.logprobs, tokens.behaviour)
        return TokenLoss(
            loss=-self.surrogate(ratio, tokens.advantage),
            clipped=self.has_no_gradient(ratio, tokens.advantage),
            ratio=ratio,
        )


@LOSSES.register("decoupled_ppo")
@dataclass(frozen=True, kw_only=True)
class DecoupledPpo(_WeightCap, Clip, Loss):
    """Clips around the proximal policy, weighted with min(pi_proximal / pi_behaviour, weight_cap) (2505.24298)."""

    needs_proximal = True
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        weight = _ratio(tokens.proximal, tokens.behaviour).clamp(max=self.weight_cap).detach()
        return _weighted_surrogate(self, weight, _ratio(tokens.logprobs, tokens.proximal), tokens.advantage)


@LOSSES.register("cispo")
@dataclass(frozen=True, kw_only=True)
class Cispo(Clip, Loss):
    """The clipped ratio to the behaviour policy as a weight, so that every token keeps a gradient (2506.13585)."""

    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        ratio = _ratio(tokens.logprobs, tokens.behaviour).detach()
        return _weighted_policy_gradient(ratio, self.clip(ratio), tokens)


@LOSSES.register("tis")
@dataclass(frozen=True, kw_only=True)
class Tis(_WeightCap, Loss):
    """ROLL Flash's truncated importance sampling, min(r, weight_cap) (2510.11345)."""

    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        ratio = _ratio(tokens.logprobs, tokens.behaviour).detach()
        return _weighted_policy_gradient(ratio, ratio.clamp(max=self.weight_cap), tokens)


@LOSSES.register("dual_clip")
@dataclass(frozen=True, kw_only=True)
class DualClip(Clip, Loss):
    """PPO whose loss at a negative advantage is also bounded, by -dual_clip A (1912.09729)."""

    dual_clip: float = knob(3.0, "a negative advantage counts at most this many times", above=1)
    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        ratio, advantage = _ratio(tokens.logprobs, tokens.behaviour), tokens.advantage
        surrogate = self.surrogate(ratio, advantage)
        is_bounded = (advantage < 0) & (ratio > self.dual_clip)
        return TokenLoss(
            loss=-(self.dual_clip * advantage).where(is_bounded, surrogate),
            clipped=self.has_no_gradient(ratio, advantage) | is_bounded,
            ratio=ratio,
        )


@LOSSES.register("gspo")
@dataclass(frozen=True, kw_only=True)
class Gspo(Loss):
    """PPO on the trajectory's ratio, the geometric mean of its tokens' ratios to the behaviour policy (2507.18071);
    with branches on that of each sequence."""

    sequence_clip_low: float = knob(3e-4, "the trajectory's ratio is clipped at 1 - this", low=0, high=1)
    sequence_clip_high: float = knob(4e-4, "and at 1 + this", low=0)
    needs_proximal = False

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        count = tokens.sampled.sum(1, keepdim=True).clamp(min=1)
        mean = _sequence_log_ratio(tokens.logprobs, tokens.behaviour) / count
        ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand(tokens.logprobs.shape)
        clip = Clip(clip_low=self.sequence_clip_low, clip_high=self.sequence_clip_high)
        return TokenLoss(
            loss=-clip.surrogate(ratio, tokens.advantage),
            clipped=clip.has_no_gradient(ratio, tokens.advantage),
            ratio=ratio,
        )


@LOSSES.register("topr")
@dataclass(frozen=True, kw_only=True)
class Topr(Loss):
    """Positive advantages as in supervised learning; negative ones weighted with the ratio to the behaviour policy, at
    most 1 (2503.14286). Each sign has a weight of its own (weighted TOPR, 2510.11345)."""

    positive_weight: float = knob(1.0, "weight of trajectories with a positive advantage", low=0)
    negative_weight: float = knob(1.0, "weight of those with a negative one", low=0)
    ratio_of: str = knob(
        "trajectory",
        "what the ratio is of; a segment is what was sampled without a break under one version",
        choices=("token", "segment", "trajectory"),
    )
    needs_proximal = False

    @property
    def is_tokenwise(self) -> bool:
        return self.ratio_of == "token"

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        logprobs, old_logprobs = tokens.logprobs.detach(), tokens.behaviour
        if self.ratio_of == "token":
            log_ratios = logprobs - old_logprobs
        elif self.ratio_of == "segment":
            log_ratios = _segment_log_ratio(logprobs, old_logprobs, tokens)
        else:
            log_ratios = _sequence_log_ratio(logprobs, old_logprobs).expand(logprobs.shape)
        ratio = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        positive = (tokens.advantage > 0).expand(logprobs.shape)
        weight = (self.negative_weight * ratio.clamp(max=1.0)).masked_fill(positive, self.positive_weight)
        return TokenLoss(
            loss=-weight * tokens.advantage * tokens.logprobs, clipped=(ratio > 1.0) & ~positive, ratio=ratio
        )


@LOSSES.register("kimi")
@dataclass(frozen=True, kw_only=True)
class Kimi(Loss):
    """Policy gradient with a quadratic penalty on the distance to the behaviour policy (Kimi k1.5, 2501.12599)."""

    tau: float = knob(0.1, "weight of the squared distance to the behaviour policy", low=0)
    needs_proximal = False
    is_tokenwise = True
    trains_zero_advantage = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        distance = log_distance(tokens.logprobs, tokens.behaviour)
        loss = -tokens.advantage * tokens.logprobs + 0.5 * self.tau * distance**2
        return TokenLoss(loss=loss, clipped=tokens.sampled.new_zeros(loss.shape))


@LOSSES.register("sft")
@dataclass(frozen=True, kw_only=True)
class Sft(Loss):
    """The cross-entropy of supervised fine-tuning. It raises the logprob of each token, whatever the reward and the
    policy that sampled it."""

    needs_proximal = False
    is_tokenwise = True
    trains_zero_advantage = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(loss=-tokens.logprobs, clipped=tokens.sampled.new_zeros(tokens.logprobs.shape))


@LOSSES.register("dpo")
@dataclass(frozen=True, kw_only=True)
class Dpo(Loss):
    """Direct preference optimization (2305.18290), with the advantages of objective.py. Its loss is computed
    before the update, so that the loss by token is 0."""

    beta: float = knob(0.1, "how much the log ratio to the reference model counts", above=0)
    needs_proximal = False
    is_tokenwise = True
    compares_pairs = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        change = tokens.logprobs - tokens.logprobs.detach()
        return TokenLoss(loss=-tokens.advantage * change, clipped=tokens.sampled.new_zeros(change.shape))


@LOSSES.register("sequence_tis")
@dataclass(frozen=True, kw_only=True)
class SequenceTis(Clip, Loss):
    """Clips around the proximal policy, and weights whole trajectories with min(pi_proximal / pi_behaviour,
    sequence_cap)."""

    sequence_cap: float = knob(
        2.0, "cap of pi_old / pi_rollout of a trajectory; with sequence_mis one beyond it has no gradient", above=0
    )
    needs_proximal = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        rho = _sequence_log_ratio(tokens.proximal, tokens.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = self.weigh(rho).detach()
        return _weighted_surrogate(self, weight, _ratio(tokens.logprobs, tokens.proximal), tokens.advantage, rho)

    def weigh(self, rho: Tensor) -> Tensor:
        """[N, 1] weights of trajectories from their ratios."""
        return rho.clamp(max=self.sequence_cap)


@LOSSES.register("sequence_mis")
@dataclass(frozen=True, kw_only=True)
class SequenceMis(SequenceTis):
    """As SequenceTis, but a trajectory whose weight exceeds sequence_cap is masked."""

    def weigh(self, rho: Tensor) -> Tensor:
        return rho.masked_fill(rho > self.sequence_cap, 0.0)


@LOSSES.register("icepop")
@dataclass(frozen=True, kw_only=True)
class IcePop(Clip, Loss):
    """Clips around the proximal policy, and weights with pi_proximal / pi_behaviour, or 0 outside a band
    (2510.18855)."""

    band_low: float = knob(0.5, "tokens with pi_old / pi_rollout below have no gradient", low=0, high=1)
    band_high: float = knob(5.0, "and above", low=1)
    needs_proximal = True
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        rho = _ratio(tokens.proximal, tokens.behaviour)
        weight = rho.masked_fill((rho < self.band_low) | (rho > self.band_high), 0.0).detach()
        return _weighted_surrogate(self, weight, _ratio(tokens.logprobs, tokens.proximal), tokens.advantage, rho)


@LOSSES.register("decoupled_ppo_loglinear")
@dataclass(frozen=True, kw_only=True)
class DecoupledPpoLoglinear(_WeightCap, Clip, Loss):
    """Decoupled PPO whose proximal policy is interpolated between the behaviour and the current policy by the tokens'
    versions, which saves a forward pass (2512.06547, AReaL)."""

    needs_proximal = False
    is_tokenwise = True

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        current = tokens.logprobs.detach()
        # The token's version is `lags` versions before the proximal policy, and lags + 1 before the one being trained.
        share = tokens.lags.to(current.dtype) / (tokens.lags + 1)
        proximal = tokens.behaviour + share * (current - tokens.behaviour)
        weight = _ratio(proximal, tokens.behaviour).clamp(max=self.weight_cap)
        return _weighted_surrogate(self, weight, _ratio(tokens.logprobs, proximal), tokens.advantage)


def _weighted_policy_gradient(ratio: Tensor, weight: Tensor, tokens: Tokens) -> TokenLoss:
    """The policy gradient with a weight, which is the clipped ratio."""
    return TokenLoss(loss=-weight * tokens.advantage * tokens.logprobs, clipped=(ratio != weight), ratio=ratio)


def _weighted_surrogate(
    clip: Clip, weight: Tensor, ratio: Tensor, advantage: Tensor, rho: Tensor | None = None
) -> TokenLoss:
    """PPO's surrogate with a weight. rho: ratio by which the weight was masked; masked tokens count as clipped."""
    loss, is_clipped = -(weight * clip.surrogate(ratio, advantage)), clip.has_no_gradient(ratio, advantage)
    if rho is None:
        return TokenLoss(loss=loss, clipped=is_clipped, ratio=ratio)
    is_masked = (weight == 0).expand(ratio.shape)
    return TokenLoss(loss=loss, clipped=is_clipped | is_masked, ratio=rho.expand(ratio.shape).where(is_masked, ratio))

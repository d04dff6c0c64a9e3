"""The objective of a training step: a loss, a penalty on the distance to a reference model, and an entropy bonus. Works
on tensors by token; averaging is done elsewhere.

Direct preference optimization (DPO, 2305.18290) takes the best and the worst response of each group. The loss of a
pair is -log sigmoid(m), m = beta ((s_best - r_best) - (s_worst - r_worst)), with s and r the logprobs of whole
responses under the policy and the reference. Its gradient is that of a policy gradient whose advantages are
beta sigmoid(-m) and -beta sigmoid(-m). So a trainer that computes m before an update can train the two responses
separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from staleflow.tasks.training.loss import LOSSES, MAX_LOG_RATIO, Loss, TokenLoss, Tokens, log_distance
from staleflow.tasks.training.microbatches import LogprobsByRow, Row
from staleflow.tasks.training.trainer_settings import KlConfig, TrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

MAX_K3 = 10.0
"""Maximum k3 estimate of a token whose logprob is below the reference's, nats; as in verl, ROLL and slime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with its penalty and bonus."""

    loss: Loss
    kl: KlConfig
    entropy_bonus: float

    @classmethod
    def of(cls, training: TrainingConfig) -> Objective:
        """Create the objective of a job. Raises ConfigError if a user's loss cannot be constructed."""
        return cls(loss=LOSSES.make(training.loss), kl=training.kl, entropy_bonus=training.entropy_bonus)

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0 or self.loss.compares_pairs

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_bonus > 0

    @property
    def is_tokenwise(self) -> bool:
        """Whether the loss of each token depends on no other token."""
        sums_penalties = self.kl.coefficient > 0 and self.kl.place == "reward"
        return self.loss.is_tokenwise and not sums_penalties

    def trains(self, row: Row) -> bool:
        """Whether a row has a gradient. Without an advantage, only terms that are not proportional to it give one."""
        has_other_terms = self.needs_reference or self.needs_entropy or self.loss.trains_zero_advantage
        return row.trained and (has_other_terms or row.advantage != 0.0)

    def old_logprobs(self, tokens: Tokens) -> Tensor:
        """[N, T] logprobs under the policy that the loss uses as the old policy."""
        return tokens.proximal if self.loss.needs_proximal else tokens.behaviour

    def token_loss(self, tokens: Tokens, reference_logprobs: Tensor | None, entropy: Tensor | None) -> TokenLoss:
        """Compute the losses of a micro-batch. reference_logprobs: [N, T] logprobs under the reference model.
        entropy: [N, T] of each token's distribution, nats, with gradient. Both are None unless needed."""
        reference = reference_logprobs if self.kl.coefficient else None
        if reference is not None and self.kl.place != "loss":
            tokens = replace(tokens, advantage=self._penalize(tokens, reference))
        result = self.loss.token_loss(tokens)
        loss = result.loss
        if reference is not None and self.kl.place == "loss":
            loss = loss + self.kl.coefficient * kl_estimates(self.kl.estimator, tokens.logprobs, reference)
        if entropy is not None:
            loss = loss - self.entropy_bonus * entropy
        return replace(result, loss=loss)

    def _penalize(self, tokens: Tokens, reference: Tensor) -> Tensor:
        """[N, T] advantages minus the penalty of each token; with place "reward" also minus those of all later
        tokens."""
        penalties = kl_estimates(self.kl.estimator, self.old_logprobs(tokens), reference)
        if self.kl.place == "reward":
            penalties = penalties.flip(1).cumsum(1).flip(1)
        return tokens.advantage - self.kl.coefficient * penalties


def with_finite_logprobs(tokens: Tokens) -> Tokens:
    """Mask the tokens of a micro-batch whose stored logprob is infinite or NaN, because they have no importance ratio.
    Like tokens of environments they get logprobs of 0 and no loss, but count in the number of tokens that a mean is
    over."""
    unusable = ~tokens.behaviour.isfinite()
    return replace(
        tokens,
        logprobs=tokens.logprobs.masked_fill(unusable, 0),
        proximal=tokens.proximal.masked_fill(unusable, 0),
        behaviour=tokens.behaviour.masked_fill(unusable, 0),
        sampled=tokens.sampled & ~unusable,
    )


def kl_estimates(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N, T] estimates of KL(pi || reference) at tokens sampled from pi (http://joschu.net/blog/kl-approx.html)."""
    distance = log_distance(logprobs, reference)
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return 0.5 * distance**2
    # The estimate is not bounded for tokens far below the reference, which are hardly ever sampled.
    value = (-distance.clamp(min=-MAX_LOG_RATIO)).exp() + distance - 1
    return value.where(distance > 0, value.clamp(max=MAX_K3))


def select_pairs(rows: Iterable[Row]) -> list[Row]:
    """The responses with the highest and the lowest advantage of each group, in this order. Groups whose advantages are
    equal, and rows whose reward failed, are left out."""
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        if row.trained and row.num_sampled:
            by_group.setdefault(row.group, []).append(row)
    pairs = list[Row]()
    for members in by_group.values():
        best, worst = max(members, key=_advantage), min(members, key=_advantage)
        if best.advantage > worst.advantage:
            pairs += [best, worst]
    return pairs


def with_pair_advantages(
    rows: Sequence[Row],
    indices: Sequence[int],
    policy_logprobs: LogprobsByRow,
    reference_logprobs: LogprobsByRow,
    beta: float,
) -> tuple[dict[int, Row], float]:
    """The chosen rows with the advantages of their pairs, by row index, and the mean loss of the pairs.

    Args:
        rows: From `select_pairs`.
        indices: Indices of whole pairs: an even index and the next one, and so on.
        policy_logprobs: Logprobs of the chosen rows under the policy.
        reference_logprobs: Those under the reference model.
        beta: Weight of a log ratio.
    """
    ratio = {i: _log_ratio(rows[i], policy_logprobs[i], reference_logprobs[i]) for i in indices}
    weighted_rows, losses = dict[int, Row](), []
    for best, worst in zip(indices[::2], indices[1::2], strict=True):
        margin = beta * (ratio[best] - ratio[worst])
        losses.append(np.logaddexp(0.0, -margin))
        weight = float(beta * np.exp(-np.logaddexp(0.0, margin)))
        weighted_rows[best] = replace(rows[best], advantage=weight)
        weighted_rows[worst] = replace(rows[worst], advantage=-weight)
    return weighted_rows, float(np.mean(losses))


def _advantage(row: Row) -> float:
    return row.advantage


def _log_ratio(row: Row, policy: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """The log ratio of a whole response, nats, over the tokens that have a loss."""
    return float((policy - reference)[row.is_usable].sum(dtype=np.float64))

"""Sampling of tokens, and verification of draft tokens. Pure except for the random generator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """Sample a token for each row of logits.

    Args:
        logits: [rows, vocabulary].
        temperatures: of each row; 0 for its most likely token.

    Returns:
        The tokens, and their logprobs in nats at that temperature, or at 1 for a most likely token.
    """
    logits = logits.float()
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits = logits / torch.tensor(divisors, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    greedy = torch.tensor([temperature == 0.0 for temperature in temperatures], device=logits.device)
    if all(temperature == 0.0 for temperature in temperatures):
        tokens = logprobs.argmax(-1)
    else:
        # In double precision, where rounding of a sum over the vocabulary is far below any sampled probability.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        threshold = (
            torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=logits.device)
            * cumulative[:, -1:]
        )
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if any(temperature == 0.0 for temperature in temperatures):
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def num_accepted(drafted: Sequence[int], sampled: Sequence[int], eos_ids: Collection[int], max_tokens: int) -> int:
    """Number of draft tokens that are accepted. One more token is sampled after them.

    The first sampled token that differs from its draft is the last one kept, because later ones were computed after a
    token that is not in the response. So each kept token is drawn from the policy's distribution after the tokens
    before it. For drafts without a distribution this equals the rule of speculative sampling (arXiv 2302.01318: accept
    draft d with probability p(d), else draw from p without d).

    Args:
        drafted: draft tokens after the last known token.
        sampled: the tokens sampled after the last known token and after each draft token.
        eos_ids: tokens that end the response.
        max_tokens: maximum number of further tokens of the response.

    >>> num_accepted([5, 6, 7], [5, 9, 7, 8], (), 10)
    1
    """
    accepted = 0
    while (
        accepted < len(drafted)
        and drafted[accepted] == sampled[accepted]
        and sampled[accepted] not in eos_ids
        and accepted + 1 < max_tokens
    ):
        accepted += 1
    return accepted

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
        # In double precision, in which the rounding of a sum over a vocabulary is far below what is sampled ever.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        point = (
            torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=logits.device)
            * cumulative[:, -1:]
        )
        tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if any(temperature == 0.0 for temperature in temperatures):
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def num_accepted(drafted: Sequence[int], sampled: Sequence[int], eos_ids: Collection[int], max_tokens: int) -> int:
    """Number of draft tokens that are accepted. One more token is sampled after them.

    The first sampled token that differs from what was drafted is the last one kept: what comes after it was computed
    after a token that is none. So each kept token is drawn from the policy's own distribution after the tokens before
    it. Speculative sampling's rule (arXiv 2302.01318: accept draft d with probability p(d), else draw from p without d)
    is the same for drafts without a distribution of their own: the token that is drawn is d with probability p(d), and
    otherwise distributed as p without d.

    Args:
        drafted: what was drafted after the last known token.
        sampled: a token after each of the last known token and the drafted ones.
        eos_ids: tokens that end the response; nothing follows them.
        max_tokens: tokens that the response may still have.

    >>> num_accepted([5, 6, 7], [5, 9, 7, 8], (), 10)
    1
    """
    kept = 0
    while (
        kept < len(drafted)
        and drafted[kept] == sampled[kept]
        and sampled[kept] not in eos_ids
        and kept + 1 < max_tokens
    ):
        kept += 1
    return kept

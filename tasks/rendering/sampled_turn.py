"""A turn as it was sampled, for agents. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn of the model.

    Args:
        prompt_tokens: All token ids before the turn.
        tokens: Token ids of the turn.
        logprobs: [tokens] float32 logprobs under the policy that sampled them, nats.
        text: The tokens as text, without special ones.
        truncated: Whether a token limit ended the turn.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False

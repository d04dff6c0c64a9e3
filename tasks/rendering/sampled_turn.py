"""A turn as it was sampled, for agents. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn of the model. prompt_tokens: all token ids before it. tokens, logprobs: its own, float32 logprobs under
    the policy that sampled them, nats. text: of the tokens, without special ones. truncated: a limit of tokens ended
    it."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False

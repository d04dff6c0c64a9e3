"""A causal LM's output layer, asked for the logprobs of given tokens instead of for logits.

At a vocabulary of 152,000 a token's logits are 0.6 MB, with the copies that a loss keeps for its gradient 2 MB: of
8,192 tokens 5 to 16 GB, more than most models. So logits are computed only where a token was sampled, and in chunks;
where there are several, each chunk's are computed again for the gradient instead of being kept.

Invariants:
- No more than CHUNK_BYTES of logits, in float32 and not counting copies of them, are there at a time.
- What comes out does not depend on the chunks, but for rounding.
- A layer whose output the model changes further (a cap, a scale) is found by trying, and is asked for logits as ever:
  what it would be asked for here is not all that the model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**28
"""Bytes of logits of a chunk, at most: 441 tokens at a vocabulary of 152,000, enough for a matrix product at full
speed, and all tokens of a micro-batch at a small one."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens whose logprobs are asked for. chosen: [N, T] bool, where they are wanted; elsewhere they are 0. entropy:
    whether the entropy of what each was drawn from is wanted, too."""

    tokens: torch.Tensor  # [N, T] int64
    chosen: torch.Tensor
    temperature: float
    entropy: bool


class OutputLayer:
    """The output layer of a model. Stays in the model, in which it computes what it is asked for."""

    def __init__(self, model: Any, device: str) -> None:
        self._layer = model.get_output_embeddings()
        self._targets: Targets | None = None
        self.plain = False
        """Whether it can be asked for logprobs."""
        if self._layer is not None:
            self._logits = self._layer.forward
            self.plain = self._tried(model, device)
            self._layer.forward = self._computed

    @contextmanager
    def asked(self, targets: Targets) -> Iterator[None]:
        """While this lasts, the model gives [N, T, 1] logprobs, or [N, T, 2] with entropies, instead of logits."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _computed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for [N, T, H] hidden states."""
        targets = self._targets
        if targets is None:
            logits: torch.Tensor = self._logits(hidden)
            return logits
        chosen, tokens = targets.chosen.flatten(), targets.tokens.flatten()
        places = chosen.nonzero().squeeze(1)
        if not len(places):
            places = places.new_zeros(1)  # of a model in shards, every part has a gradient on every rank
        size = max(1, CHUNK_BYTES // (4 * self._layer.weight.shape[0]))
        again = len(places) > size and torch.is_grad_enabled()
        parts = []
        for part in places.split(size):
            args = (hidden.flatten(0, 1)[part], tokens[part], targets.temperature, targets.entropy)
            parts.append(checkpoint(self._found, *args, use_reentrant=False) if again else self._found(*args))
        found = torch.cat(parts).masked_fill(~chosen[places, None], 0)
        shape = targets.tokens.shape
        # Not a view: the gradient of what a model in shards returns is what has its parameters gathered again.
        whole = found.new_zeros(*shape, found.shape[1])
        return whole.index_put((places // shape[1], places % shape[1]), found)

    def _found(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool) -> torch.Tensor:
        return of_targets(self._logits(hidden).float() / temperature, tokens, entropy=entropy)

    def _tried(self, model: Any, device: str) -> bool:
        """Whether the model gives this layer's output as it is."""
        seen: list[torch.Tensor] = []

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(self._logits(hidden))
            return seen[-1]

        self._layer.forward = recorded
        with torch.no_grad():
            given = model(input_ids=torch.arange(3, device=device)[None], use_cache=False).logits
        return len(seen) == 1 and torch.equal(seen[0].float(), given.float())


def of_targets(scaled: torch.Tensor, tokens: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """[..., 1] logprobs of tokens under [..., V] logits over the temperature, float32, nats; or [..., 2], with the
    entropies of what they were drawn from."""
    losses = torch.nn.functional.cross_entropy(scaled.flatten(0, -2), tokens.flatten(), reduction="none")
    found = [-losses.view(tokens.shape)]
    if entropy:
        likely = scaled.softmax(-1)
        # Tokens that a model rules out have a logit of -inf, and 0 times that is no number.
        found.append(scaled.logsumexp(-1) - (likely * scaled.masked_fill(likely == 0, 0.0)).sum(-1))
    return torch.stack(found, -1)

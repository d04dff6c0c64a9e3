"""The output layer of a causal LM, which computes logprobs of given tokens, or a loss of them, instead of logits.

At a vocabulary of 152,000 a token's logits are 0.6 MB, with the copies that a loss keeps for its gradient 2 MB: of
8,192 tokens 5 to 16 GB, more than most models. So logits are computed only where a token was sampled, and in chunks.
Where a loss is known chunk by chunk, each one's gradient is computed at once, before the next one's logits; otherwise a
chunk's logits are computed again for it.

Invariants:
- No more than CHUNK_BYTES of logits, in float32 and not counting copies of them, are there at a time.
- What comes out does not depend on the chunks, but for rounding.
- A layer whose output the model changes further (a cap, a scale) is found by trying, and is asked for logits as ever:
  what it would be asked for here is not all that the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**28
"""Bytes of logits of a chunk, at most: 441 tokens at a vocabulary of 152,000, enough for a matrix product at full
speed, and all tokens of a micro-batch at a small one."""

Answer = Callable[[torch.Tensor], torch.Tensor]
"""What is made of [..., H] hidden states instead of [..., V] logits."""
PartLoss = Callable[[torch.Tensor], torch.Tensor]
"""The loss of some tokens, from [n, 1] logprobs, or [n, 2] with entropies."""


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """What to compute for tokens: logprobs at a temperature, and with `entropy` also the entropies of their
    distributions."""

    temperature: float
    entropy: bool


class LmHead:
    """The output layer of a model. It stays in the model, and computes what the current query asks for."""

    def __init__(self, model: Any, device: str) -> None:
        self._layer = model.get_output_embeddings()
        self._answer: Answer | None = None
        self.is_fused = False
        """Whether it can be asked for anything but logits."""
        if self._layer is not None:
            self._logits = self._layer.forward
            self.is_fused = self._tried(model, device)
            self._layer.forward = self._computed

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a chunk."""
        return max(1, CHUNK_BYTES // (4 * int(self._layer.weight.shape[0])))

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Context manager: the model returns the results of this query in place of logits."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor, query: LogprobQuery) -> torch.Tensor:
        """Compute [n, 1 or 2] logprobs, and entropies if queried, of the tokens that follow [n, H] hidden states."""
        size = self.most_tokens
        again = len(tokens) > size and torch.is_grad_enabled()
        parts = []
        for states, token_chunk in zip(hidden.split(size), tokens.split(size), strict=True):
            args = (states, token_chunk, query)
            parts.append(
                checkpoint(self._token_logprobs, *args, use_reentrant=False) if again else self._token_logprobs(*args)
            )
        return torch.cat(parts)

    def loss(
        self, hidden: torch.Tensor, tokens: torch.Tensor, query: LogprobQuery, parts: Sequence[tuple[int, PartLoss]]
    ) -> torch.Tensor:
        """Sum the losses of chunks of consecutive tokens. The gradient of each chunk is computed at once."""
        weights = [weight for weight in self._layer.parameters() if weight.requires_grad]

        def differentiated(states: torch.Tensor, present: torch.Tensor, of_part: PartLoss) -> tuple[torch.Tensor, Any]:
            with torch.enable_grad():
                states = states.detach().requires_grad_()
                loss = of_part(self.logprobs(states, present, query))
                return loss.detach(), torch.autograd.grad(loss, [states, *weights])

        loss: torch.Tensor = _AtOnce.apply(hidden, tokens, differentiated, parts, *weights)
        return loss

    def _computed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for [..., H] hidden states."""
        output: torch.Tensor = (self._answer or self._logits)(hidden)
        return output

    def _token_logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor, query: LogprobQuery) -> torch.Tensor:
        scaled = self._logits(hidden).float()
        if query.temperature != 1.0:
            scaled = scaled / query.temperature
        return target_logprobs(scaled, tokens, entropy=query.entropy)

    def _tried(self, model: Any, device: str) -> bool:
        """Whether the model gives this layer's output as it is."""
        logit_inputs: list[torch.Tensor] = []

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            logit_inputs.append(self._logits(hidden))
            return logit_inputs[-1]

        self._layer.forward = recorded
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, device=device)[None], use_cache=False).logits
        return len(logit_inputs) == 1 and torch.equal(logit_inputs[0].float(), logits.float())


class _AtOnce(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """A sum of losses whose gradients are computed with them, part after part."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        differentiated: Callable[[torch.Tensor, torch.Tensor, PartLoss], tuple[torch.Tensor, Any]],
        parts: Sequence[tuple[int, PartLoss]],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        loss, start = hidden.new_zeros((), dtype=torch.float32), 0
        of_hidden, of_weights = torch.empty_like(hidden), list[torch.Tensor]()
        for count, of_part in parts:
            positions = slice(start, start + count)
            part, (of_hidden[positions], *gradients) = differentiated(hidden[positions], tokens[positions], of_part)
            loss += part
            if of_weights:
                for sum_of, gradient in zip(of_weights, gradients, strict=True):
                    sum_of.add_(gradient)
            else:
                of_weights = gradients
            start += count
        ctx.gradients = [of_hidden, *of_weights]
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_hidden, *of_weights = ctx.gradients
        del ctx.gradients  # as large as the layer
        for gradient_of in (of_hidden, *of_weights):
            gradient_of.mul_(gradient)
        return of_hidden, None, None, None, *of_weights


def target_logprobs(scaled: torch.Tensor, tokens: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """Compute [..., 1] logprobs of tokens under [..., V] logits at a temperature, float32, nats; or [..., 2] with the
    entropies of their distributions."""
    losses = torch.nn.functional.cross_entropy(scaled.flatten(0, -2), tokens.flatten(), reduction="none")
    logprobs = [-losses.view(tokens.shape)]
    if entropy:
        likely = scaled.softmax(-1)
        # Tokens that a model rules out have a logit of -inf, and 0 times that is no number.
        logprobs.append(scaled.logsumexp(-1) - (likely * scaled.masked_fill(likely == 0, 0.0)).sum(-1))
    return torch.stack(logprobs, -1)

"""The output layer of a causal LM, which computes logprobs of tokens, or a loss of them, instead of logits.

With a vocabulary of 152,000 the logits of a token take 0.6 MB, or 2 MB with the copies that a loss keeps for its
gradient. For 8,192 tokens that is 5 to 16 GB, more than most models. So logits are computed only for sampled tokens,
and in chunks. If a loss is a sum over chunks, each chunk's gradient is computed before the next chunk's logits;
otherwise a chunk's logits are computed again in the backward pass.

Invariants:
- At most CHUNK_BYTES, or GPU_CHUNK_BYTES, of logits, in float32 and not counting copies, are in memory at a time.
- Results do not depend on the chunks, except for rounding.
- If a model changes its output layer's result (a cap, a scale), which a trial call shows, full logits are computed as
  usual, because this module would leave out the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES, GPU_CHUNK_BYTES = 2**28, 2**29
"""Maximum number of bytes of a chunk's logits, on CPU and on GPU: 441 and 882 tokens with a vocabulary of 152,000,
enough for a matrix product at full speed; all tokens of a micro-batch with a small vocabulary. On a GPU smaller chunks
take longer, because their many short operations must be started one by one."""

HiddenFunction = Callable[[torch.Tensor], torch.Tensor]
"""A function of [..., H] hidden states that replaces [..., V] logits."""
ChunkLoss = Callable[[torch.Tensor], torch.Tensor]
"""The loss of a chunk of tokens, from [n, 1] logprobs, or [n, 2] with entropies."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Settings of logprobs: the temperature, and whether to compute the entropies of the tokens' distributions too."""

    temperature: float
    with_entropy: bool


class LmHead:
    """The output layer of a model. It stays in the model, and computes logits, or the result of the hidden function
    that `replacing_logits` sets."""

    def __init__(self, model: Any, device: str) -> None:
        self._layer, self._device = model.get_output_embeddings(), device
        self._hidden_function: HiddenFunction | None = None
        self.can_replace_logits = False
        """Whether logits can be replaced by another function of the hidden states."""
        if self._layer is not None:
            self._logits = self._layer.forward
            self.can_replace_logits = self._returns_logits_unchanged(model, device)
            self._layer.forward = self._forward

    @property
    def max_chunk_tokens(self) -> int:
        """Maximum number of tokens of a chunk."""
        chunk_bytes = CHUNK_BYTES if self._device == "cpu" else GPU_CHUNK_BYTES
        return max(1, chunk_bytes // (4 * int(self._layer.weight.shape[0])))

    @contextmanager
    def replacing_logits(self, hidden_function: HiddenFunction) -> Iterator[None]:
        """Context manager: the model returns the results of this function in place of logits."""
        self._hidden_function = hidden_function
        try:
            yield
        finally:
            self._hidden_function = None

    def logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor, options: LogprobOptions) -> torch.Tensor:
        """Compute [n, 1 or 2] logprobs, and entropies if queried, of the tokens that follow [n, H] hidden states."""
        chunk_size = self.max_chunk_tokens
        recompute = len(tokens) > chunk_size and torch.is_grad_enabled()
        logprobs = []
        for hidden_chunk, token_chunk in zip(hidden.split(chunk_size), tokens.split(chunk_size), strict=True):
            args = (hidden_chunk, token_chunk, options)
            logprobs.append(
                checkpoint(self._token_logprobs, *args, use_reentrant=False)
                if recompute
                else self._token_logprobs(*args)
            )
        return torch.cat(logprobs)

    def loss(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        options: LogprobOptions,
        chunks: Sequence[tuple[int, ChunkLoss]],
    ) -> torch.Tensor:
        """Sum the losses of chunks of consecutive tokens. The gradient of each chunk is computed at once."""
        weights = [weight for weight in self._layer.parameters() if weight.requires_grad]

        def loss_and_gradients(
            hidden_chunk: torch.Tensor, token_chunk: torch.Tensor, chunk_loss: ChunkLoss
        ) -> tuple[torch.Tensor, Any]:
            with torch.enable_grad():
                hidden_chunk = hidden_chunk.detach().requires_grad_()
                loss = chunk_loss(self.logprobs(hidden_chunk, token_chunk, options))
                return loss.detach(), torch.autograd.grad(loss, [hidden_chunk, *weights])

        loss: torch.Tensor = _ChunkedLoss.apply(hidden, tokens, loss_and_gradients, chunks, *weights)
        return loss

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for [..., H] hidden states."""
        output: torch.Tensor = (self._hidden_function or self._logits)(hidden)
        return output

    def _token_logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor, options: LogprobOptions) -> torch.Tensor:
        scaled_logits = self._logits(hidden).float()
        if options.temperature != 1.0:
            scaled_logits = scaled_logits / options.temperature
        return target_logprobs(scaled_logits, tokens, with_entropy=options.with_entropy)

    def _returns_logits_unchanged(self, model: Any, device: str) -> bool:
        """Whether the model returns this layer's output unchanged, in a trial call."""
        logit_inputs: list[torch.Tensor] = []

        def recording_forward(hidden: torch.Tensor) -> torch.Tensor:
            logit_inputs.append(self._logits(hidden))
            return logit_inputs[-1]

        self._layer.forward = recording_forward
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, device=device)[None], use_cache=False).logits
        return len(logit_inputs) == 1 and torch.equal(logit_inputs[0].float(), logits.float())


class _ChunkedLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """A sum of chunk losses whose gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        loss_and_gradients: Callable[[torch.Tensor, torch.Tensor, ChunkLoss], tuple[torch.Tensor, Any]],
        chunks: Sequence[tuple[int, ChunkLoss]],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        loss, start = hidden.new_zeros((), dtype=torch.float32), 0
        hidden_gradient, weight_gradients = torch.empty_like(hidden), list[torch.Tensor]()
        for count, chunk_loss in chunks:
            positions = slice(start, start + count)
            loss_value, (hidden_gradient[positions], *gradients) = loss_and_gradients(
                hidden[positions], tokens[positions], chunk_loss
            )
            loss += loss_value
            if weight_gradients:
                for gradient_sum, gradient in zip(weight_gradients, gradients, strict=True):
                    gradient_sum.add_(gradient)
            else:
                weight_gradients = gradients
            start += count
        ctx.gradients = [hidden_gradient, *weight_gradients]
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden_gradient, *weight_gradients = ctx.gradients
        del ctx.gradients  # as large as the layer
        for stored_gradient in (hidden_gradient, *weight_gradients):
            stored_gradient.mul_(gradient)
        return hidden_gradient, None, None, None, *weight_gradients


def target_logprobs(scaled_logits: torch.Tensor, tokens: torch.Tensor, *, with_entropy: bool) -> torch.Tensor:
    """Compute [..., 1] logprobs of tokens under [..., V] logits at a temperature, float32, nats; or [..., 2] with the
    entropies of their distributions."""
    losses = torch.nn.functional.cross_entropy(scaled_logits.flatten(0, -2), tokens.flatten(), reduction="none")
    logprobs = [-losses.view(tokens.shape)]
    if with_entropy:
        probabilities = scaled_logits.softmax(-1)
        # Tokens that a model excludes have a logit of -inf, and 0 times that is NaN.
        logprobs.append(
            scaled_logits.logsumexp(-1) - (probabilities * scaled_logits.masked_fill(probabilities == 0, 0.0)).sum(-1)
        )
    return torch.stack(logprobs, -1)

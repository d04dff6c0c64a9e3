"""Logprobs of responses under a causal LM, at the sampling temperature.

The trainer compares them with the stored logprobs before a step, and differentiates them in it. Stored runs compute
them under any checkpoint.

Some rotary embeddings (longrope, dynamic NTK) choose the frequencies of all positions by the largest position of a
forward pass. Beyond their limit a row's logprobs depend on its micro-batch, so longer rows are refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.context_length import max_rotation_length
from staleflow.tasks.training.lm_head import LmHead, LogprobOptions, target_logprobs
from staleflow.tasks.training.microbatches import MicroBatch, Row, microbatches
from staleflow.tasks.training.packed_attention import PackedRowLengths, enable_packing
from staleflow.tasks.training.shared_prompts import PackedLayout

MicroBatchLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss of a part of a micro-batch, from its [N, T] logprobs, and [N, T] entropies or None."""


def to_device(array: npt.NDArray[Any], device: str) -> torch.Tensor:
    """Copy an array to a device, without waiting for the operations that are queued there."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledTargets:
    """The sampled tokens of a micro-batch, in the order of rows and columns; its first token if none was sampled."""

    tokens: torch.Tensor  # [n] int64
    indices: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # [n] rows and [n] columns of targets
    device_indices: tuple[torch.Tensor, torch.Tensor]  # the same, where the model is
    shape: tuple[int, ...]  # of targets
    is_empty: bool

    @classmethod
    def of(cls, batch: MicroBatch, device: str) -> _SampledTargets:
        rows, columns = np.nonzero(batch.mask > 0)
        is_empty = not len(rows)
        if is_empty:  # every parameter of a sharded model must get a gradient on every rank
            rows = columns = np.zeros(1, np.int64)
        return cls(
            tokens=to_device(batch.targets[rows, columns], device),
            indices=(rows, columns),
            device_indices=(to_device(rows, device), to_device(columns, device)),
            shape=batch.targets.shape,
            is_empty=is_empty,
        )

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[N, T, k] of [n, k], elsewhere 0."""
        if self.is_empty:
            values = values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0)
        # Not a view: a sharded model gathers its parameters again by a hook on the gradient of its output.
        return values.new_zeros(*self.shape, values.shape[1]).index_put(self.device_indices, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobModel:
    """A model with the settings to compute logprobs under it.

    Args:
        uses_bfloat16: Whether the forward pass uses bfloat16 autocast.
        token_budget: Tokens per forward pass, including padding.
        rank, num_ranks: Index of this process in the trainer's group, and size of the group.
    """

    model: Any
    device: str
    uses_bfloat16: bool
    temperature: float
    token_budget: int
    rank: int = 0
    num_ranks: int = 1
    lm_head: LmHead = field(init=False, repr=False)
    padding_reason: str = field(init=False, repr=False)
    """Why rows are padded; empty if the model computes them without padding."""
    max_row_length: int | None = field(init=False, repr=False)
    """Tokens of a row beyond which its logprobs would depend on its micro-batch; None if there is no limit."""

    def __post_init__(self) -> None:
        with self._autocast():
            object.__setattr__(self, "lm_head", LmHead(self.model, self.device))
            reason = "the model changes the logits of its output layer"
            if self.lm_head.can_replace_logits:
                reason = enable_packing(self.model, self.device, self.token_budget)
            object.__setattr__(self, "padding_reason", reason)
            object.__setattr__(self, "max_row_length", max_rotation_length(self.model.config.to_dict()))

    def at_temperature(self, temperature: float) -> LogprobModel:
        """The same model at another temperature."""
        other = copy.copy(self)
        object.__setattr__(other, "temperature", temperature)
        return other

    @property
    def packs_rows(self) -> bool:
        """Whether the model computes rows without padding."""
        return not self.padding_reason

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Compute [N, T] logprobs of the sampled tokens, nats, float32, 0 elsewhere. With gradient unless torch has
        disabled it."""
        return self._compute(batch, with_entropy=False)[..., 0]

    def backward(
        self, batch: MicroBatch, loss: MicroBatchLoss, *, with_entropy: bool, is_tokenwise: bool
    ) -> torch.Tensor:
        """Add the gradient of a loss to the model's gradients. Returns the logprobs, [N, T].

        loss: is called for parts of the batch that have whole rows. It is not called for a batch without sampled
        tokens. is_tokenwise: the loss of a token depends on no other token, so that a part may also be part of a row.
        """
        sampled = _SampledTargets.of(batch, self.device)
        if not self.lm_head.can_replace_logits:
            values = self._compute(batch, with_entropy=with_entropy)
            total = values.sum() if sampled.is_empty else loss(batch, *_split_entropy(values))
            total.backward()
            return values[..., 0].detach()
        chunk_values = list[torch.Tensor]()

        def make_chunk(part: MicroBatch) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
            sampled = _SampledTargets.of(part, self.device)

            def chunk_loss(values: torch.Tensor) -> torch.Tensor:
                chunk_values.append(values.detach())
                scatter = sampled.scatter(values)
                return scatter.sum() if sampled.is_empty else loss(part, *_split_entropy(scatter))

            return len(sampled.tokens), chunk_loss

        parts = [batch] if sampled.is_empty else batch.split(self.lm_head.max_chunk_tokens, may_split_rows=is_tokenwise)
        options = LogprobOptions(temperature=self.temperature, with_entropy=with_entropy)
        chunks = [make_chunk(part) for part in parts]
        hidden_function = functools.partial(self.lm_head.loss, tokens=sampled.tokens, options=options, chunks=chunks)
        self._forward(batch, sampled, hidden_function).backward()
        return sampled.scatter(torch.cat(chunk_values))[..., 0]

    def _compute(self, batch: MicroBatch, *, with_entropy: bool) -> torch.Tensor:
        """[N, T, 1 or 2] logprobs and entropies."""
        sampled = _SampledTargets.of(batch, self.device)
        options = LogprobOptions(temperature=self.temperature, with_entropy=with_entropy)
        if not self.lm_head.can_replace_logits:
            logits = self._forward(batch, sampled, None)
            return sampled.scatter(
                target_logprobs(logits.float() / self.temperature, sampled.tokens, with_entropy=with_entropy)
            )

        def logprobs(hidden: torch.Tensor) -> torch.Tensor:
            return sampled.scatter(self.lm_head.logprobs(hidden, sampled.tokens, options))

        return self._forward(batch, sampled, logprobs)

    def _autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.uses_bfloat16)

    def _forward(
        self,
        batch: MicroBatch,
        sampled: _SampledTargets,
        hidden_function: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run the model, and apply a function to the [n, H] hidden states from which tokens were sampled. Returns their
        [n, V] logits if the function is None."""
        inputs: dict[str, Any] = {}
        if self.packs_rows:
            layout = PackedLayout.of(batch.input_ids, batch.attention_mask.sum(1), batch.prompt_lengths)
            ids = to_device(batch.input_ids[layout.row, layout.position], self.device)[None]
            rows, columns = sampled.indices
            kept_positions = to_device(layout.packed_indices(rows, batch.response_start + columns), self.device)
            lengths = PackedRowLengths(layout.blocks)
            inputs = {"position_ids": lengths.positions(self.device), "row_lengths": lengths}
            selected = None
        else:
            # No mask is needed: padding is at the right end, and causal attention never reaches it.
            ids = to_device(batch.input_ids, self.device)
            kept_positions = torch.arange(batch.response_start, ids.shape[1] - 1, device=self.device)
            selected = sampled.device_indices

        def select_hidden(hidden: torch.Tensor) -> torch.Tensor:
            return hidden[0] if selected is None else hidden[selected]

        logits_replacement = (
            nullcontext()
            if hidden_function is None
            else self.lm_head.replacing_logits(lambda hidden: hidden_function(select_hidden(hidden)))
        )
        with logits_replacement, self._autocast():
            logits: torch.Tensor = self.model(
                input_ids=ids, **inputs, use_cache=False, logits_to_keep=kept_positions
            ).logits
        return select_hidden(logits) if hidden_function is None else logits

    def microbatches(
        self, rows: Sequence[Row], indices: Sequence[int], weights: npt.NDArray[np.float32]
    ) -> list[MicroBatch]:
        """The micro-batches of this rank. Raises ConfigError if a row is longer than `max_row_length`. weights:
        [len(indices)] weight of each row's tokens."""
        max_row_tokens = max((len(rows[i].prompt) + len(rows[i].response) for i in indices), default=0)
        if self.max_row_length is not None and max_row_tokens > self.max_row_length:
            raise ConfigError(
                f"a prompt and its response have {max_row_tokens} tokens: beyond {self.max_row_length} the model's "
                "rotary embedding depends on the longest row of a micro-batch, and so would all logprobs; lower "
                "rollout.max_new_tokens, or leave such rows out"
            )
        return microbatches(
            rows, indices, weights, self.token_budget, self.rank, self.num_ranks, is_packed=self.packs_rows
        )

    def row_logprobs(self, rows: Sequence[Row], indices: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
        """Compute [T] logprobs of the responses of the chosen rows that this rank computes, nats, by row index; 0 at
        tokens that were not sampled. Without gradient."""
        by_index: dict[int, npt.NDArray[np.float32]] = {}
        all_ones = np.ones(len(indices), np.float32)
        with torch.no_grad():
            for batch in self.microbatches(rows, indices, all_ones):
                by_index |= split_by_row(batch, rows, self.logprobs(batch))
        return by_index


def split_by_row(batch: MicroBatch, rows: Sequence[Row], values: torch.Tensor) -> dict[int, npt.NDArray[np.float32]]:
    """Split [N, T] values of a micro-batch into [T] values of each row's response, by row index."""
    array, by_index = values.detach().cpu().numpy(), {}
    for k, i in enumerate(batch.row_indices):
        start = len(rows[i].prompt) - 1 - batch.response_start
        by_index[i] = array[k, start : start + len(rows[i].response)]
    return by_index


def _split_entropy(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split [N, T, 1 or 2] values into logprobs, and entropies or None."""
    return values[..., 0], values[..., 1] if values.shape[-1] > 1 else None

"""Logprobs of the tokens of given responses under a causal LM, at the sampling temperature.

The trainer compares the stored ones with them before a step and differentiates them in it; offline, they are computed
under any checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staleflow.stores.errors import ConfigError
from staleflow.tasks.training.lm_head import LmHead, LogprobQuery, target_logprobs
from staleflow.tasks.training.microbatches import MicroBatch, Row, microbatches
from staleflow.tasks.training.packed_attention import PackedRowLengths, why_padded
from staleflow.tasks.training.rotary_limit import longest_row
from staleflow.tasks.training.shared_prompts import PackedLayout

PartLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss of a part of a micro-batch, from its [N, T] logprobs, and entropies if they are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """The sampled tokens of a micro-batch, in the order of rows and columns; its first one, if there is none."""

    tokens: torch.Tensor  # [n] int64
    index: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # [n] rows and [n] columns of targets
    place: tuple[torch.Tensor, torch.Tensor]  # the same, where the model is
    shape: tuple[int, ...]  # of targets
    none: bool

    @classmethod
    def of(cls, batch: MicroBatch, device: str) -> _Sampled:
        rows, columns = np.nonzero(batch.mask > 0)
        none = not len(rows)
        if none:  # of a model in shards, every part has a gradient on every rank
            rows = columns = np.zeros(1, np.int64)
        return cls(
            tokens=torch.from_numpy(batch.targets[rows, columns]).to(device),
            index=(rows, columns),
            place=(torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)),
            shape=batch.targets.shape,
            none=none,
        )

    def scattered(self, values: torch.Tensor) -> torch.Tensor:
        """[N, T, k] of [n, k], elsewhere 0."""
        if self.none:
            values = values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0)
        # Not a view: the gradient of what a model in shards returns is what has its parameters gathered again.
        return values.new_zeros(*self.shape, values.shape[1]).index_put(self.place, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobModel:
    """A model with the settings to compute logprobs under it.

    Args:
        half: Whether the forward pass uses bfloat16 autocast.
        token_budget: Tokens per forward pass, including padding.
        rank, ranks: Index of this process in the trainer's group, and size of the group.
    """

    model: Any
    device: str
    half: bool
    temperature: float
    token_budget: int
    rank: int = 0
    ranks: int = 1
    layer: LmHead = field(init=False, repr=False)
    padded_because: str = field(init=False, repr=False)
    """Why rows are padded; empty if the model computes them without padding."""
    longest_row: int | None = field(init=False, repr=False)
    """Tokens of a row beyond which its logprobs would depend on its micro-batch; None if there is no limit."""

    def __post_init__(self) -> None:
        with self._autocast():
            object.__setattr__(self, "layer", LmHead(self.model, self.device))
            why = "its logits are not those of its output layer as they are"
            if self.layer.is_fused:
                why = why_padded(self.model, self.device, self.token_budget)
            object.__setattr__(self, "padded_because", why)
            object.__setattr__(self, "longest_row", longest_row(self.model, self.device))

    @property
    def packs_rows(self) -> bool:
        """Whether the model computes rows without padding."""
        return not self.padded_because

    def batch(self, batch: MicroBatch) -> torch.Tensor:
        """Compute [N, T] logprobs of the sampled tokens, nats, float32, 0 elsewhere. With gradient unless torch has
        disabled it."""
        return self._computed(batch, entropy=False)[..., 0]

    def batch_and_entropy(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logprobs of `batch`, and [N, T] entropies of the tokens' distributions, nats."""
        logprobs, entropy = self._computed(batch, entropy=True).unbind(-1)
        return logprobs, entropy

    def backward(self, batch: MicroBatch, loss: PartLoss, *, entropy: bool, by_token: bool) -> torch.Tensor:
        """Add the gradient of a loss to the model's gradients. Returns the logprobs, [N, T].

        loss: is asked part by part, each with whole rows. by_token: it has a term for each token that depends on no
        other's logprob, and may be asked for parts of a row, too. Of a batch without sampled tokens it is not asked.
        """
        sampled = _Sampled.of(batch, self.device)
        if not self.layer.is_fused:
            values = self._computed(batch, entropy=entropy)
            total = values.sum() if sampled.none else loss(batch, *_unbound(values))
            total.backward()
            return values[..., 0].detach()
        kept = list[torch.Tensor]()

        def of_part(part: MicroBatch) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
            sampled = _Sampled.of(part, self.device)

            def part_loss(values: torch.Tensor) -> torch.Tensor:
                kept.append(values.detach())
                scattered = sampled.scattered(values)
                return scattered.sum() if sampled.none else loss(part, *_unbound(scattered))

            return len(sampled.tokens), part_loss

        parts = [batch] if sampled.none else batch.parts(self.layer.most_tokens, by_token=by_token)
        query = LogprobQuery(temperature=self.temperature, entropy=entropy)
        of_parts = [of_part(part) for part in parts]
        answer = functools.partial(self.layer.loss, tokens=sampled.tokens, query=query, parts=of_parts)
        self._through(batch, sampled, answer).backward()
        return sampled.scattered(torch.cat(kept))[..., 0]

    def _computed(self, batch: MicroBatch, *, entropy: bool) -> torch.Tensor:
        """[N, T, 1 or 2] logprobs and entropies."""
        sampled = _Sampled.of(batch, self.device)
        query = LogprobQuery(temperature=self.temperature, entropy=entropy)
        if not self.layer.is_fused:
            logits = self._through(batch, sampled, None)
            return sampled.scattered(
                target_logprobs(logits.float() / self.temperature, sampled.tokens, entropy=entropy)
            )

        def logprobs(hidden: torch.Tensor) -> torch.Tensor:
            return sampled.scattered(self.layer.logprobs(hidden, sampled.tokens, query))

        return self._through(batch, sampled, logprobs)

    def _autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half)

    def _through(
        self, batch: MicroBatch, sampled: _Sampled, answer: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor:
        """What is made of the [n, H] hidden states that sampled tokens are drawn from; their [n, V] logits without."""
        inputs: dict[str, Any] = {}
        if self.packs_rows:
            layout = PackedLayout.of(batch.input_ids, batch.attention_mask.sum(1), batch.prompts)
            ids = torch.from_numpy(batch.input_ids[layout.row, layout.column]).to(self.device)[None]
            rows, columns = sampled.index
            keep = torch.from_numpy(layout.packed_indices(rows, batch.start + columns)).to(self.device)
            lengths = PackedRowLengths(layout.blocks)
            inputs = {"position_ids": lengths.positions(self.device), "row_lengths": lengths}
            picked = None
        else:
            # Padding is at the right end, where no token of a row sees it: a mask would change nothing.
            ids = torch.from_numpy(batch.input_ids).to(self.device)
            keep = torch.arange(batch.start, ids.shape[1] - 1, device=self.device)
            picked = sampled.place

        def of_kept(hidden: torch.Tensor) -> torch.Tensor:
            return hidden[0] if picked is None else hidden[picked]

        answering = nullcontext() if answer is None else self.layer.answering(lambda hidden: answer(of_kept(hidden)))
        with answering, self._autocast():
            logits: torch.Tensor = self.model(input_ids=ids, **inputs, use_cache=False, logits_to_keep=keep).logits
        return of_kept(logits) if answer is None else logits

    def microbatches(
        self, rows: Sequence[Row], indices: Sequence[int], weights: npt.NDArray[np.float32]
    ) -> list[MicroBatch]:
        """The micro-batches of this rank. Raises ConfigError if a row is longer than `longest_row`. weights:
        [len(chosen)] weight of each row's tokens."""
        max_row_tokens = max((len(rows[i].prompt) + len(rows[i].response) for i in indices), default=0)
        if self.longest_row is not None and max_row_tokens > self.longest_row:
            raise ConfigError(
                f"a prompt and its response have {max_row_tokens} tokens: beyond {self.longest_row} the model's rotary "
                "embedding depends on the longest row of a micro-batch, and so would all logprobs; lower "
                "rollout.max_new_tokens, or leave such rows out"
            )
        return microbatches(rows, indices, weights, self.token_budget, self.rank, self.ranks, unpadded=self.packs_rows)

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
        """Compute [T] logprobs of the responses of those chosen rows that are this rank's, nats, by row index; 0 at
        tokens that were not sampled. Without gradient."""
        by_index: dict[int, npt.NDArray[np.float32]] = {}
        all_ones = np.ones(len(indices), np.float32)
        with torch.no_grad():
            for batch in self.microbatches(rows, indices, all_ones):
                by_index |= by_row(batch, rows, self.batch(batch))
        return by_index


def by_row(batch: MicroBatch, rows: Sequence[Row], values: torch.Tensor) -> dict[int, npt.NDArray[np.float32]]:
    """Split [N, T] values of a micro-batch into [T] values of each row's response, by row index."""
    array, by_index = values.detach().cpu().numpy(), {}
    for k, i in enumerate(batch.rows):
        start = len(rows[i].prompt) - 1 - batch.start
        by_index[i] = array[k, start : start + len(rows[i].response)]
    return by_index


def _unbound(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs and entropies, if there are any, of [N, T, 1 or 2] both."""
    return values[..., 0], values[..., 1] if values.shape[-1] > 1 else None

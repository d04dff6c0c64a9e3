"""Log-probabilities of given responses' tokens under a causal LM, at the sampling temperature.

The trainer compares the stored ones with them before a step and differentiates them in it; offline, they are computed
under any checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.training.head import OutputLayer, Targets, of_targets
from tasks.training.packing import MicroBatch, Row, microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobModel:
    """A model to compute logprobs under, with the settings for it. half: forward under bfloat16 autocast. token_budget:
    padded tokens per forward pass. rank, ranks: this process and how many there are in a trainer's group."""

    model: Any
    device: str
    half: bool
    temperature: float
    token_budget: int
    rank: int = 0
    ranks: int = 1
    layer: OutputLayer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", OutputLayer(self.model, self.device))

    def batch(self, batch: MicroBatch) -> torch.Tensor:
        """[N, T] log-probabilities of the sampled targets, nats, float32, elsewhere 0; with gradient unless torch has
        it disabled."""
        return self._computed(batch, entropy=False)[..., 0]

    def batch_and_entropy(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and [N, T] the entropies of what the targets were drawn from, nats."""
        logprobs, entropy = self._computed(batch, entropy=True).unbind(-1)
        return logprobs, entropy

    def _computed(self, batch: MicroBatch, *, entropy: bool) -> torch.Tensor:
        ids, attention, tokens, mask = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (batch.input_ids, batch.attention_mask, batch.targets, batch.mask)
        )
        chosen = mask > 0
        targets = Targets(tokens=tokens, chosen=chosen, temperature=self.temperature, entropy=entropy)
        keep = torch.arange(batch.start, ids.shape[1] - 1, device=self.device)
        asked = self.layer.asked(targets) if self.layer.plain else nullcontext()
        with asked, torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half):
            found = self.model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=keep).logits
        if not self.layer.plain:
            found = of_targets(found.float() / self.temperature, tokens, entropy=entropy)
            found = found.masked_fill(~chosen[..., None], 0)
        result: torch.Tensor = found
        return result

    def microbatches(
        self, rows: Sequence[Row], chosen: Sequence[int], weights: npt.NDArray[np.float32]
    ) -> list[MicroBatch]:
        """This rank's micro-batches of the chosen rows. weights: [len(chosen)], of their tokens."""
        return microbatches(rows, chosen, weights, self.token_budget, self.rank, self.ranks)

    def rows(self, rows: Sequence[Row], chosen: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
        """[T] log-probabilities of the response of each chosen row that is this rank's, nats, by row index; 0 at given
        tokens. Without gradient."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        ones = np.ones(len(chosen), np.float32)
        with torch.no_grad():
            for batch in self.microbatches(rows, chosen, ones):
                found |= by_row(batch, rows, self.batch(batch))
        return found


def by_row(batch: MicroBatch, rows: Sequence[Row], values: torch.Tensor) -> dict[int, npt.NDArray[np.float32]]:
    """[T] values of each row's response, by row index, from [N, T] those of a micro-batch."""
    held, found = values.detach().cpu().numpy(), {}
    for k, i in enumerate(batch.rows):
        begin = len(rows[i].prompt) - 1 - batch.start
        found[i] = held[k, begin : begin + len(rows[i].response)]
    return found

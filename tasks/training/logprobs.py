"""Log-probabilities of given responses' tokens under a causal LM, at the sampling temperature.

The trainer compares the stored ones with them before a step and differentiates them in it; offline, they are computed
under any checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.checkpoint import checkpoint

from tasks.training.packing import MicroBatch, Row, microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobModel:
    """A model to compute logprobs under, with the settings for it. half: forward under bfloat16 autocast. token_budget:
    padded tokens per forward pass."""

    model: Any
    device: str
    half: bool
    temperature: float
    token_budget: int

    def batch(self, batch: MicroBatch) -> torch.Tensor:
        """[N, T] log-probabilities of the targets, nats, float32; with gradient unless torch has it disabled."""
        return self._of_targets(batch, self._scaled(batch))

    def batch_and_entropy(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and [N, T] the entropies of what the targets were drawn from, nats. These keep no second tensor of
        the size of the logits for their gradient: they are computed again."""
        scaled = self._scaled(batch)
        entropy: torch.Tensor = checkpoint(_entropy, scaled, use_reentrant=False)
        return self._of_targets(batch, scaled), entropy

    def _scaled(self, batch: MicroBatch) -> torch.Tensor:
        """[N, T, V] logits over the temperature, float32."""
        ids = torch.from_numpy(batch.input_ids).to(self.device)
        attention = torch.from_numpy(batch.attention_mask).to(self.device)
        keep = torch.arange(batch.start, ids.shape[1] - 1, device=self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half):
            logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=keep).logits
        scaled: torch.Tensor = logits.float() / self.temperature
        return scaled

    def _of_targets(self, batch: MicroBatch, scaled: torch.Tensor) -> torch.Tensor:
        targets = torch.from_numpy(np.ascontiguousarray(batch.targets)).to(self.device)
        flat = torch.nn.functional.cross_entropy(scaled.flatten(0, 1), targets.flatten(), reduction="none")
        return -flat.view(targets.shape)

    def rows(self, rows: Sequence[Row], chosen: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
        """[T] log-probabilities of each chosen row's response, nats, by row index. Without gradient."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        ones = np.ones(len(chosen), np.float32)
        with torch.no_grad():
            for batch in microbatches(rows, chosen, ones, self.token_budget):
                logprobs = self.batch(batch).cpu().numpy()
                for k, i in enumerate(batch.rows):
                    begin = len(rows[i].prompt) - 1 - batch.start
                    found[i] = logprobs[k, begin : begin + len(rows[i].response)]
        return found


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)

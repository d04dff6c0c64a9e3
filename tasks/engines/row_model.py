"""A transformers model that computes new tokens of several rows of a batch in one forward pass.

A model whose layers are all attention layers gets the new tokens of all rows packed into one sequence, without padding.
A model with recurrent layers gets one sequence for each row; all rows must have the same number of new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staleflow.tasks.engines.row_attention import current_row_pass
from staleflow.tasks.engines.row_cache import RowCache
from staleflow.tasks.engines.row_storage import BatchRow

TRIAL_TOKENS = [0, 1, 2, 1, 0, 2]
"""Input for detecting a model's properties. All vocabularies have these tokens."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in the arguments of `forward`: since transformers 5.20, before 5.20, and for recurrent models."""
ROUNDING_TOLERANCE = 0.05
"""Largest difference of equal logits that rounding in half precision can cause, in standard deviations of the
logits."""


class RowModel:
    """A causal LM of transformers with the attention of row_attention.py. before_pass: called before each forward pass
    with one row for each token of the pass, in the order of the tokens."""

    def __init__(
        self, model: Any, page_tokens: int, before_pass: Callable[[Sequence[BatchRow]], object] | None = None
    ) -> None:
        self._model = model
        self._page_tokens = page_tokens
        self._before_pass = before_pass
        names = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in names)
        self._latent_layers: set[int] = set()
        self.cache = self.new_cache()
        with torch.inference_mode():
            self._detect_properties()

    def _detect_properties(self) -> None:
        """Detect which layers cache latents (RowPass adds them to the set in the first pass), and whether recurrent
        layers can compute several new tokens from a state that is not empty: in some models these ignore the state."""
        full_row, split_row, cache = BatchRow(), BatchRow(), self.new_cache()
        (expected_logits,) = self.logits([(full_row, TRIAL_TOKENS)], [1], self.new_cache())
        self.cache.has_latents = bool(self._latent_layers)
        if not self.cache.can_crop:
            self.logits([(split_row, TRIAL_TOKENS[:3])], [1], cache)
            split_row.length = 3
            (actual,) = self.logits([(split_row, TRIAL_TOKENS[3:])], [1], cache)
            self.cache.can_split_input = bool(
                (actual - expected_logits).abs().max() < ROUNDING_TOLERANCE * expected_logits.std()
            )

    def new_cache(self) -> RowCache:
        """Return an empty cache for this model."""
        return RowCache(self._model.config, self._page_tokens)

    def logits(
        self,
        new_tokens: Sequence[tuple[BatchRow, Sequence[int]]],
        num_logits: Sequence[int],
        cache: RowCache | None = None,
    ) -> list[torch.Tensor]:
        """Run one forward pass over new tokens of rows, and cache them. The caller must add their number to the length
        of each row.

        Args:
            new_tokens: Rows and their new tokens; for a model with recurrent layers the same number of tokens for each
                row.
            num_logits: For each row, the number of its last new tokens whose logits are returned.
            cache: The cache that has these rows; None for `self.cache`.

        Returns:
            For each row [num_logits, vocabulary], in the model's dtype.
        """
        cache = cache or self.cache
        device = self._model.device
        row_pass = cache.begin_pass([(row, len(tokens)) for row, tokens in new_tokens], self._latent_layers, device)
        if self._before_pass is not None:
            self._before_pass([new_tokens[i][0] for i in row_pass.order for _ in new_tokens[i][1]])
        ids = [token for i in row_pass.order for token in new_tokens[i][1]]
        positions = [new_tokens[i][0].length + n for i in row_pass.order for n in range(len(new_tokens[i][1]))]
        logits_to_keep: int | torch.Tensor  # positions, or the number of last ones in each row
        if cache.can_crop:
            shape, end = (1, len(ids)), 0
            positions_to_keep: list[int] = []
            for i in row_pass.order:
                end += len(new_tokens[i][1])
                positions_to_keep += range(end - num_logits[i], end)
            logits_to_keep = torch.tensor(positions_to_keep or [0], device=device)
        else:
            shape, logits_to_keep = (len(new_tokens), len(new_tokens[0][1])), max(*num_logits, 1)
        token = current_row_pass.set(row_pass)
        try:
            output = self._model(
                input_ids=torch.tensor(ids, device=device).view(shape),
                position_ids=torch.tensor(positions, device=device).view(shape),
                **{self._cache_name: cache},
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        finally:
            current_row_pass.reset(token)
        logits: list[torch.Tensor] = [output.logits[0, :0]] * len(new_tokens)
        start = 0
        for index, i in enumerate(row_pass.order):
            if cache.can_crop:
                logits[i] = output.logits[0, start : start + num_logits[i]]
                start += num_logits[i]
            elif num_logits[i]:
                logits[i] = output.logits[index, -num_logits[i] :]
        return logits

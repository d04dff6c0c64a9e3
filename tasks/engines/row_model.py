"""A model that computes some new tokens of some rows of a batch in one pass.

Rows of a model that only attends are computed as one sequence, one row's new tokens after the other's, as many as each
has: nothing is padded but what attention reads. Where layers have states, rows are sequences of their own, all of as
many new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staleflow.tasks.engines.row_attention import current
from staleflow.tasks.engines.row_cache import RowCache
from staleflow.tasks.engines.row_storage import BatchRow

TRIAL = [0, 1, 2, 1, 0, 2]
"""Tokens that every vocabulary has."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What a model's forward calls its cache: as of transformers 5.20, before, and where it has states only."""
ROUNDING = 0.05
"""Difference of logits, of their standard deviation, that rounding may make in half precision."""


class RowModel:
    """A causal LM of transformers with the attention of row_attention.py. before: called before each pass with the row
    of each of its tokens, in its order."""

    def __init__(self, model: Any, page: int, before: Callable[[Sequence[BatchRow]], object] | None = None) -> None:
        self._model = model
        self._page = page
        self._before = before
        names = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in names)
        self._expanding: set[int] = set()
        self.cache = self.new_cache()
        with torch.inference_mode():
            self._try_out()

    def _try_out(self) -> None:
        """Find out which layers expand what they have cached, and whether states go on from several new tokens: some
        models compute those as if nothing were before them."""
        full_row, begun, cache = BatchRow(), BatchRow(), self.new_cache()
        (expected,) = self.logits([(full_row, TRIAL)], [1], self.new_cache())
        if not self.cache.can_crop:
            self.logits([(begun, TRIAL[:3])], [1], cache)
            begun.length = 3
            (continued,) = self.logits([(begun, TRIAL[3:])], [1], cache)
            self.cache.continues = bool((continued - expected).abs().max() < ROUNDING * expected.std())

    def new_cache(self) -> RowCache:
        """A cache without rows."""
        return RowCache(self._model.config, self._page)

    def logits(
        self, new: Sequence[tuple[BatchRow, Sequence[int]]], wanted: Sequence[int], cache: RowCache | None = None
    ) -> list[torch.Tensor]:
        """Compute new tokens of rows. Their lengths stay as they are: what counts as computed is for the caller to say.

        Args:
            new: rows and what follows their computed tokens, for layers with states as many tokens of each.
            wanted: for each row, after how many of its last new tokens the next one is to be predicted.
            cache: what the rows are in, if not in this model's own.

        Returns:
            For each row [wanted, vocabulary], float32.
        """
        cache = cache or self.cache
        device = self._model.device
        row_pass = cache.begin_pass([(row, len(tokens)) for row, tokens in new], self._expanding, device)
        if self._before is not None:
            self._before([new[i][0] for i in row_pass.order for _ in new[i][1]])
        ids = [token for i in row_pass.order for token in new[i][1]]
        positions = [new[i][0].length + n for i in row_pass.order for n in range(len(new[i][1]))]
        logit_positions: Any
        if cache.can_crop:
            shape, logit_positions, end = (1, len(ids)), [], 0
            for i in row_pass.order:
                end += len(new[i][1])
                logit_positions += range(end - wanted[i], end)
            logit_positions = torch.tensor(logit_positions or [0], device=device)
        else:
            shape, logit_positions = (len(new), len(new[0][1])), max(*wanted, 1)
        token = current.set(row_pass)
        try:
            output = self._model(
                input_ids=torch.tensor(ids, device=device).view(shape),
                position_ids=torch.tensor(positions, device=device).view(shape),
                **{self._cache_name: cache},
                use_cache=True,
                logits_to_keep=logit_positions,
            )
        finally:
            current.reset(token)
        logits: list[torch.Tensor] = [output.logits[0, :0]] * len(new)
        start = 0
        for index, i in enumerate(row_pass.order):
            if cache.can_crop:
                logits[i] = output.logits[0, start : start + wanted[i]]
                start += wanted[i]
            elif wanted[i]:
                logits[i] = output.logits[index, -wanted[i] :]
        return logits

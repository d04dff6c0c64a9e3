"""Memory of the transformers engine's storage, against the tokens that its scheduler counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from staleflow.pipeline.sizing.memory import STORAGE_FACTOR
from staleflow.tasks.engines.row_storage import BatchRow, Buckets, LayerStorage

PAGE_TOKENS = 32
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda rng: rng.randint(1, 1160),
    "lognormal": lambda rng: min(2000, int(rng.lognormvariate(5.5, 0.8)) + 1),
    "long tail": lambda rng: min(4000, int(rng.lognormvariate(6, 1.1)) + 1),
    "equal": lambda rng: 512,
}
"""Numbers of sampled tokens of a response."""


def write(layer: LayerStorage, buckets: Buckets, row: BatchRow, tokens: int, value: float) -> None:
    """Write new tokens of a row, all with this value."""
    positions = row.slot * row.capacity + torch.arange(row.length, row.length + tokens)
    new = torch.full((tokens, 1, 1), value)
    layer.write(row.capacity, buckets.num_rows(row.capacity), positions, new, new)
    row.length += tokens


@pytest.mark.parametrize("starts_together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_storage_takes_at_most_the_planned_multiple_of_the_counted_tokens(lengths: str, starts_together: bool) -> None:
    """32 rows grow by 16 tokens a step. Ended rows are replaced at once, or when all have ended."""
    rng, layer, num_rows = random.Random(0), LayerStorage(), 32
    buckets = Buckets([layer], PAGE_TOKENS)
    rows: dict[int, tuple[BatchRow, int]] = {}
    num_started = most_room = most_counted = 0
    for _ in range(400):
        while len(rows) < num_rows and not (starts_together and rows and num_started % num_rows == 0):
            row, num_started = BatchRow(), num_started + 1
            prompt_tokens = rng.randint(40, 200)
            buckets.reserve(row, prompt_tokens)
            write(layer, buckets, row, prompt_tokens, num_started)
            rows[num_started] = row, prompt_tokens + LENGTHS[lengths](rng)
        for number, (row, end) in tuple(rows.items()):
            buckets.reserve(row, row.length + 16)
            write(layer, buckets, row, 16, number)
            if row.length >= end:
                assert torch.equal(layer.read(row)[0], torch.full((1, row.length, 1), float(number)))
                buckets.remove(row)
                del rows[number]
        room = sum(bucket.shape[0] * bucket.shape[2] for bucket in layer.keys.values())
        counted = sum(-(-row.length // PAGE_TOKENS) * PAGE_TOKENS for row, _ in rows.values())
        assert room < 4 * counted or room == counted == 0
        most_room, most_counted = max(most_room, room), max(most_counted, counted)
    assert num_started >= 2 * num_rows
    assert most_room <= STORAGE_FACTOR * most_counted

"""Memory of the transformers engine's storage, against the tokens that its scheduler counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from staleflow.pipeline.sizing.memory import KV_STORAGE_FACTOR
from staleflow.tasks.engines.row_storage import BatchRow, Buckets, LayerStorage

PAGE_TOKENS = 32
KV_TOKENS = 20_000
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
def test_storage_of_a_full_cache_takes_at_most_the_planned_multiple_of_kv_tokens(
    lengths: str, starts_together: bool
) -> None:
    """Responses start while their prompts fit, or when all have ended. They grow by 16 tokens a step; the one that
    started last is evicted if there is no room."""
    rng, layer = random.Random(0), LayerStorage()
    buckets = Buckets([layer], PAGE_TOKENS)
    rows: dict[int, tuple[BatchRow, int]] = {}
    num_started = num_evicted = num_ended = 0

    def counted() -> int:
        return sum(-(-row.length // PAGE_TOKENS) * PAGE_TOKENS for row, _ in rows.values())

    for _ in range(400):
        may_start = not (starts_together and rows)
        while may_start and counted() + (prompt_tokens := rng.randint(40, 200)) + PAGE_TOKENS <= KV_TOKENS:
            row, num_started = BatchRow(), num_started + 1
            buckets.reserve(row, prompt_tokens)
            write(layer, buckets, row, prompt_tokens, num_started)
            rows[num_started] = row, prompt_tokens + LENGTHS[lengths](rng)
        for number, (row, end) in tuple(rows.items()):
            while number in rows and counted() + PAGE_TOKENS > KV_TOKENS:
                buckets.remove(rows.pop(max(rows))[0])
                num_evicted += 1
            if number not in rows:
                break
            buckets.reserve(row, row.length + 16)
            write(layer, buckets, row, 16, number)
            if row.length >= end:
                assert torch.equal(layer.read(row)[0], torch.full((1, row.length, 1), float(number)))
                buckets.remove(row)
                del rows[number]
                num_ended += 1
        room = sum(bucket.shape[0] * bucket.shape[2] for bucket in layer.keys.values())
        assert room < 4 * counted() or room == counted() == 0
        assert room <= KV_STORAGE_FACTOR * KV_TOKENS
    assert num_evicted and num_ended >= 50

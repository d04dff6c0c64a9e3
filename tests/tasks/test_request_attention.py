"""Attention by requests equals attention by each request alone, whatever steps are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from staleflow.tasks.engines.request_attention import SHORT, NewTokens, Shape, StepRequests, attend, step_requests

PAGE, STRIDE, SIZE = 4, 8, 16
"""Tokens of a page, places from a page to the next, numbers of a head."""


def step(requests: Sequence[NewTokens], sharing: int = 1) -> StepRequests:
    shape = Shape(page_tokens=PAGE, stride=STRIDE, sharing=sharing, dtype=torch.float32)
    return step_requests(requests, shape, torch.device("cpu"))


@given(
    lengths=st.lists(st.tuples(st.integers(1, SHORT + 5), st.integers(0, 19)), min_size=1, max_size=9),
    groups=st.sampled_from([1, 2]),
    each=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=settings().max_examples // 2, deadline=None)
def test_each_new_token_attends_to_its_own_request_and_to_nothing_after_it(
    lengths: list[tuple[int, int]], groups: int, each: int, seed: int
) -> None:
    """lengths: new tokens, and those before them, of each request. What nothing was written to is not a number."""
    rng, draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    held = [-(-(past + count) // PAGE) for count, past in lengths]
    free = list(rng.permutation(sum(held) + 3))
    cached = torch.full((2, STRIDE * len(free) + PAGE, groups, SIZE), torch.nan)
    requests, first = [], 0
    for (count, past), pages in zip(lengths, held, strict=True):
        requests.append(NewTokens(first, count, past, [int(free.pop()) for _ in range(pages)]))
        first += count
    query = torch.randn(groups * each, first, SIZE, generator=draw)
    contexts = []
    for row in requests:
        places = [row.pages[n // PAGE] * STRIDE + n % PAGE for n in range(row.past + row.new)]
        cached[:, places] = torch.randn(2, len(places), groups, SIZE, generator=draw)
        contexts.append(cached[:, places])
    rows = step(requests, each)
    key, value = (one[rows.read_index].transpose(0, 1) for one in cached)
    found = attend(query, key, value, rows, None)
    assert found.shape == (first, groups * each, SIZE)
    for row, context in zip(requests, contexts, strict=True):
        for n in range(row.new):
            seen = context[:, : row.past + n + 1].transpose(1, 2).repeat_interleave(each, 1)
            alone = scaled_dot_product_attention(query[:, None, row.first + n], seen[0], seen[1])
            torch.testing.assert_close(found[row.first + n], alone[:, 0], rtol=1e-5, atol=1e-5)


def test_requests_that_decode_are_padded_to_those_of_like_length_alone() -> None:
    """Neither a prefill of many tokens nor a long context widens what is read for the others."""
    requests = [
        NewTokens(0, 1, 6, [0, 1]), NewTokens(1, 500, 0, range(2, 127)), NewTokens(501, 1, 4, [127, 128]),
        NewTokens(502, 2, 98, range(129, 154)),
    ]  # fmt: skip
    rows = step(requests)
    assert [tuple(one.mask.shape) for one in rows.beside] == [(2, 1, 1, 7), (1, 1, 2, 100)]
    assert [(one.first, one.new) for one in rows.alone] == [(1, 500)]
    assert len(rows.read_index) == 500 + 2 * 7 + 100


def test_a_steps_new_tokens_are_told_apart_from_padding() -> None:
    requests = [NewTokens(0, 3, 0, [0]), NewTokens(3, 1, 0, [1])]
    (some,) = step(requests).beside
    assert some.queries is not None
    assert some.own is not None
    assert some.queries[some.own].tolist() == [0, 1, 2, 3]
    requests = [NewTokens(0, 1, 0, [0]), NewTokens(1, 1, 0, [1])]
    (some,) = step(requests).beside
    assert some.own is None
    assert some.queries is None

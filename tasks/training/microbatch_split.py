"""Splits rows into micro-batches, and each micro-batch among the ranks of a trainer. Pure.

The ranks compute in lockstep, because each layer's parameters are gathered from all of them. So it is not enough that
ranks have equal numbers of tokens in total; they must be equal in each micro-batch.

Invariants:
- Every row is in exactly one part of one micro-batch. A micro-batch has a part for each rank; it may be empty, but one
  of them is not.
- A part's rows times its longest row are within the budget, unless it is a single row.
- The parts of a micro-batch differ by one row at most, and hold rows that are neighbours in length.
- No other split of the sorted rows takes less time, if the time of a micro-batch is that of a rank's padded tokens plus
  a constant overhead.
- A group of one rank has one part per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RowIndices = tuple[int, ...]
PASS_OVERHEAD_TOKENS, GATHER_OVERHEAD_TOKENS = 256, 2048
"""Overhead of a micro-batch, as a number of tokens that take the same time: in one process, and with ranks, where each
layer's parameters are gathered for it (8 bytes per parameter at 400 GB/s, against arithmetic at 400 TFLOP/s)."""


def split_microbatches(lengths: Sequence[int], ranks: int, token_budget: int) -> list[tuple[RowIndices, ...]]:
    """Split rows into micro-batches: for each, the row indices of each rank. lengths: tokens of each row. token_budget:
    maximum number of padded tokens per rank.

    Rows are split from the shortest to the longest, and dealt to the ranks back and forth, so that no rank always gets
    the longer ones.

    >>> split_microbatches([5, 1, 4, 2, 3], ranks=2, token_budget=8)
    [((1,), (3, 4)), ((2,), (0,))]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    ends = _microbatch_ends([lengths[i] for i in order], ranks, token_budget)
    return [_deal_to_ranks(order[start:end], ranks) for start, end in zip([0, *ends], ends, strict=False)]


def _microbatch_ends(lengths: Sequence[int], ranks: int, token_budget: int) -> list[int]:
    """Ends of the micro-batches of rows with ascending lengths. By dynamic programming: the best split of the first
    rows is the best split of fewer rows plus one micro-batch."""
    overhead = PASS_OVERHEAD_TOKENS if ranks == 1 else GATHER_OVERHEAD_TOKENS
    cost = np.zeros(len(lengths) + 1, np.int64)
    starts = np.zeros(len(lengths) + 1, np.int64)
    for end, max_length in enumerate(lengths, start=1):
        first = max(0, end - ranks * max(1, token_budget // max_length))
        rows_per_rank = -(-(end - np.arange(first, end)) // ranks)
        totals = cost[first:end] + rows_per_rank * max_length + overhead
        best = int(totals.argmin())
        cost[end], starts[end] = totals[best], first + best
    ends, end = list[int](), len(lengths)
    while end:
        ends.append(end)
        end = int(starts[end])
    return ends[::-1]


def _deal_to_ranks(rows: Sequence[int], ranks: int) -> tuple[RowIndices, ...]:
    """Deal rows to ranks back and forth: 0, 1, 2, 2, 1, 0, 0, ..."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for index, row in enumerate(rows):
        round_index, position = divmod(index, ranks)
        parts[position if round_index % 2 == 0 else ranks - 1 - position].append(row)
    return tuple(tuple(part) for part in parts)

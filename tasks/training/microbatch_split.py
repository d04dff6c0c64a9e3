"""Splits rows into micro-batches, and each micro-batch among the ranks of a trainer. Pure.

The ranks compute in lock step: each layer's parameters are gathered from all of them. So it is not enough that their
sums are equal; what they compute at the same time has to be.

Invariants:
- Every row is in exactly one part of one micro-batch. A micro-batch has a part for each rank; it may be empty, but one
  of them is not.
- A part's rows times its longest row are within the budget, unless it is a single row.
- The parts of a micro-batch differ by one row at most, and hold rows that are neighbours in length.
- No other way of cutting the sorted rows takes less time, if a micro-batch takes that of a rank's padded tokens and of
  so many more.
- A group of one rank has one part a micro-batch: rows are cut as if there were no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Part = tuple[int, ...]
PASS_TOKENS, GATHER_TOKENS = 256, 2048
"""Tokens in whose time a micro-batch of any size is begun and ended, in one process; and where each layer's parameters
are gathered from other ranks for it: about what 8 bytes a parameter over 400 GB/s are in arithmetic at 400 TFLOP/s."""


def split_microbatches(lengths: Sequence[int], ranks: int, token_budget: int) -> list[tuple[Part, ...]]:
    """Split rows into micro-batches: for each, the row indices of each rank. lengths: tokens of each row. token_budget:
    maximum number of padded tokens per rank.

    Rows are cut from the shortest to the longest and dealt to the ranks in turn, back and forth, so that none has the
    longer ones each time.

    >>> split_microbatches([5, 1, 4, 2, 3], ranks=2, token_budget=8)
    [((1,), (3, 4)), ((2,), (0,))]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    ends = _ends([lengths[i] for i in order], ranks, token_budget)
    return [_dealt(order[start:end], ranks) for start, end in zip([0, *ends], ends, strict=False)]


def _ends(lengths: Sequence[int], ranks: int, token_budget: int) -> list[int]:
    """Where to cut rows of these ascending lengths: the ends of the micro-batches. By dynamic programming: the best way
    of cutting the first rows is the best way of cutting fewer of them, and one micro-batch more."""
    overhead = PASS_TOKENS if ranks == 1 else GATHER_TOKENS
    cost = np.zeros(len(lengths) + 1, np.int64)
    starts = np.zeros(len(lengths) + 1, np.int64)
    for end, max_length in enumerate(lengths, start=1):
        first = max(0, end - ranks * max(1, token_budget // max_length))
        sizes = -(-(end - np.arange(first, end)) // ranks)
        totals = cost[first:end] + sizes * max_length + overhead
        best = int(totals.argmin())
        cost[end], starts[end] = totals[best], first + best
    ends, end = list[int](), len(lengths)
    while end:
        ends.append(end)
        end = int(starts[end])
    return ends[::-1]


def _dealt(rows: Sequence[int], ranks: int) -> tuple[Part, ...]:
    """Rows dealt in turn: 0, 1, 2, 2, 1, 0, 0, ..."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for turn, row in enumerate(rows):
        start_rank, position = divmod(turn, ranks)
        parts[position if start_rank % 2 == 0 else ranks - 1 - position].append(row)
    return tuple(tuple(part) for part in parts)

"""Divides rows into micro-batches, and each micro-batch among the ranks of a trainer. Pure.

The ranks compute in lock step: each layer's parameters are gathered from all of them. So it is not enough that their
sums are equal; what they compute at the same time has to be.

Invariants:
- Every row is in exactly one part of one micro-batch. A micro-batch has a part for each rank; it may be empty, but one
  of them is not.
- A part's rows times its longest row are within the budget, unless it is a single row.
- The parts of a micro-batch differ by one row at most, and hold rows that are neighbours in length.
- A group of one rank has one part a micro-batch: rows are cut as if there were no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

Part = tuple[int, ...]


def divided(lengths: Sequence[int], ranks: int, token_budget: int) -> list[tuple[Part, ...]]:
    """Micro-batches as each rank's rows, by index. lengths: tokens of each row. token_budget: padded tokens of a rank's
    part, at most.

    Rows are taken from the shortest to the longest and dealt to the ranks in turn, back and forth, so that none has the
    longer ones each time.

    >>> divided([5, 1, 4, 2, 3], ranks=2, token_budget=8)
    [((1, 2), (3, 4)), ((0,), ())]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batches: list[tuple[Part, ...]] = []
    held: list[int] = []
    for i in order:
        if held and -(-(len(held) + 1) // ranks) * lengths[i] > token_budget and len(held) >= ranks:
            batches.append(_dealt(held, ranks))
            held = []
        held.append(i)
    if held:
        batches.append(_dealt(held, ranks))
    return batches


def _dealt(rows: Sequence[int], ranks: int) -> tuple[Part, ...]:
    """Rows dealt in turn: 0, 1, 2, 2, 1, 0, 0, ..."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for turn, row in enumerate(rows):
        there, place = divmod(turn, ranks)
        parts[place if there % 2 == 0 else ranks - 1 - place].append(row)
    return tuple(tuple(part) for part in parts)

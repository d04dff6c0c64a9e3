"""Contexts of a trajectory's tokens, if its conversation has branches. Pure.

A trajectory's tokens lie in the order in which they came: its prompt, then what was sampled and given. A conversation
that only goes on has all tokens before a token as its context. One whose past is changed, by an agent that drops old
messages, sums them up or asks beside, goes on elsewhere: a branch begins, whose context is the beginning of an earlier
one and what is given from there on.

Places count the tokens of prompt and response from 0.

Invariants:
- A branch goes on after what came before it: 0 <= after < at, and branches lie one after another.
- A token has one context, whatever comes after it: what several branches have in common is there once, and each sampled
  token is trained on once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
SampledTokens = npt.NDArray[np.bool_]


class ContextBranch(NamedTuple):
    """A point where a conversation continues from an earlier position. Positions are in prompt + response."""

    start: int
    """Position of the branch's first own token."""
    after: int
    """Position behind the last token that the branch keeps, with that token's context; 0 if it keeps none."""


def ranges(branches: Sequence[ContextBranch], end: int) -> list[tuple[int, int]]:
    """Position ranges that form the context of position `end`, on the newest branch that starts at or before it.

    Returns:
        Half-open ranges (first, last), in order.

    >>> ranges([ContextBranch(5, 2)], 7)
    [(0, 2), (5, 7)]
    >>> ranges([ContextBranch(5, 2)], 4)
    [(0, 4)]
    """
    parts: list[tuple[int, int]] = []
    newest = len(branches) - 1
    while newest >= 0 and branches[newest].start > end:
        newest -= 1
    while newest >= 0:
        parts.append((branches[newest].start, end))
        end = branches[newest].after
        newest -= 1
        while newest >= 0 and branches[newest].start >= end:  # the token at end - 1 is of an earlier one
            newest -= 1
    parts.append((0, end))
    return [part for part in reversed(parts) if part[0] < part[1]]


def places(branches: Sequence[ContextBranch], end: int) -> Places:
    """The positions of `ranges` as an array."""
    parts = [np.arange(start, stop) for start, stop in ranges(branches, end)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def training_sequences(branches: Sequence[ContextBranch], trained: SampledTokens) -> list[tuple[Places, SampledTokens]]:
    """Split a trajectory into the sequences for the trainer, one per end of a branch.

    A branch that is continued where it ended is one sequence.

    Args:
        branches: The trajectory's context branches.
        trained: [P + T] which tokens are to be trained on; each is in exactly one sequence.

    Returns:
        Of each sequence the positions of its tokens, and which of them are trained on there.

    >>> both = training_sequences([ContextBranch(2, 1)], np.array([False, True, False, True]))
    >>> [(positions.tolist(), trained.tolist()) for positions, trained in both]
    [([0, 1], [False, True]), ([0, 2, 3], [False, False, True])]
    """
    remaining = trained.copy()
    ends = [*(branch.start for branch in branches), len(trained)]
    starts = [0, *(branch.start for branch in branches)]
    sequences: list[tuple[Places, SampledTokens]] = []
    for number in reversed(range(len(ends))):
        positions = np.flatnonzero(remaining[starts[number] : ends[number]])
        if len(positions):
            context_positions = places(branches[:number], starts[number] + int(positions[-1]) + 1)
            sequences.append((context_positions, remaining[context_positions]))
            remaining[context_positions] = False
    return sequences[::-1]


def longest_shared_prefix(
    branches: Sequence[ContextBranch], tokens: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]
) -> tuple[int, int]:
    """Length of the longest common prefix of a context with the existing ones, and the position after it.

    The position is in the newest branch that agrees as long as any.

    Args:
        branches: The trajectory's context branches.
        tokens: [P + T] token ids of prompt and response.
        wanted: Token ids of the new context.

    >>> longest_shared_prefix([ContextBranch(3, 1)], np.array([7, 8, 9, 5, 6]), np.array([7, 5, 4]))
    (2, 4)
    """
    best, position = 0, 0
    ends = [*(branch.start for branch in branches), len(tokens)]
    for number, end in reversed(list(enumerate(ends))):
        context_positions = places(branches[:number], end)[: len(wanted)]
        other = np.flatnonzero(tokens[context_positions] != wanted[: len(context_positions)])
        count = int(other[0]) if len(other) else len(context_positions)
        if count > best:
            best, position = count, int(context_positions[count - 1]) + 1
    return best, position

"""Contexts of a trajectory's tokens, if its conversation has branches. Pure.

A trajectory stores its tokens in order of arrival: the prompt, then sampled tokens and observations. In a conversation
that only grows, the context of a token is all tokens before it. If an agent changes earlier messages (drops or
summarizes them, or asks a side question), a branch begins. Its context is a prefix of an earlier context, followed by
the branch's own tokens.

Positions count the tokens of prompt and response from 0.

Invariants:
- A branch continues an earlier position, 0 <= parent_end < start, and branches are stored one after another.
- A token has one context. Tokens that several branches share are stored once, and each sampled token is trained on
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
TokenMask = npt.NDArray[np.bool_]


class ContextBranch(NamedTuple):
    """A point where a conversation continues from an earlier position. Positions are in prompt + response."""

    start: int
    """Position of the branch's first own token."""
    parent_end: int
    """Position behind the last token of the earlier context that the branch keeps; 0 if it keeps none."""


def context_ranges(branches: Sequence[ContextBranch], end: int) -> list[tuple[int, int]]:
    """Position ranges that form the context of position `end`, on the newest branch that starts at or before it.

    Returns:
        Half-open ranges (start, stop), in order.

    >>> context_ranges([ContextBranch(5, 2)], 7)
    [(0, 2), (5, 7)]
    >>> context_ranges([ContextBranch(5, 2)], 4)
    [(0, 4)]
    """
    parts: list[tuple[int, int]] = []
    index = len(branches) - 1
    while index >= 0 and branches[index].start > end:
        index -= 1
    while index >= 0:
        parts.append((branches[index].start, end))
        end = branches[index].parent_end
        index -= 1
        while index >= 0 and branches[index].start >= end:  # the token at end - 1 is of an earlier one
            index -= 1
    parts.append((0, end))
    return [part for part in reversed(parts) if part[0] < part[1]]


def context_positions(branches: Sequence[ContextBranch], end: int) -> Positions:
    """The positions of `context_ranges` as an array."""
    parts = [np.arange(start, stop) for start, stop in context_ranges(branches, end)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def training_sequences(branches: Sequence[ContextBranch], trained: TokenMask) -> list[tuple[Positions, TokenMask]]:
    """Split a trajectory into the sequences for the trainer, one per end of a branch.

    A branch that is continued where it ended is one sequence.

    Args:
        branches: The trajectory's context branches.
        trained: [P + T] which tokens to train on. Each of them is trained on in exactly one sequence.

    Returns:
        For each sequence, the positions of its tokens and the mask of those to train on.

    >>> both = training_sequences([ContextBranch(2, 1)], np.array([False, True, False, True]))
    >>> [(positions.tolist(), trained.tolist()) for positions, trained in both]
    [([0, 1], [False, True]), ([0, 2, 3], [False, False, True])]
    """
    remaining_mask = trained.copy()
    ends = [*(branch.start for branch in branches), len(trained)]
    starts = [0, *(branch.start for branch in branches)]
    sequences: list[tuple[Positions, TokenMask]] = []
    for index in reversed(range(len(ends))):
        positions = np.flatnonzero(remaining_mask[starts[index] : ends[index]])
        if len(positions):
            sequence_positions = context_positions(branches[:index], starts[index] + int(positions[-1]) + 1)
            sequences.append((sequence_positions, remaining_mask[sequence_positions]))
            remaining_mask[sequence_positions] = False
    return sequences[::-1]


def longest_shared_prefix(
    branches: Sequence[ContextBranch], tokens: npt.NDArray[np.int32], context_tokens: npt.NDArray[np.int32]
) -> tuple[int, int]:
    """Length of the longest common prefix of a context with the existing ones, and the position after it.

    The position is in the newest branch that agrees as long as any.

    Args:
        branches: The trajectory's context branches.
        tokens: [P + T] token ids of prompt and response.
        context_tokens: Token ids of the new context.

    >>> longest_shared_prefix([ContextBranch(3, 1)], np.array([7, 8, 9, 5, 6]), np.array([7, 5, 4]))
    (2, 4)
    """
    length, position = 0, 0
    ends = [*(branch.start for branch in branches), len(tokens)]
    for index, end in reversed(list(enumerate(ends))):
        branch_positions = context_positions(branches[:index], end)[: len(context_tokens)]
        differences = np.flatnonzero(tokens[branch_positions] != context_tokens[: len(branch_positions)])
        count = int(differences[0]) if len(differences) else len(branch_positions)
        if count > length:
            length, position = count, int(branch_positions[count - 1]) + 1
    return length, position

"""Rows that begin with the same prompt, which a model computes once for all of them. Numpy, pure.

Where a model takes rows one after another in a single sequence, without padding, the tokens of a prompt that several
rows have in common stand there once: hidden states, keys and values of a token depend only on itself and on those
before it, so they are the same in each of these rows. What follows the prompt attends to it and to itself.

Invariants:
- Every token of every row stands in the sequence, at its place in its row; a shared prompt's for all of its rows.
- Whether rows share their prompt depends on nothing but their number and lengths: the same rows are always computed the
  same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)

MIN_SAVED_TOKENS = 16
"""Tokens that sharing saves, at least: about what one more call of attention takes in a model of half a million
parameters, and a small part of it in larger ones."""
COPIED = 64
"""Sharing saves at least one in so many of the tokens after the prompt: their keys and values are copied behind the
prompt's, which takes a few thousandths of what computing them does."""
ATTENDED_AGAIN = 8
"""So many tokens of a prompt that stand there for one more row count as one: of what a token keeps for its gradient,
their keys and values are kept once more. They take hardly any time."""


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Rows that stand together in a sequence: tokens they have in common, and then the rest of each. prompt: how many
    they have in common, 0 if nothing is shared. rests: of each row, at least 1."""

    prompt: int
    rests: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens that stand in the sequence."""
        return self.prompt + sum(self.rests)

    @property
    def positions(self) -> Ints:
        """[T] the place of each token in its row.

        >>> PromptBlock(2, (1, 3)).positions.tolist()
        [0, 1, 2, 2, 3, 4]
        """
        parts = [np.arange(self.prompt), *(self.prompt + np.arange(rest) for rest in self.rests)]
        return np.concatenate(parts)


def pays(rows: Any, prompt: Any, rest: Any) -> Any:
    """Whether so many rows share a prompt of a length. rest: tokens after it, of all of them. For numbers or arrays."""
    return (rows - 1) * prompt >= MIN_SAVED_TOKENS + rest // COPIED


def counted(rows: Any, prompt: Any, rest: Any) -> Any:
    """Tokens that rows of one prompt count for in a sequence; never fewer than they are there."""
    shared = prompt + rest + (rows - 1) * prompt // ATTENDED_AGAIN
    return np.where(pays(rows, prompt, rest), shared, rows * prompt + rest)


def alike(keys: Iterable[Key]) -> list[list[int]]:
    """The indices of equal keys, in the order in which each is first seen.

    >>> alike("abac")
    [[0, 2], [1], [3]]
    """
    indices: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        indices.setdefault(key, []).append(i)
    return list(indices.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Padded rows as a sequence without padding."""

    blocks: tuple[PromptBlock, ...]
    row: Ints  # [T] which row each token of the sequence is taken from
    column: Ints  # [T] its place there
    prompts: Ints  # [N] prompt tokens of each row
    starts: Ints  # [N, 2] where each row's prompt begins, and what follows it

    @classmethod
    def of(cls, ids: Ints, lengths: Ints, prompts: Ints) -> PackedLayout:
        """ids: [N, L] tokens. lengths, prompts: [N] tokens of each row, and of its prompt."""
        starts = np.zeros((len(ids), 2), np.int64)
        rows, columns = list[Ints](), list[Ints]()
        blocks, end = list[PromptBlock](), 0

        def stand(i: int, start: int, stop: int) -> int:
            """Put tokens of a row at the end; gives where they begin."""
            nonlocal end
            rows.append(np.full(stop - start, i))
            columns.append(np.arange(start, stop))
            end += stop - start
            return end - (stop - start)

        for members in alike(ids[i, : prompts[i]].tobytes() for i in range(len(ids))):
            prompt = int(prompts[members[0]])
            if pays(len(members), prompt, int((lengths - prompts)[members].sum())):
                starts[members, 0] = stand(members[0], 0, prompt)
                for i in members:
                    starts[i, 1] = stand(i, prompt, int(lengths[i]))
                rests = (int(lengths[i]) - prompt for i in members)
                blocks.append(PromptBlock(prompt, tuple(rest for rest in rests if rest)))
            else:
                for i in members:
                    starts[i] = stand(i, 0, int(lengths[i])) + np.asarray([0, prompt])
                blocks.append(PromptBlock(0, tuple(int(lengths[i]) for i in members)))
        return cls(
            blocks=tuple(blocks),
            row=np.concatenate(rows),
            column=np.concatenate(columns),
            prompts=prompts,
            starts=starts,
        )

    def packed_indices(self, rows: Ints, columns: Ints) -> Ints:
        """[n] where in the sequence tokens of the rows stand, each by its row and its place in it."""
        prompts = self.prompts[rows]
        after = self.starts[rows, 1] + columns - prompts
        indices: Ints = np.where(columns < prompts, self.starts[rows, 0] + columns, after)
        return indices

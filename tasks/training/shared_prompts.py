"""Packs rows so that a prompt which several rows share is computed once. Numpy, pure.

In a packed sequence without padding, the tokens of a shared prompt occur once: hidden states, keys and values of a
token depend only on itself and the tokens before it, so they are equal in all of these rows. The tokens after the
prompt attend to the prompt and to their own row.

Invariants:
- Every token of every row is in the sequence, at its position in its row; tokens of a shared prompt once for all rows.
- Whether rows share their prompt depends only on their number and lengths, so equal micro-batches are always computed
  equally.
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
"""Minimum number of tokens that sharing must save: about the time of one more attention call in a model of half a
million parameters, and little in larger ones."""
RESPONSE_TOKENS_PER_SAVED = 64
"""Sharing must save at least one token per this many tokens after the prompt. Their keys and values are copied behind
the prompt's, which takes a few thousandths of the time to compute them."""
PREFIX_TOKENS_PER_COST_TOKEN = 8
"""Number of shared prompt tokens that cost one token for each further row: their keys and values are stored again
for the gradient, but take hardly any time."""


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Rows that share a prompt, packed: the prompt, then the rest of each row. prefix_length: number of shared tokens,
    0 if nothing is shared. suffix_lengths: number of other tokens of each row, at least 1."""

    prefix_length: int
    suffix_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the sequence."""
        return self.prefix_length + sum(self.suffix_lengths)

    @property
    def positions(self) -> Ints:
        """[T] position of each token in its row.

        >>> PromptBlock(2, (1, 3)).positions.tolist()
        [0, 1, 2, 2, 3, 4]
        """
        parts = [np.arange(self.prefix_length), *(self.prefix_length + np.arange(rest) for rest in self.suffix_lengths)]
        return np.concatenate(parts)


def should_share(num_rows: Any, prompt_length: Any, num_rest_tokens: Any) -> Any:
    """Whether rows of one prompt should share it. Works on numbers and arrays. num_rest_tokens: number of tokens of all
    rows after the prompt."""
    min_saved_tokens = MIN_SAVED_TOKENS + num_rest_tokens // RESPONSE_TOKENS_PER_SAVED
    return (num_rows - 1) * prompt_length >= min_saved_tokens


def cost_tokens(num_rows: Any, prompt_length: Any, num_rest_tokens: Any) -> Any:
    """Cost of rows of one prompt, which a token budget limits: a number of tokens that take as much memory; never less
    than the tokens in the sequence. Arguments as in `should_share`."""
    repeated_tokens = (num_rows - 1) * prompt_length
    is_shared = should_share(num_rows, prompt_length, num_rest_tokens)
    repeated_cost = np.where(is_shared, repeated_tokens // PREFIX_TOKENS_PER_COST_TOKEN, repeated_tokens)
    return prompt_length + num_rest_tokens + repeated_cost


def indices_of_equal_keys(keys: Iterable[Key]) -> list[list[int]]:
    """Group the indices of equal keys, in order of first occurrence.

    >>> indices_of_equal_keys("abac")
    [[0, 2], [1], [3]]
    """
    indices: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        indices.setdefault(key, []).append(i)
    return list(indices.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Layout of padded rows as one sequence without padding."""

    blocks: tuple[PromptBlock, ...]
    row: Ints  # [T] row of each token of the sequence
    position: Ints  # [T] position of each token in its row
    prompt_lengths: Ints  # [N] prompt tokens of each row
    starts: Ints  # [N, 2] indices in the sequence of each row's prompt and of the token after it

    @classmethod
    def of(cls, ids: Ints, lengths: Ints, prompt_lengths: Ints) -> PackedLayout:
        """Build the layout. ids: [N, L] token ids. lengths, prompt_lengths: [N] number of tokens of each row and of
        its prompt."""
        starts = np.zeros((len(ids), 2), np.int64)
        rows, columns = list[Ints](), list[Ints]()
        blocks, end = list[PromptBlock](), 0

        def append_tokens(i: int, start: int, stop: int) -> int:
            """Append tokens of a row to the sequence. Returns the index of the first."""
            nonlocal end
            rows.append(np.full(stop - start, i))
            columns.append(np.arange(start, stop))
            end += stop - start
            return end - (stop - start)

        for members in indices_of_equal_keys(ids[i, : prompt_lengths[i]].tobytes() for i in range(len(ids))):
            prompt_length = int(prompt_lengths[members[0]])
            if should_share(len(members), prompt_length, int((lengths - prompt_lengths)[members].sum())):
                starts[members, 0] = append_tokens(members[0], 0, prompt_length)
                for i in members:
                    starts[i, 1] = append_tokens(i, prompt_length, int(lengths[i]))
                rests = (int(lengths[i]) - prompt_length for i in members)
                blocks.append(PromptBlock(prompt_length, tuple(rest for rest in rests if rest)))
            else:
                for i in members:
                    starts[i] = append_tokens(i, 0, int(lengths[i])) + np.asarray([0, prompt_length])
                blocks.append(PromptBlock(0, tuple(int(lengths[i]) for i in members)))
        return cls(
            blocks=tuple(blocks),
            row=np.concatenate(rows),
            position=np.concatenate(columns),
            prompt_lengths=prompt_lengths,
            starts=starts,
        )

    def packed_indices(self, rows: Ints, columns: Ints) -> Ints:
        """[n] indices in the sequence of tokens that are identified by row and position."""
        prompt_lengths = self.prompt_lengths[rows]
        after = self.starts[rows, 1] + columns - prompt_lengths
        indices: Ints = np.where(columns < prompt_lengths, self.starts[rows, 0] + columns, after)
        return indices

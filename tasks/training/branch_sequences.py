"""Training sequences of rows: one for a row without context branches, otherwise one per end of a branch.

Each trained token is in exactly one sequence, after the context it was sampled with. The sequences of a row have its
advantage and are in one minibatch. A token has the same weight as if its row were one sequence. Numpy, pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from staleflow.stores.context_branches import Positions, TokenMask, training_sequences
from staleflow.tasks.training.microbatches import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSequences:
    """The training sequences of rows.

    Args:
        rows: The sequences, each as a row.
        sequences_of_row: Indices of the sequences of each original row.
        positions: For each sequence, the positions of its response tokens in the original row; None if it is that row.
    """

    rows: tuple[Row, ...]
    sequences_of_row: tuple[tuple[int, ...], ...]
    positions: tuple[Positions | None, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> BranchSequences:
        """Split rows into sequences, in their order."""
        sequences, of_row, all_positions = list[Row](), list[tuple[int, ...]](), list[Positions | None]()
        for row in rows:
            num_sequences = len(sequences)
            if row.branches:
                for sequence, positions in _split_row(row):
                    sequences.append(sequence)
                    all_positions.append(positions)
            else:
                sequences.append(row)
                all_positions.append(None)
            of_row.append(tuple(range(num_sequences, len(sequences))))
        return cls(rows=tuple(sequences), sequences_of_row=tuple(of_row), positions=tuple(all_positions))

    def select(self, row_indices: Iterable[int]) -> tuple[list[int], list[int]]:
        """Indices of the sequences of these rows, and for each the position of its row in `row_indices`."""
        pairs = [(sequence, k) for k, i in enumerate(row_indices) for sequence in self.sequences_of_row[i]]
        return [sequence for sequence, _ in pairs], [k for _, k in pairs]

    def merge_by_row(
        self, rows: Sequence[Row], values: Mapping[int, npt.NDArray[np.float32]]
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Merge values of sequences into [T] values of rows' responses, by row index; 0 at tokens that are not
        trained."""
        row_values: dict[int, npt.NDArray[np.float32]] = {}
        for i, row in enumerate(rows):
            for sequence in self.sequences_of_row[i]:
                if sequence not in values:
                    continue
                positions = self.positions[sequence]
                if positions is None:
                    row_values[i] = values[sequence]
                    continue
                sampled = self.rows[sequence].sampled
                row_values.setdefault(i, np.zeros(len(row.response), np.float32))[positions[sampled]] = values[
                    sequence
                ][sampled]
        return row_values


def _split_row(row: Row) -> list[tuple[Row, Positions]]:
    """The sequences of a row with branches, each with the positions of its response in the row's response. Returns the
    row itself if it has no sampled tokens."""
    prompt_length = len(row.prompt)
    ids = np.concatenate([row.prompt, row.response])
    parts = training_sequences(row.branches, np.concatenate([np.zeros(prompt_length, bool), row.sampled]))
    sequences = []
    for path, trained in parts:
        start = _prompt_length(path, trained, prompt_length)
        response_positions = path[start:] - prompt_length
        sequence = replace(
            row,
            prompt=ids[path[:start]],
            response=ids[path[start:]],
            behaviour=row.behaviour[response_positions],
            sampled=trained[start:],
            lags=None if row.lags is None else row.lags[response_positions],
            reference_logprobs=None if row.reference_logprobs is None else row.reference_logprobs[response_positions],
            branches=(),
        )
        sequences.append((sequence, response_positions))
    return sequences or [(replace(row, branches=()), np.arange(len(row.response)))]


def _prompt_length(path: Positions, trained: TokenMask, row_prompt_length: int) -> int:
    """Number of prompt tokens of a sequence: the row's prompt if the sequence begins with it, so that it can be shared
    with other rows; otherwise all tokens before the first trained one."""
    has_prompt = len(path) > row_prompt_length and bool(path[row_prompt_length - 1] == row_prompt_length - 1)
    return row_prompt_length if has_prompt else int(np.flatnonzero(trained)[0])

"""Training sequences of rows: one for a row without context branches, otherwise one per end of a branch.

Each trained token is in exactly one sequence, after the context it was sampled with. The sequences of a row have its
advantage and are in one minibatch. A token has the same weight as if its row were one sequence. Numpy, pure.

Each token that is trained on is in one sequence, behind the very tokens that it was sampled after. The sequences of a
row have its advantage, and are of one minibatch; a token counts as much in it as it would if the row were one sequence.
Numpy, pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from staleflow.stores.context_branches import Places, SampledTokens, training_sequences
from staleflow.tasks.training.microbatches import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSequences:
    """The training sequences of rows.

    Args:
        rows: The sequences, each as a row.
        of_row: Indices of the sequences of each original row.
        positions: For each sequence, the positions of its response tokens in the original row; None if it is that row.
    """

    rows: tuple[Row, ...]
    of_row: tuple[tuple[int, ...], ...]
    positions: tuple[Places | None, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> BranchSequences:
        """Split rows into sequences, in their order."""
        sequences, of_row, all_positions = list[Row](), list[tuple[int, ...]](), list[Places | None]()
        for row in rows:
            num_sequences = len(sequences)
            if row.branches:
                for sequence, positions in _divided(row):
                    sequences.append(sequence)
                    all_positions.append(positions)
            else:
                sequences.append(row)
                all_positions.append(None)
            of_row.append(tuple(range(num_sequences, len(sequences))))
        return cls(rows=tuple(sequences), of_row=tuple(of_row), positions=tuple(all_positions))

    def chosen(self, rows: Iterable[int]) -> tuple[list[int], list[int]]:
        """Indices of the sequences of these rows, and for each the index of its row in `rows`."""
        pairs = [(sequence, k) for k, i in enumerate(rows) for sequence in self.of_row[i]]
        return [sequence for sequence, _ in pairs], [k for _, k in pairs]

    def by_row(
        self, rows: Sequence[Row], values: Mapping[int, npt.NDArray[np.float32]]
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Merge values of sequences into [T] values of rows' responses, by row index; 0 at tokens that are not
        trained."""
        row_values: dict[int, npt.NDArray[np.float32]] = {}
        for i, row in enumerate(rows):
            for sequence in self.of_row[i]:
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


def _divided(row: Row) -> list[tuple[Row, Places]]:
    """The sequences of a row with branches; the row itself if nothing of it was sampled."""
    prompt = len(row.prompt)
    ids = np.concatenate([row.prompt, row.response])
    parts = training_sequences(row.branches, np.concatenate([np.zeros(prompt, bool), row.sampled]))
    sequences = []
    for path, trained in parts:
        start = _begin(path, trained, prompt)
        sampled_positions = path[start:] - prompt
        sequence = replace(
            row,
            prompt=ids[path[:start]],
            response=ids[path[start:]],
            behaviour=row.behaviour[sampled_positions],
            sampled=trained[start:],
            lags=None if row.lags is None else row.lags[sampled_positions],
            branches=(),
        )
        sequences.append((sequence, sampled_positions))
    return sequences or [(replace(row, branches=()), np.arange(len(row.response)))]


def _begin(path: Places, trained: SampledTokens, prompt: int) -> int:
    """How many tokens of a sequence are its prompt: the row's, which other rows may have, too, if it begins with all of
    that; else all before the first that is trained on."""
    has_prompt = len(path) > prompt and bool(path[prompt - 1] == prompt - 1)
    return prompt if has_prompt else int(np.flatnonzero(trained)[0])

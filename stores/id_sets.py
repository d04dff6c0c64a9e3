"""Compact sets of trajectory ids. Numpy, pure.

A run's ids are dense: of the ids up to any moment all are stored but those in flight. So a set is kept as the intervals
of ids that are *not* in it, of which there are about as many as trajectories in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
MIN_ID, MAX_ID = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class IdSet:
    """A growing set of ids."""

    def __init__(self) -> None:
        self.count = 0
        # The absent ids: starts[i] <= id < ends[i], ascending and disjoint.
        self._starts = np.asarray([MIN_ID], np.int64)
        self._ends = np.asarray([MAX_ID], np.int64)

    def add(self, ids: Ints) -> Ints:
        """Add ids. Returns those that were in the set before or occur twice among them."""
        unique, counts = np.unique(ids, return_counts=True)
        is_absent = self._is_absent(unique)
        new_ids = unique[is_absent]
        if len(new_ids):
            starts = np.sort(np.concatenate([self._starts, new_ids + 1]))
            ends = np.sort(np.concatenate([self._ends, new_ids]))
            nonempty = starts < ends
            self._starts, self._ends = starts[nonempty], ends[nonempty]
            self.count += len(new_ids)
        return unique[~is_absent | (counts > 1)]

    def count_absent(self, start: Ints, stop: Ints) -> int:
        """Number of ids in the disjoint intervals start <= id < stop that are not in the set."""
        return int((self._count_absent_below(stop) - self._count_absent_below(start)).sum())

    def next_absent(self, id: int) -> int:
        """The smallest id >= `id` that is not in the set."""
        i = int(np.searchsorted(self._starts, id, side="right")) - 1
        return id if i >= 0 and id < self._ends[i] else int(self._starts[i + 1])

    def next_present(self, id: int) -> int:
        """The smallest id >= `id` in the set; MAX_ID if there is none."""
        i = int(np.searchsorted(self._starts, id, side="right")) - 1
        return int(self._ends[i]) if i >= 0 and id < self._ends[i] else id

    def _is_absent(self, ids: Ints) -> npt.NDArray[np.bool_]:
        indices = np.searchsorted(self._starts, ids, side="right") - 1
        return (indices >= 0) & (ids < self._ends[np.maximum(indices, 0)])

    def _count_absent_below(self, ids: Ints) -> Ints:
        """Number of absent ids below each id. It may wrap around; differences are right all the same."""
        sizes = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._ends - self._starts)])
        indices = np.searchsorted(self._starts, ids, side="right") - 1
        offsets = np.minimum(ids, self._ends[np.maximum(indices, 0)]) - self._starts[np.maximum(indices, 0)]
        return np.where(indices < 0, 0, sizes[np.maximum(indices, 0)] + offsets)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Merge half-open ranges of ids into disjoint ascending ones, as arrays of starts and stops.

    >>> [edge.tolist() for edge in merge_ranges([(5, 9), (1, 3), (8, 12), (4, 4)])]
    [[1, 5], [3, 12]]
    """
    try:
        edges = np.asarray(ranges, np.int64).reshape(-1, 2)
    except OverflowError:  # of a corrupt ledger
        edges = np.clip(np.asarray(ranges, dtype=object), MIN_ID, MAX_ID).astype(np.int64)
    edges = edges[edges[:, 0] < edges[:, 1]]
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    if not len(edges):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    reach = np.maximum.accumulate(edges[:, 1])
    begins_interval = np.concatenate([[True], edges[1:, 0] > reach[:-1]])
    return edges[begins_interval, 0], reach[np.concatenate([begins_interval[1:], [True]])]

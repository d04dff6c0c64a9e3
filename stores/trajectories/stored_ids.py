"""Finds which trajectories a store has already, before each commit, so that none is stored twice. Numpy, pure.

A commit's smallest and largest id are known without reading its rows. Ids are dense and a run commits them nearly in
order, so of the commits of earlier processes only the last few overlap with new ones, and only their rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class StoredIds:
    """The ids of a store's trajectories.

    Args:
        commits: [S, 4] smallest and largest id of each commit, and the half-open range of its rows.
        read: read(start, stop) returns the ids of these rows.
    """

    def __init__(self, commits: Ints, read: Callable[[int, int], Ints]) -> None:
        self._unread = commits[commits[:, 2] < commits[:, 3]]
        self._read = read
        self._earlier = np.zeros(0, np.int64)
        """Of those commits that were read."""
        self._added_flags = bytearray()
        """A byte per id, set for what was added here."""

    def find_stored(self, ids: Sequence[int]) -> list[int]:
        """Those of `ids` that are stored already or occur twice, in order."""
        if not ids:
            return []
        overlap = (self._unread[:, 0] <= max(ids)) & (self._unread[:, 1] >= min(ids))
        if overlap.any():
            earlier = [self._read(int(start), int(stop)) for start, stop in self._unread[overlap, 2:]]
            self._earlier = np.concatenate([self._earlier, *earlier])
            self._unread = self._unread[~overlap]
        stored = np.isin(np.asarray(ids, np.int64), self._earlier).tolist()
        seen: set[int] = set()
        twice = []
        for id, earlier in zip(ids, stored, strict=True):
            if earlier or id in seen or (id < len(self._added_flags) and self._added_flags[id]):
                twice.append(id)
            seen.add(id)
        return twice

    def add(self, ids: Sequence[int]) -> None:
        """Add the ids of a commit."""
        self._added_flags.extend(bytes(max(0, max(ids, default=-1) + 1 - len(self._added_flags))))
        for id in ids:
            self._added_flags[id] = 1

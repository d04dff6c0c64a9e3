"""Checks that every trajectory is stored once and every step consumed its number of whole groups. Numpy, pure.

Memory: five numbers per group and step, and that of stores/id_sets.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.id_sets import IdSet
from staleflow.stores.trajectories.columns import FATES, Rows
from staleflow.stores.trajectories.records import RunHeader
from staleflow.stores.trajectory import Fate

CHECK = "once"
"""The name of this check in findings."""
READ_COLUMNS = ("trajectory", "group", "fate", "step", "v_traj")
"""Columns that are read of each row."""
Ints = npt.NDArray[np.int64]
CONSUMED = FATES.index(Fate.CONSUMED)
"""The fate of consumed rows, as it is stored."""


def is_consumed(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that a training step consumed, [R]."""
    return np.asarray(rows["fate"] == CONSUMED, bool)


class ConsumedRows:
    """Collects which step consumed which rows, in one pass over a store. header: the store's header."""

    def __init__(self, header: RunHeader) -> None:
        self.num_rows = 0
        self.max_staleness = -1
        self.stored_ids = IdSet()
        """The ids of the rows so far."""
        self._header = header
        self._repeated_ids: set[int] = set()
        self._wrong_groups: list[tuple[int, int]] = []
        """(trajectory, group) of the rows whose group is not that of their id."""
        self._consumed_groups: list[Ints] = []
        """Arrays [N, 5] with step, group, number of its trajectories, and the first and last of their rows."""

    def add(self, rows: Rows) -> None:
        """Add the next rows, with the columns READ_COLUMNS."""
        self._repeated_ids.update(self.stored_ids.add(rows["trajectory"]).tolist())
        wrong_rows = rows[rows["group"] != rows["trajectory"] // self._header.members_started_per_group]
        self._wrong_groups += wrong_rows[["trajectory", "group"]].tolist()
        consumed_mask = is_consumed(rows)
        (indices,) = np.nonzero(consumed_mask)
        consumed_rows = rows[indices]
        if len(consumed_rows):
            self.max_staleness = max(self.max_staleness, int((consumed_rows["step"] - consumed_rows["v_traj"]).max()))
        ones = np.ones(len(indices), np.int64)
        positions = indices + self.num_rows
        counts = np.stack([consumed_rows["step"], consumed_rows["group"], ones, positions, positions], axis=1)
        self._consumed_groups.append(_merge(counts))
        self.num_rows += len(rows)

    def step_ranges(self) -> dict[int, tuple[int, int]]:
        """Return the half-open range of rows that each step consumed."""
        counts = self._merged_counts()
        return {
            int(step): (int(counts[a:b, 3].min()), int(counts[a:b, 4].max()) + 1)
            for step, a, b in _equal_ranges(counts[:, 0])
        }

    def findings(self, trained_steps: Sequence[int], rows: Iterable[Rows]) -> Iterator[Finding]:
        """Check that every trajectory is stored once and in its group, and that each step consumed its number of whole
        groups.

        Args:
            trained_steps: The steps in the order of their commits.
            rows: The rows of the whole store again, read only if a trajectory is stored more than once.
        """
        header = self._header
        yield from self._duplicate_findings(rows)
        for trajectory, group in self._wrong_groups:
            message = f"stored with group {group}, its id is of group {trajectory // header.members_started_per_group}"
            yield Finding(check=CHECK, location=f"trajectory {trajectory}", message=message)
        if list(trained_steps) != list(range(len(trained_steps))):
            yield Finding(
                check=CHECK, location="steps", message=f"steps are not 0, 1, 2, ...: {list(trained_steps)[:20]}"
            )
        counts = self._merged_counts()
        group_sizes = {int(step): counts[a:b, 2] for step, a, b in _equal_ranges(counts[:, 0])}
        for step in sorted(set(group_sizes) - set(trained_steps)):
            yield Finding(check=CHECK, location=f"step {step}", message="consumed rows, and no commit trained it")
        for step in sorted({*trained_steps, *group_sizes}):
            step_sizes = group_sizes.get(step, np.zeros(0, np.int64))
            if len(step_sizes) != header.groups_per_step or set(step_sizes.tolist()) != {header.group_size}:
                message = (
                    f"consumed {len(step_sizes)} groups of sizes {sorted(set(step_sizes.tolist()))}, "
                    f"a batch is {header.groups_per_step} of {header.group_size}"
                )
                yield Finding(check=CHECK, location=f"step {step}", message=message)
        counts_by_group = counts[np.argsort(counts[:, 1], kind="stable")]  # and of each group by step
        repeated_groups = [
            (counts_by_group[a:b, 3].min(), group, a, b)
            for group, a, b in _equal_ranges(counts_by_group[:, 1])
            if b - a > 1
        ]
        for _, group, a, b in sorted(repeated_groups):
            message = f"consumed by steps {counts_by_group[a:b, 0].tolist()}"
            yield Finding(check=CHECK, location=f"group {group}", message=message)

    def _duplicate_findings(self, rows: Iterable[Rows]) -> Iterator[Finding]:
        if not self._repeated_ids:
            return
        counts: dict[int, int] = {}
        repeated_ids = np.asarray(sorted(self._repeated_ids), np.int64)
        for block in rows:
            ids = block["trajectory"]
            for id in ids[np.isin(ids, repeated_ids)].tolist():
                counts[id] = counts.get(id, 0) + 1
        for id, count in counts.items():
            yield Finding(check=CHECK, location=f"trajectory {id}", message=f"stored {count} times")

    def _merged_counts(self) -> Ints:
        counts = _merge(np.concatenate([np.zeros((0, 5), np.int64), *self._consumed_groups]))
        self._consumed_groups = [counts]
        return counts


def _merge(counts: Ints) -> Ints:
    """Merge counts to one line per step and group, sorted by these."""
    counts = counts[np.lexsort((counts[:, 1], counts[:, 0]))]
    starts = np.flatnonzero(np.concatenate([[True], (counts[1:, :2] != counts[:-1, :2]).any(axis=1)])[: len(counts)])
    if not len(starts):
        return counts
    merged_counts = counts[starts].copy()
    merged_counts[:, 2] = np.add.reduceat(counts[:, 2], starts)
    # Rows are added in order and the sort is stable, so the first line of a group has its first row.
    merged_counts[:, 4] = np.maximum.reduceat(counts[:, 4], starts)
    return merged_counts


def _equal_ranges(values: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (value, start, stop) of each run of equal values."""
    if not len(values):
        return
    edges = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1], [True]])).tolist()
    for a, b in itertools.pairwise(edges):
        yield int(values[a]), a, b

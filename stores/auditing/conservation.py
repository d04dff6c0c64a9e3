"""Conservation check: at every commit, the trajectories started are those stored and those in flight, and the ledger's
counts match the rows. Numpy, pure. Time is linear in commits and rows; memory is small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.id_sets import MAX_ID, MIN_ID, IdSet, merge_ranges
from staleflow.stores.trajectories.columns import FATES, REASONS, Rows
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectory import outcome_key

CHECK = "conservation"
"""The name of this check in findings."""
READ_COLUMNS = ("fate", "reason")
"""Columns of the rows that the check reads."""
Ints = npt.NDArray[np.int64]


class ConservationCheck:
    """Checks commit by commit that every started trajectory is stored or in flight. stored_ids: those of the rows so
    far, which the caller adds."""

    def __init__(self, stored_ids: IdSet) -> None:
        self._stored_ids = stored_ids
        self._counts: Counter[str] = Counter()
        self._last_record: CommitRecord | None = None

    def add(self, rows: Rows) -> None:
        """Add rows of the next commit, with the columns READ_COLUMNS."""
        pairs = np.stack([rows["fate"], rows["reason"]], axis=1)
        kinds, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        for i in np.argsort(first):  # a counter keeps the order of first occurrence
            fate, reason = kinds[i].tolist()
            if 0 <= fate < len(FATES) and 0 <= reason < len(REASONS):
                self._counts[outcome_key(FATES[fate], REASONS[reason])] += int(counts[i])

    def check_commit(self, record: CommitRecord) -> Iterator[Finding]:
        """Check a commit after all of its rows have been added."""
        self._last_record = record
        location, ledger = f"{record.kind} {record.step}", record.ledger
        num_started = min(max(0, ledger.num_started), MAX_ID)
        start, stop = merge_ranges(ledger.live)
        inside = np.clip(start, 0, num_started), np.clip(stop, 0, num_started)
        num_absent = self._stored_ids.count_absent(np.asarray([0]), np.asarray([num_started]))
        live_absent = self._stored_ids.count_absent(*inside)
        num_live = int((stop - start).sum())
        live_inside = int((inside[1] - inside[0]).sum())
        num_lost = num_absent - live_absent
        if num_lost:
            message = f"{num_lost} trajectories are neither stored nor in flight, first {self._first_lost(start, stop)}"
            yield Finding(check=CHECK, location=location, message=message)
        # Stored and in flight; stored, never started; in flight, never started.
        num_both = live_inside - live_absent
        stored_outside = self._stored_ids.count - (num_started - num_absent)
        live_outside = num_live - live_inside
        both_outside = num_live - self._stored_ids.count_absent(start, stop) - num_both
        num_wrong = num_both + stored_outside + live_outside - both_outside
        if num_wrong:
            message = (
                f"{num_wrong} trajectories are stored and in flight, or were never started, first "
                f"{self._first_wrong(start, stop, num_started)}"
            )
            yield Finding(check=CHECK, location=location, message=message)
        if dict(self._counts) != {k: v for k, v in ledger.num_ended.items() if v}:
            message = f"the ledger counted {ledger.num_ended}, the rows are {dict(self._counts)}"
            yield Finding(check=CHECK, location=location, message=message)

    def check_store_end(self, num_rows: int, num_counted: int) -> Iterator[Finding]:
        """Check the end of the store, after the last commit. num_counted: number of rows in the records."""
        if self._last_record is None:
            return
        if num_counted != num_rows:
            message = f"{num_rows} rows, the step records account for {num_counted}"
            yield Finding(check=CHECK, location="rows", message=message)
        if self._last_record.kind == "end" and self._last_record.ledger.num_live:
            message = f"{self._last_record.ledger.num_live} trajectories still in flight after the end"
            yield Finding(check=CHECK, location="end", message=message)

    def _first_lost(self, start: Ints, stop: Ints) -> int:
        id = self._stored_ids.next_absent(0)
        for a, b in zip(start.tolist(), stop.tolist(), strict=True):
            if a <= id < b:
                id = self._stored_ids.next_absent(b)
        return id

    def _first_wrong(self, start: Ints, stop: Ints, num_started: int) -> int:
        candidates = [self._stored_ids.next_present(MIN_ID), self._stored_ids.next_present(num_started)]
        candidates = [id for id in candidates if not 0 <= id < num_started]
        for a, b in zip(start.tolist(), stop.tolist(), strict=True):
            if a < 0:
                candidates.append(a)
            if b > num_started:
                candidates.append(max(a, num_started))
            if (id := self._stored_ids.next_present(max(a, 0))) < min(b, num_started):
                candidates.append(id)
        return min(candidates)

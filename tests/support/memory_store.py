"""The protocol of trajectory stores, and an in-memory store, which is the reference for the Zarr store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.records import CommitRecord, RunHeader
from staleflow.stores.trajectory import EndedTrajectory, Fate, TrajectoryId


class TrajectoryStore(Protocol):
    """An append-only store. One owner commits; anyone may read."""

    @property
    def header(self) -> RunHeader: ...

    def commit(self, record: CommitRecord, ended: Sequence[EndedTrajectory]) -> str:
        """Store a step and the trajectories that ended since the last commit, all or nothing; returns the snapshot. The
        num_rows and num_tokens of the record are set here. Raises StoreError, and then nothing was stored."""
        ...

    def commits(self, first: int = 0) -> list[CommitRecord]:
        """Return the commits from number `first` on, oldest first; negative numbers count from the end."""
        ...

    def trajectories(self, step: int | None = None) -> Iterable[EndedTrajectory]:
        """Yield all stored trajectories in order, or those that one training step consumed, in its order."""
        ...

    def get(self, trajectory: TrajectoryId) -> EndedTrajectory | None: ...


class MemoryStore:
    """An in-memory TrajectoryStore for one process."""

    def __init__(self, header: RunHeader) -> None:
        self.header = header
        self._steps: list[CommitRecord] = []
        self._ended: list[EndedTrajectory] = []
        self._index: dict[TrajectoryId, int] = {}

    def commit(self, record: CommitRecord, ended: Sequence[EndedTrajectory]) -> str:
        twice = [e.trajectory.id for e in ended if e.trajectory.id in self._index]
        if twice:
            raise StoreError(f"trajectory {twice[0]} is already stored")
        for row in ended:
            self._index[row.trajectory.id] = len(self._ended)
            self._ended.append(row)
        num_tokens = sum(len(e.trajectory.prompt_tokens) + e.trajectory.num_tokens for e in ended)
        self._steps.append(replace(record, num_rows=len(ended), num_tokens=num_tokens))
        return str(len(self._steps))

    def commits(self, first: int = 0) -> list[CommitRecord]:
        return self._steps[first:]

    def chain_entry(self, step: int) -> str:
        """Return the chain entry of a step, here its number: this store has no chain."""
        return f"{step:064x}"

    def trajectories(self, step: int | None = None) -> Iterable[EndedTrajectory]:
        for row in self._ended:
            if step is None or (row.fate is Fate.CONSUMED and row.step == step):
                yield row

    def get(self, trajectory: TrajectoryId) -> EndedTrajectory | None:
        at = self._index.get(trajectory)
        return None if at is None else self._ended[at]

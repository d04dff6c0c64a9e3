"""A trajectory store of lists in memory: the reference that the Zarr store is tested against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.records import RunHeader, StepRecord
from staleflow.stores.trajectory import EndedTrajectory, Fate, TrajectoryId


class MemoryStore:
    """See stores/trajectories/records.py for the contract."""

    def __init__(self, header: RunHeader) -> None:
        self.header = header
        self._steps: list[StepRecord] = []
        self._ended: list[EndedTrajectory] = []
        self._index: dict[TrajectoryId, int] = {}

    def commit(self, record: StepRecord, ended: Sequence[EndedTrajectory]) -> str:
        twice = [e.trajectory.id for e in ended if e.trajectory.id in self._index]
        if twice:
            raise StoreError(f"trajectory {twice[0]} is already stored")
        for row in ended:
            self._index[row.trajectory.id] = len(self._ended)
            self._ended.append(row)
        num_tokens = sum(len(e.trajectory.prompt_tokens) + e.trajectory.num_tokens for e in ended)
        self._steps.append(replace(record, num_rows=len(ended), num_tokens=num_tokens))
        return str(len(self._steps))

    def steps(self, first: int = 0) -> list[StepRecord]:
        return self._steps[first:]

    def ended(self, step: int | None = None) -> Iterable[EndedTrajectory]:
        for row in self._ended:
            if step is None or (row.fate is Fate.CONSUMED and row.step == step):
                yield row

    def get(self, trajectory: TrajectoryId) -> EndedTrajectory | None:
        at = self._index.get(trajectory)
        return None if at is None else self._ended[at]

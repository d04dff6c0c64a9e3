"""What becomes of trajectories that were in flight in a run of an earlier version, which kept nothing of them."""

from __future__ import annotations

from dataclasses import replace

from staleflow.stores.trajectories.records import LedgerState, StepRecord
from staleflow.stores.trajectory import AbortReason, Ended, Fate, Trajectory, TrajectoryId, ended_as


def all_aborted(state: LedgerState) -> tuple[StepRecord, list[TrajectoryId]]:
    """The record by which all that was live ends as aborted, and the ids of that."""
    lost = [TrajectoryId(i) for first, last in state.live for i in range(first, last)]
    key = ended_as(Fate.ABORTED, AbortReason.RUN_ENDED)
    num_ended = {**state.num_ended, key: state.num_ended.get(key, 0) + len(lost)}
    ledger = replace(state, live=(), num_ended=num_ended)
    return StepRecord(kind="resume", step=state.next_step, ledger=ledger), lost


def aborted_row(trajectory: Trajectory, step: int) -> Ended:
    """One of them as it is stored."""
    return Ended(trajectory=trajectory, fate=Fate.ABORTED, reason=AbortReason.RUN_ENDED, step=step, loss_mask=False)

"""Recovers the in-flight work of a stopped run on its new trajectory server."""

from __future__ import annotations

from dataclasses import replace

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import GroupDrawn
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, id_ranges
from staleflow.stores.trajectory import TrajectoryId, is_evaluation
from staleflow.tasks.actors.server_messages import RecoveredWork
from staleflow.tasks.actors.task_cache import TaskCache


def rebuild_in_flight(
    in_flight: InFlightState, spool: Spool, ledger: LedgerState, task_cache: TaskCache, now_s: float
) -> None:
    """Rebuild an empty in-flight state from the spool and the ledger of the store's last record. Trajectories that the
    ledger counts and the spool does not have are added with their prompts alone."""
    for entry in spool.resume():
        in_flight.apply(entry)
    in_flight.remove_stored(ledger)
    source_tasks = {group: (source, task) for group, source, task in ledger.tasks_in_flight}
    for group, members in in_flight.lost_trajectories(ledger).items():
        source, task = source_tasks.get(group, (0, -1))
        prompt = task_cache.prompt(group, source, task)
        drawn = GroupDrawn(
            group=group, prompt_tokens=prompt.tokens, at_s=now_s, dataset_row=prompt.row, source=source, task=task
        )
        in_flight.add_members(members, drawn)
    groups = {t.group for t in in_flight.live.values()} | {t.group for t in in_flight.pending_commit()}
    spool.mark_stored(ledger.next_step, spool.groups - groups)


def trajectories_with_tokens(in_flight: InFlightState) -> set[TrajectoryId]:
    """Return the trajectories in flight that have sampled tokens, without those of evaluations."""
    trajectories = (*in_flight.live.values(), *in_flight.pending_commit())
    return {t.id for t in trajectories if t.segments and not is_evaluation(t.id)}


def recovered_work(in_flight: InFlightState, previous: set[TrajectoryId], ledger: LedgerState) -> RecoveredWork:
    """Count the in-flight work after a resumption. previous: trajectories that had sampled tokens before it."""
    recovered_trajectories = [t for t in in_flight.live.values() if t.segments]
    return RecoveredWork(
        ledger=ledger,
        num_responses=len(recovered_trajectories),
        num_tokens=sum(t.num_tokens for t in recovered_trajectories),
        num_restarted=len(previous - {t.id for t in recovered_trajectories}),
    )


def resume_record(in_flight: InFlightState, work: RecoveredWork) -> CommitRecord | None:
    """Build the record of a resumption, with the ledger as of now. Returns None if nothing has changed since the
    store's last record."""
    ledger = replace(
        work.ledger, num_started=in_flight.num_drawn * in_flight.group_size, live=id_ranges(in_flight.live)
    )
    if work.ledger.sources:
        ledger = in_flight.with_tasks(ledger, work.ledger.num_started)
    if ledger == work.ledger:
        return None
    metrics = {
        "taken_up": float(work.num_responses),
        "taken_up_tokens": float(work.num_tokens),
        "started_again": float(work.num_restarted),
    }
    return CommitRecord(kind="resume", step=ledger.next_step, ledger=ledger, metrics=metrics)

"""Chooses which work in flight a resumed run continues, and in which order. Pure.

All groups in flight had reserved or occupied an entry when the run was interrupted. Groups that were consumed by steps
after the resume point fit into the buffers of these steps, and the others into the buffers that condition (H) gave them
(docs/protocol.md). With redundancy more groups are reserved than fit, and groups that were discarded after the resume
point are in flight again. So complete groups are restored first, then the oldest. Groups that do not fit restart from
their prompts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from staleflow.pipeline.coordination.events import RunResumed
from staleflow.pipeline.strategies.filtering import Filtering
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import PolicyVersion, TrajectoryId, parse_outcome_key


def plan_resume(
    trial_ledger: StalenessLedger,
    filtering: Filtering,
    ledger_state: LedgerState,
    groups: Collection[GroupInFlight],
    unrepeatable_sources: Collection[int] = (),
) -> tuple[RunResumed, tuple[TrajectoryId, ...]]:
    """Build the event that continues a run, and list the trajectories that restart from their prompts.

    Args:
        trial_ledger: A new ledger of the job, on which the groups are restored first; not usable afterwards.
        ledger_state: Ledger state of the store's last record.
        unrepeatable_sources: Numbers of the task sources whose episodes cannot be set back. Those with an observation
            restart.
    """
    num_ended = tuple(ledger_state.num_ended.items())
    trial_ledger.resume(ledger_state.next_step, {parse_outcome_key(key): count for key, count in num_ended})
    restorable_groups = [_restart_lost_episodes(g) if g.source in unrepeatable_sources else g for g in groups]
    restored_groups = [
        _restore_on_ledger(trial_ledger, filtering, group)
        for group in sorted(
            restorable_groups, key=lambda group: _restore_order(group, trial_ledger.group_size, filtering)
        )
    ]
    started_trajectories = {m.trajectory for group in groups for m in group.members if m != _restart_member(m)}
    continued_trajectories = {m.trajectory for group in restored_groups for m in group.members if m.version >= 0}
    event = RunResumed(
        step=ledger_state.next_step,
        num_ended=num_ended,
        groups=tuple(restored_groups),
        num_groups=ledger_state.num_started // trial_ledger.members_started_per_group if ledger_state.sources else 0,
        sources=ledger_state.sources,
    )
    return event, tuple(sorted(started_trajectories - continued_trajectories))


def _restore_order(group: GroupInFlight, group_size: int, filtering: Filtering) -> tuple[int, int, int]:
    """Sort key: groups to be filtered first, since they free their entries, then complete ones, then partly sampled
    ones."""
    scored_members = [m for m in group.members if m.scored][:group_size]
    sampled_versions = [m.version for m in group.members if m.version >= 0]
    rank = 2 if sampled_versions else 3
    if len(scored_members) == group_size:
        rank = 1 if filtering.drop_reason([m.reward for m in scored_members if m.reward is not None]) is None else 0
    return rank, min(sampled_versions, default=0), group.group


def _restore_on_ledger(trial_ledger: StalenessLedger, filtering: Filtering, group: GroupInFlight) -> GroupInFlight:
    """Restore a group on the ledger. Returns the group with the members restarted that are too old for an entry."""
    ids = tuple(m.trajectory for m in group.members)
    trial_ledger.start(group.group, ids)
    versions = sorted({m.version for m in group.members if m.version >= 0})
    oldest_version = next((v for v in versions if trial_ledger.can_reserve(group.group, v)), None)
    num_scored = 0
    members = []
    for stored_member in group.members:
        member = stored_member
        if oldest_version is None or member.version < oldest_version:
            member = _restart_member(member)
        elif member.scored and num_scored == trial_ledger.group_size:  # it was surplus when its reward arrived
            member = replace(member, sampled=True, scored=False, reward=None)
        num_scored += member.scored
        members.append(member)
    for member in sorted(members, key=lambda member: member.version):
        if member.version >= 0:
            trial_ledger.reserve(group.group, member.trajectory, member.version)
    scored_members = [m for m in members if m.scored]
    for member in scored_members:
        trial_ledger.complete(group.group, member.trajectory)
    if len(scored_members) == trial_ledger.group_size:
        drop_reason = filtering.drop_reason([m.reward for m in scored_members if m.reward is not None])
        if drop_reason is None:
            trial_ledger.occupy(group.group)
        else:
            trial_ledger.filter(group.group, drop_reason)
    return replace(group, members=tuple(members))


def _restart_lost_episodes(group: GroupInFlight) -> GroupInFlight:
    """Restart the members whose environment has returned an observation and is needed for another turn."""
    members = tuple(_restart_member(m) if m.given_tokens and not m.scored else m for m in group.members)
    return replace(group, members=members)


def _restart_member(member: MemberInFlight) -> MemberInFlight:
    return MemberInFlight(trajectory=member.trajectory, version=PolicyVersion(-1))

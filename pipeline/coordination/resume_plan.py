"""Chooses which work in flight a resumed run continues, and in which order. Pure.

Everything found was promised a place, or had taken one, when the run was interrupted. Groups that steps after the
resume point had consumed have their old steps as places, the others those that (H) gave them (docs/protocol.md): so all
fit, as long as the promises are kept strictly. With redundancy more was promised than fits, and groups given up after
the resume point are found again: complete groups come first, then the oldest. What does not fit starts again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from staleflow.pipeline.coordination.events import RunResumed
from staleflow.pipeline.strategies.filtering import Filtering
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import AbortReason, Fate, PolicyVersion, TrajectoryId


def plan_resume(
    trial: StalenessLedger, filtering: Filtering, stored: LedgerState, groups: Iterable[GroupInFlight]
) -> tuple[RunResumed, tuple[TrajectoryId, ...]]:
    """Build the event that continues a run, and list the trajectories that restart from their prompts.

    Args:
        trial: A new ledger of the job, on which the event is tried out first; not usable afterwards.
        stored: Ledger state of the store's last record.
    """
    num_ended = tuple(stored.num_ended.items())
    parted = ((key.partition(":"), count) for key, count in num_ended)
    trial.resume(stored.next_step, {(Fate(fate), AbortReason(why)): n for (fate, _, why), n in parted})
    fitted, restarted = [], []
    for group in sorted(groups, key=lambda group: _order(group, trial.group_size, filtering)):
        fitting = _fitting(trial, filtering, group)
        fitted.append(fitting)
        sampled_ids = {m.trajectory for m in fitting.members if m.version >= 0}
        restarted += [m.trajectory for m in group.members if m.trajectory not in sampled_ids and m != _fresh(m)]
    resumed = RunResumed(
        step=stored.next_step,
        num_ended=num_ended,
        groups=tuple(fitted),
        num_groups=stored.num_started // trial.members_started if stored.sources else 0,
        sources=stored.sources,
    )
    return resumed, tuple(sorted(restarted))


def _order(group: GroupInFlight, group_size: int, filtering: Filtering) -> tuple[int, int, int]:
    """Groups to be filtered come first, since they give their places back, then complete ones, then those begun."""
    scored = [m for m in group.members if m.scored][:group_size]
    sampled_versions = [m.version for m in group.members if m.version >= 0]
    stage = 2 if sampled_versions else 3
    if len(scored) == group_size:
        stage = 1 if filtering.drop_reason([m.reward for m in scored if m.reward is not None]) is None else 0
    return stage, min(sampled_versions, default=0), group.group


def _fitting(trial: StalenessLedger, filtering: Filtering, group: GroupInFlight) -> GroupInFlight:
    """A group as it can be taken up, after doing so on the ledger: without what is too old to be promised a place."""
    ids = tuple(m.trajectory for m in group.members)
    trial.start(group.group, ids)
    versions = sorted({m.version for m in group.members if m.version >= 0})
    oldest = next((v for v in versions if trial.can_reserve(group.group, v)), None)
    num_scored = 0
    members = []
    for stored in group.members:
        member = stored
        if oldest is None or member.version < oldest:
            member = _fresh(member)
        elif member.scored and num_scored == trial.group_size:  # it was surplus already when its reward came
            member = replace(member, sampled=True, scored=False, reward=None)
        num_scored += member.scored
        members.append(member)
    for member in sorted(members, key=lambda member: member.version):
        if member.version >= 0:
            trial.reserve(group.group, member.trajectory, member.version)
    scored = [m for m in members if m.scored]
    for member in scored:
        trial.complete(group.group, member.trajectory)
    if len(scored) == trial.group_size:
        verdict = filtering.drop_reason([m.reward for m in scored if m.reward is not None])
        if verdict is None:
            trial.occupy(group.group)
        else:
            trial.filter(group.group, verdict)
    return replace(group, members=tuple(members))


def _fresh(member: MemberInFlight) -> MemberInFlight:
    return MemberInFlight(trajectory=member.trajectory, version=PolicyVersion(-1))

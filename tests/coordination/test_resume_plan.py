"""Resume plans: without redundancy every recovered reservation fits, and no later legal call is rejected."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.coordination.resume_plan import plan_resume
from staleflow.pipeline.simulator.baselines import DroppingLedger
from staleflow.pipeline.strategies.filtering import DropNoSignal, KeepAll
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import LedgerState, SourceState
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId, outcome_key


@dataclass
class RandomLedgerRun:
    """A run of random ledger operations with the knowledge of its server and store. alive: for the commit of each
    version, the members that are not stored."""

    rng: random.Random
    ledger: StalenessLedger
    versions: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    commits: list[tuple[int, dict[str, int], set[int]]] = field(default_factory=list)

    def live(self, steps: int) -> None:
        self.commit()
        while self.ledger.version < steps:
            self.work()

    def work(self) -> None:
        ledger, rng = self.ledger, self.rng
        number = ledger.num_started // ledger.members_started_per_group
        if rng.random() < 0.3 and ledger.num_reservable(ledger.version) > 0:
            ledger.start(GroupId(number))
        for group, entry in list(ledger.live_groups.items()):
            if group not in ledger.live_groups:  # dropped in the meantime
                continue
            for member in sorted(entry.unfinished):
                version = PolicyVersion(max(0, ledger.version - rng.randint(0, 2)))
                if member not in entry.member_versions and rng.random() < 0.5 and ledger.can_reserve(group, version):
                    ledger.reserve(group, member, version)
                    self.versions[member] = version
            if rng.random() < 0.5:
                continue
            for member in sorted(entry.unfinished & entry.member_versions.keys()):
                if len(entry.completed) < ledger.group_size and rng.random() < 0.7:
                    self.done.append(member)
                    if ledger.complete(group, member):
                        self.end(ledger.occupy(group))
                        break
            if rng.random() < 0.02 and group in ledger.live_groups:
                self.end(ledger.abort(group, AbortReason.ENGINE_FAILED))
        if ledger.next_step == ledger.version and ledger.is_batch_ready():
            consumption = ledger.consume(ledger.next_step)
            self.ended |= set(consumption.members)
            self.end(consumption.surplus)
        elif ledger.next_step > ledger.version and rng.random() < 0.4:
            self.commit()
            ledger.publish(PolicyVersion(ledger.version + 1))

    def end(self, endings: Iterable[Ending]) -> None:
        self.ended |= {e.trajectory for e in endings}

    def commit(self) -> None:
        num_ended = {outcome_key(fate, reason): n for (fate, reason), n in self.ledger.num_ended.items()}
        self.commits.append((self.ledger.num_started, num_ended, set(self.ended)))

    def found(self, version: int) -> tuple[LedgerState, list[GroupInFlight]]:
        """Return what a run resumed from `version` finds after a kill at this moment."""
        num_started, num_ended, stored = self.commits[version]
        members = self.ledger.members_started_per_group
        groups: dict[int, list[MemberInFlight]] = {}
        for i in [*self.done, *(i for i in range(self.ledger.num_started) if i not in self.done)]:
            if i not in stored:
                sampled_under = self.versions.get(i, version + 1)
                member = MemberInFlight(trajectory=TrajectoryId(i))
                if sampled_under <= version:
                    member = MemberInFlight(
                        trajectory=TrajectoryId(i),
                        version=PolicyVersion(sampled_under),
                        tokens=5,
                        sampled=i in self.done,
                        scored=i in self.done,
                        reward=float(i % 2) if i in self.done else None,
                    )
                groups.setdefault(i // members, []).append(member)
        ledger = LedgerState(num_started=num_started, num_ended=num_ended, live=(), next_step=version, version=version)
        return ledger, [
            GroupInFlight(group=GroupId(g), prompt_tokens=4, members=tuple(m)) for g, m in sorted(groups.items())
        ]


def new_ledger(
    eta: int, groups: int, size: int, extra_groups: int = 0, extra_members: int = 0, *, waits: bool = True
) -> StalenessLedger:
    return (StalenessLedger if waits else DroppingLedger)(
        eta=eta,
        groups_per_step=groups,
        group_size=size,
        groups_started_per_step=groups + extra_groups,
        members_started_per_group=size + extra_members,
        num_steps=30,
    )


@given(
    seed=st.integers(0, 2**32),
    eta=st.integers(0, 3),
    groups=st.integers(1, 3),
    size=st.integers(1, 3),
    extra=st.sampled_from([(0, 0, True), (0, 1, True), (1, 0, True), (2, 2, True), (1, 1, False)]),
    steps=st.integers(1, 6),
    undone=st.integers(0, 2),
    filters=st.booleans(),
)
def test_recovered_reservations_fit_and_the_run_can_end(
    seed: int, eta: int, groups: int, size: int, extra: tuple[int, int, bool], steps: int, undone: int, filters: bool
) -> None:
    shape = (eta, groups, size, *extra[:2])
    life = RandomLedgerRun(random.Random(seed), new_ledger(*shape, waits=extra[2]))
    life.live(steps)
    for _ in range(life.rng.randint(0, 9)):
        life.work()
    version = max(0, life.ledger.version - undone)
    stored, found = life.found(version)
    rule = DropNoSignal() if filters else KeepAll()
    event, again = plan_resume(new_ledger(*shape, waits=extra[2]), rule, stored, found)

    assert {g.group for g in event.groups} == {g.group for g in found}
    kept = {m.trajectory: m for g in event.groups for m in g.members}
    assert kept.keys() == {m.trajectory for g in found for m in g.members}
    begun = {m.trajectory: m for g in found for m in g.members if m.version >= 0}
    assert {i for i in begun if kept[i].version < 0} == set(again)
    assert all(kept[i].tokens == begun[i].tokens for i in begun if i not in again)
    gave_up = any(fate is Fate.ABORTED for fate, _ in life.ledger.num_ended)
    if extra == (0, 0, True) and not gave_up:
        assert not again, "the union was feasible"

    # On another ledger, as the coordinator does it.
    ledger = new_ledger(*shape, waits=extra[2])
    parted = {k: n for k, n in life.ledger.num_ended.items() if stored.num_ended.get(outcome_key(*k))}
    ledger.resume(version, {k: stored.num_ended[outcome_key(*k)] for k in parted})
    shed: set[int] = set()
    for group in event.groups:
        ledger.start(group.group, [m.trajectory for m in group.members])
        for member in sorted(group.members, key=lambda m: m.version):
            if member.version >= 0:
                ledger.reserve(group.group, member.trajectory, member.version)
        complete = [ledger.complete(group.group, m.trajectory) for m in group.members if m.scored]
        if complete and complete[-1]:
            rewards = [m.reward for m in group.members if m.reward is not None]
            verdict = rule.drop_reason(rewards)
            endings = ledger.occupy(group.group) if verdict is None else ledger.filter(group.group, verdict)
            shed |= {e.group for e in endings}
        ledger.validate()
    assert ledger.num_started == ledger.num_live + sum(ledger.num_ended.values())
    rest = RandomLedgerRun(random.Random(seed + 1), ledger)
    rest.commits = [(0, {}, set())] * (version + 1)
    while ledger.version < version + 3:
        before = ledger.version
        for _ in range(400):
            rest.work()
            ledger.validate()
            if ledger.version > before:
                break
        else:
            pytest.fail("no step can begin")


def test_members_of_another_group_are_rejected() -> None:
    ledger = new_ledger(1, 2, 2, 0, 1)
    ledger.resume(0, {})
    for members in ([], [0], [0, 0], [0, 3], [0, 1, 2, 3]):
        with pytest.raises(ProtocolViolation, match="group 0 cannot be taken up"):
            ledger.start(GroupId(0), [TrajectoryId(i) for i in members])
    assert ledger.num_started == 0
    assert ledger.start(GroupId(0), [TrajectoryId(2), TrajectoryId(0)]) == (2, 0)
    assert not ledger.live_groups[GroupId(0)].is_reserved
    assert ledger.num_live == 2


SCORED, SURPLUS = "scored", "sampled"


def members_of(group: int, *states: tuple[int, float | None] | int) -> GroupInFlight:
    """Return a group in flight whose members have a version and, if scored, a reward."""
    members = []
    for i, state in enumerate(states):
        version, reward = state if isinstance(state, tuple) else (state, None)
        scored = isinstance(state, tuple)
        member = MemberInFlight(
            trajectory=TrajectoryId(3 * group + i), version=PolicyVersion(version), tokens=5 * (version >= 0),
            sampled=scored, scored=scored, reward=reward,
        )  # fmt: skip
        members.append(member)
    return GroupInFlight(group=GroupId(group), prompt_tokens=4, members=tuple(members))


def recovered(
    eta: int, *groups: GroupInFlight, extra_groups: int = 0
) -> tuple[Sequence[tuple[int, Sequence[tuple[int, str]]]], tuple[int, ...]]:
    """Return the recovered groups of a run at version 2 (two groups per step, two to three members each) in order, with
    version and state of each member, and the members that restart."""
    consumed = {outcome_key(Fate.CONSUMED, AbortReason.NONE): 8}
    stored = LedgerState(num_started=8, num_ended=consumed, live=(), next_step=2, version=2)
    event, again = plan_resume(new_ledger(eta, 2, 2, extra_groups, 1), DropNoSignal(), stored, groups)
    assert (event.step, event.num_ended, event.num_groups) == (2, tuple(consumed.items()), 0)
    states = [
        (g.group, [(m.version, SCORED if m.scored else SURPLUS if m.sampled else "") for m in g.members])
        for g in event.groups
    ]
    return states, again


def test_filtered_then_complete_then_the_oldest_groups_are_recovered() -> None:
    groups = (
        members_of(3, -1, -1, -1),
        members_of(4, 2, -1, 2),
        members_of(5, 2, 1, -1),
        members_of(6, 2, (0, 0.0), -1),
        members_of(7, (2, 1.0), (2, 0.0), 1),
        members_of(8, (2, 1.0), (2, 0.0), -1),
        members_of(9, (2, 1.0), (2, 1.0), (2, 0.0)),
        members_of(10, (2, None), (2, 1.0), -1),
    )
    for order in (groups, groups[::-1]):
        states, again = recovered(9, *order)
        assert [group for group, _ in states] == [9, 10, 7, 8, 6, 5, 4, 3]
        assert again == ()


def test_a_reward_after_enough_others_is_surplus() -> None:
    states, again = recovered(1, members_of(3, (2, 1.0), (2, 0.0), (2, 0.5)))
    assert states == [(3, [(2, SCORED), (2, SCORED), (2, SURPLUS)])]
    assert again == ()


def test_members_too_old_for_an_entry_restart_and_the_others_are_kept() -> None:
    states, again = recovered(1, members_of(3, (0, 1.0), (1, 0.0), 2), members_of(4, 0, -1, 0))
    assert states == [(3, [(-1, ""), (1, SCORED), (2, "")]), (4, [(-1, ""), (-1, ""), (-1, "")])]
    assert again == (9, 12, 14)


def test_a_group_without_an_entry_restarts() -> None:
    """Steps 2 and 3 have two entries each."""
    states, again = recovered(1, *(members_of(group, 2, -1, -1) for group in (7, 6, 5, 4, 3)))
    assert [(group, members[0][0]) for group, members in states] == [(3, 2), (4, 2), (5, 2), (6, 2), (7, -1)]
    assert again == (21,)
    complete = [members_of(group, (2, 1.0), (2, 0.0), -1) for group in (8, 9)]
    states, again = recovered(1, *(members_of(group, 2, -1, -1) for group in (5, 4, 3)), *complete)
    assert [group for group, _ in states] == [8, 9, 3, 4, 5]
    assert again == (15,)
    # Those that are filtered give their places back, so that all the others have one.
    same = members_of(8, (2, 1.0), (2, 1.0), -1)
    states, again = recovered(1, *(members_of(group, 2, -1, -1) for group in (6, 5, 4, 3)), same)
    assert [group for group, _ in states] == [8, 3, 4, 5, 6]
    assert again == ()


def test_partial_groups_are_not_recovered_when_complete_groups_fill_all_entries() -> None:
    complete = [members_of(group, (2, 1.0), (2, 0.0), -1) for group in (8, 9)]
    states, again = recovered(0, members_of(3, 2, -1, -1), *complete, extra_groups=1)
    assert [group for group, _ in states] == [8, 9, 3]
    assert again == (9,)


def test_episodes_that_cannot_be_set_back_restart() -> None:
    """Only those that need another turn after an observation, in sources whose environment is not repeatable."""
    groups = tuple(replace(members_of(3 + source, (2, 1.0), 2, 2), source=source) for source in (0, 1))
    groups = tuple(
        replace(g, members=(*(replace(m, given_tokens=3) for m in g.members[:2]), g.members[2])) for g in groups
    )
    consumed = {outcome_key(Fate.CONSUMED, AbortReason.NONE): 8}
    stored = LedgerState(num_started=8, num_ended=consumed, live=(), next_step=2, version=2)
    event, restarted = plan_resume(new_ledger(1, 2, 2, 0, 1), KeepAll(), stored, groups, {1})
    assert {g.group: [m.version for m in g.members] for g in event.groups} == {3: [2, 2, 2], 4: [2, -1, 2]}
    assert restarted == (13,)


def test_a_run_of_several_sources_continues_drawing_after_its_started_groups() -> None:
    consumed = {outcome_key(Fate.CONSUMED, AbortReason.NONE): 8}
    stored = LedgerState(
        num_started=12, num_ended=consumed, live=(), next_step=2, version=2, sources=(SourceState(num_drawn=4),)
    )
    event, _ = plan_resume(new_ledger(1, 2, 2, 0, 1), KeepAll(), stored, ())
    assert (event.num_groups, event.sources) == (4, stored.sources)

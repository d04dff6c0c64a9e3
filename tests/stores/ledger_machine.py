"""Random operations on a ledger and its naive model: every method, legal and illegal, in any order."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId
from tests.stores.ledger_model import NaiveGroup, NaiveLedger

MAX_GROUPS = 9
"""Maximum number of live groups: the naive model tries every batch and every assignment."""


def dump_ledger(ledger: Any) -> str:
    """Return the complete state of a ledger as text, to check that a rejected call changed nothing."""
    entries = {
        g: (e.version, sorted(e.unfinished), e.completed, sorted(e.member_versions.items()))
        for g, e in ledger.live_groups.items()
    }
    counts = (ledger.version, ledger.next_step, ledger.num_started, ledger.num_ended)
    return repr((entries, ledger._reserved, ledger._occupied, counts))


class LedgerMachine(RuleBasedStateMachine):
    """Random operations on a ledger and its model."""

    @initialize(
        eta=st.integers(0, 3),
        batch=st.integers(1, 3),
        group_size=st.integers(1, 3),
        extra_groups=st.integers(0, 2),
        extra_members=st.integers(0, 2),
        num_steps=st.sampled_from([3, 6, 10**6]),
    )
    def begin(
        self, eta: int, batch: int, group_size: int, extra_groups: int, extra_members: int, num_steps: int
    ) -> None:
        self.ledger = StalenessLedger(
            eta=eta,
            groups_per_step=batch,
            group_size=group_size,
            groups_started_per_step=batch + extra_groups,
            members_started_per_group=group_size + extra_members,
            num_steps=num_steps,
        )
        self.naive = NaiveLedger(
            eta=eta,
            batch=batch,
            group_size=group_size,
            batch_started=batch + extra_groups,
            members_started_per_group=group_size + extra_members,
            num_steps=num_steps,
        )
        self.next_group = 0
        self.ended: dict[int, str] = {}

    def record(self, endings: Any) -> set[int]:
        """Record endings; each trajectory may end once."""
        members = set()
        for ending in endings:
            assert ending.trajectory not in self.ended, f"{ending.trajectory} ended twice"
            self.ended[ending.trajectory] = ending.fate.value
            members.add(ending.trajectory)
        return members

    def refused(self, verb: Any, *args: Any) -> None:
        before = dump_ledger(self.ledger)
        with pytest.raises(ProtocolViolation):
            verb(*args)
        assert dump_ledger(self.ledger) == before

    def pick(self, data: Any, groups: list[GroupId]) -> GroupId:
        assume(groups)
        chosen: GroupId = data.draw(st.sampled_from(groups))
        return chosen

    def begin_group(self) -> GroupId:
        group = GroupId(self.next_group)
        self.next_group += 1
        members = self.ledger.start(group)
        self.naive.groups[group] = NaiveGroup(members=list(members))
        self.naive.started += len(members)
        return group

    def route(self, group: GroupId, member: TrajectoryId, lag: int) -> bool:
        """Route one member at the version `lag` before the newest. Ledger and model must agree, and an illegal call
        must change nothing."""
        version = PolicyVersion(max(0, self.naive.version - lag))
        g = self.naive.groups[group]
        legal = self.naive.can_reserve(group, version)
        assert self.ledger.can_reserve(group, version) == legal
        if g.version is None:
            assert (self.ledger.reservation_refusal(version) is None) == legal
            assert (self.ledger.num_reservable(version) > 0) == legal
        if not legal:
            self.refused(self.ledger.reserve, group, member, version)
            return False
        self.ledger.reserve(group, member, version)
        g.version = version if g.version is None else min(g.version, version)
        g.routed[member] = min(version, g.routed.get(member, version))
        return True

    def finish(self, group: GroupId) -> bool:
        """Complete routed members, and occupy if that completes the group."""
        g = self.naive.groups[group]
        for member in [m for m in g.waiting if m in g.routed][: self.naive.group_size - len(g.done)]:
            g.done.append(member)
            assert self.ledger.complete(group, member) == (len(g.done) == self.naive.group_size)
        if len(g.done) < self.naive.group_size:
            self.refused(self.ledger.occupy, group)
            return False
        surplus = set(g.waiting)
        members = self.record(self.ledger.occupy(group))
        g.gone |= surplus
        self.naive.aborted += len(surplus)
        g.occupied = True
        assert members == surplus | self.naive.shed()
        return True

    def take_batch(self) -> bool:
        step = self.naive.next_step
        self.refused(self.ledger.consume, step + 1)
        if not self.naive.ready():
            self.refused(self.ledger.consume, step)
            return False
        taken = self.ledger.consume(step)
        assert len(set(taken.groups)) == self.naive.batch
        assert len(set(taken.members)) == len(taken.members)
        versions = dict(zip(taken.members, taken.versions, strict=True))
        for group in taken.groups:
            g = self.naive.groups.pop(group)
            assert g.occupied
            assert g.version is not None
            assert g.version <= step <= g.version + self.naive.eta
            assert {m: versions.get(m) for m in g.done} == {m: g.routed[m] for m in g.done}
            for member in g.done:
                assert member not in self.ended, f"{member} ended twice"
                self.ended[member] = Fate.CONSUMED.value
            self.naive.consumed += len(g.done)
        self.naive.next_step += 1
        assert len(taken.members) == self.naive.batch * self.ledger.group_size
        assert all(e.fate is Fate.ABORTED for e in taken.surplus)
        assert self.record(taken.surplus) == self.naive.shed()
        self.refused(self.ledger.consume, step)
        return True

    def publish_version(self) -> None:
        self.refused(self.ledger.publish, self.naive.version)
        self.naive.version = PolicyVersion(self.naive.version + 1)
        self.ledger.publish(self.naive.version)

    @rule()
    def start(self) -> None:
        assume(len(self.naive.groups) < MAX_GROUPS)
        self.refused(self.ledger.start, self.begin_group())

    @rule(data=st.data(), lag=st.integers(0, 4))
    def reserve(self, data: Any, lag: int) -> None:
        """Reserve at any version, including versions that are too old."""
        group = self.pick(data, [i for i, g in self.naive.groups.items() if not g.occupied and g.waiting])
        member = data.draw(st.sampled_from(self.naive.groups[group].waiting))
        self.route(group, member, lag)

    @rule(num_groups=st.integers(1, 3), finished=st.integers(0, 3), lag=st.integers(0, 2), train=st.booleans())
    def work(self, num_groups: int, finished: int, lag: int, train: bool) -> None:
        """Typical work: start some groups, finish some of them, train when a batch is ready."""
        for i in range(num_groups):
            if len(self.naive.groups) >= MAX_GROUPS:
                break
            group = self.begin_group()
            routed = [self.route(group, member, lag) for member in self.naive.groups[group].members]
            if i < finished and all(routed):
                self.finish(group)
        if train and self.take_batch():
            self.publish_version()

    @rule(data=st.data())
    def complete(self, data: Any) -> None:
        group = self.pick(data, [i for i, g in self.naive.groups.items() if not g.occupied])
        g = self.naive.groups[group]
        assume(len(g.done) < self.naive.group_size and g.waiting)
        member = data.draw(st.sampled_from(g.waiting))
        if member not in g.routed:
            self.refused(self.ledger.complete, group, member)
            return
        g.done.append(member)
        assert self.ledger.complete(group, member) == (len(g.done) == self.naive.group_size)

    @rule(data=st.data())
    def occupy(self, data: Any) -> None:
        self.finish(self.pick(data, [i for i, g in self.naive.groups.items() if not g.occupied]))

    @rule(data=st.data())
    def filter(self, data: Any) -> None:
        group = self.pick(data, [i for i, g in self.naive.groups.items() if not g.occupied])
        g = self.naive.groups[group]
        if len(g.done) < self.naive.group_size:
            self.refused(self.ledger.filter, group, AbortReason.NO_SIGNAL)
            return
        self.naive.filtered += len(g.done)
        self.naive.aborted += len(g.waiting)
        expected = self.naive.drop(group)
        assert self.record(self.ledger.filter(group, AbortReason.NO_SIGNAL)) == expected

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        group = self.pick(data, list(self.naive.groups))
        expected = self.naive.drop(group)
        self.naive.aborted += len(expected)
        assert self.record(self.ledger.abort(group, AbortReason.RUN_ENDED)) == expected
        self.refused(self.ledger.abort, group, AbortReason.RUN_ENDED)

    @rule(data=st.data())
    def abort_member(self, data: Any) -> None:
        group = self.pick(data, [i for i, g in self.naive.groups.items() if g.waiting])
        g = self.naive.groups[group]
        member = data.draw(st.sampled_from(g.waiting))
        expected = {member}
        if len(g.done) + len(g.waiting) > self.naive.group_size:
            g.gone.add(member)
        else:
            expected = self.naive.drop(group)
        self.naive.aborted += len(expected)
        assert self.record(self.ledger.abort(group, AbortReason.ENGINE_FAILED, member)) == expected

    @rule()
    def consume(self) -> None:
        self.take_batch()

    @precondition(lambda self: self.naive.next_step == self.naive.version + 1)
    @rule()
    def publish(self) -> None:
        self.publish_version()

    @precondition(lambda self: self.naive.next_step == self.naive.version)
    @rule()
    def publish_too_early(self) -> None:
        self.refused(self.ledger.publish, self.naive.version + 1)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.validate()
        assert all([*self.ledger._reserved.values(), *self.ledger._occupied.values()]), "no version without a group"
        naive = self.naive
        assert self.ledger.num_started == naive.started
        assert self.ledger.num_live == len(list(naive.live()))
        assert naive.started == naive.consumed + naive.filtered + naive.aborted + self.ledger.num_live
        assert len(self.ended) == naive.consumed + naive.filtered + naive.aborted
        assert self.ledger.num_reserved == len(naive.held(occupied=False))
        assert self.ledger.num_occupied == len(naive.held(occupied=True))
        values = {i: g.version for i, g in naive.groups.items() if g.version is not None}
        finished = {i: v for v, groups in self.ledger._occupied.items() for i in groups}
        reserved = {i: e.version for i, e in self.ledger.live_groups.items() if e.is_reserved}
        assert reserved | finished == values
        assert finished.keys() == {i for i, g in naive.groups.items() if g.occupied}
        assert all(self.ledger.is_live(i) for i in naive.groups)
        assert self.ledger.is_batch_ready() == naive.ready()
        seated = sum(sum(b.reserved.values()) + sum(b.occupied.values()) for b in self.ledger.buffer_views())
        assert naive.redundant or seated == len(naive.held())

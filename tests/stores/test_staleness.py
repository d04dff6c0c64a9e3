"""The staleness protocol: table tests of single rules, and random operations against a naive model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.admission_rules import WindowedLedger
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger import UNLIMITED, StalenessLedger
from staleflow.stores.staleness.ledger_groups import Ending, LiveGroup
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId
from tests.stores.ledger_machine import LedgerMachine

TestLedgerMachine = LedgerMachine.TestCase


def make(
    eta: int,
    batch: int = 1,
    size: int = 1,
    *,
    groups_started_per_step: int | None = None,
    members_started_per_group: int | None = None,
    num_steps: int = UNLIMITED,
) -> StalenessLedger:
    return StalenessLedger(
        eta=eta,
        groups_per_step=batch,
        group_size=size,
        groups_started_per_step=groups_started_per_step,
        members_started_per_group=members_started_per_group,
        num_steps=num_steps,
    )


def route(ledger: StalenessLedger, group: int, version: int) -> None:
    """Start a group and route all its members."""
    for member in ledger.start(GroupId(group)):
        ledger.reserve(GroupId(group), member, PolicyVersion(version))


def finish(ledger: StalenessLedger, group: int) -> tuple[Ending, ...]:
    """Complete as many members as the group needs, and occupy."""
    for member in sorted(ledger.live_groups[GroupId(group)].unfinished)[: ledger.group_size]:
        ledger.complete(GroupId(group), member)
    return ledger.occupy(GroupId(group))


@pytest.mark.parametrize(("eta", "room"), [(0, 2), (1, 4), (3, 8)])
def test_num_reservable_is_one_batch_per_step_within_the_bound(eta: int, room: int) -> None:
    assert make(eta, batch=2).num_reservable(PolicyVersion(0)) == room


def test_a_refusal_states_the_number_of_reserved_entries() -> None:
    ledger = make(1, batch=2)
    for group in range(4):
        route(ledger, group, 0)
    assert ledger.reservation_refusal(PolicyVersion(0)) == "4 groups have reserved the 4 entries up to step 1"
    finish(ledger, 0)
    finish(ledger, 1)
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    assert ledger.reservation_refusal(PolicyVersion(0)) == "2 groups have reserved the 2 entries up to step 1"
    for group in (4, 5):
        route(ledger, group, 1)
    assert ledger.reservation_refusal(PolicyVersion(1)) == "4 groups have reserved the 4 entries up to step 2"


def test_a_step_waits_for_a_group_at_its_deadline() -> None:
    ledger = make(1)
    route(ledger, 0, 0)
    route(ledger, 1, 0)
    finish(ledger, 1)
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    route(ledger, 2, 1)
    finish(ledger, 2)
    assert not ledger.is_batch_ready()  # group 0 is due by step 1
    finish(ledger, 0)
    assert ledger.consume(1).groups == (0,)


def test_an_older_member_lowers_the_group_version_only_if_all_deadlines_hold() -> None:
    ledger = make(1, batch=1, size=2)
    route(ledger, 0, 0)
    ledger.complete(GroupId(0), TrajectoryId(0))
    ledger.complete(GroupId(0), TrajectoryId(1))
    ledger.occupy(GroupId(0))
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    ledger.start(GroupId(1))
    ledger.reserve(GroupId(1), TrajectoryId(2), PolicyVersion(1))
    ledger.reserve(GroupId(1), TrajectoryId(3), PolicyVersion(0))
    assert ledger.live_groups[GroupId(1)].version == 0
    ledger.start(GroupId(2))
    ledger.reserve(GroupId(2), TrajectoryId(4), PolicyVersion(1))
    assert not ledger.can_reserve(GroupId(2), PolicyVersion(0))  # step 1 is promised to group 1
    with pytest.raises(ProtocolViolation, match="cannot reserve an entry"):
        ledger.reserve(GroupId(2), TrajectoryId(5), PolicyVersion(0))


@pytest.mark.parametrize(("late", "ready"), [(1, True), (2, False)])
def test_a_step_leaves_behind_as_many_due_groups_as_were_started_in_excess(late: int, ready: bool) -> None:
    ledger = make(1, batch=2, groups_started_per_step=3)
    for group in range(2 + late):
        route(ledger, group, 0)
    finish(ledger, 0)
    finish(ledger, 1)
    assert ledger.consume(0).surplus == (), "the others may still be trained by step 1"
    ledger.publish(PolicyVersion(1))
    for group in (7, 8):
        route(ledger, group, 1)
        finish(ledger, group)
    assert ledger.is_batch_ready() == ready
    if ready:
        (ending,) = ledger.consume(1).surplus
        assert (ending.group, ending.reason) == (2, AbortReason.TOO_STALE)


def test_nothing_is_reserved_beyond_the_planned_end() -> None:
    ledger = make(2, batch=2, num_steps=2)
    assert ledger.num_reservable(PolicyVersion(0)) == 4
    for group in range(4):
        route(ledger, group, 0)
    assert ledger.num_reservable(PolicyVersion(0)) == 0
    finish(ledger, 0)
    assert not ledger.is_batch_ready()
    finish(ledger, 1)
    assert ledger.is_batch_ready(), "all four are due by step 1, none of them a second time later"


def test_aborting_a_finished_or_unknown_member_raises() -> None:
    ledger = make(0, size=2, members_started_per_group=3)
    route(ledger, 0, 0)
    ledger.complete(GroupId(0), TrajectoryId(0))
    for member in (0, 7):
        with pytest.raises(ProtocolViolation, match=f"trajectory {member} of group 0 cannot be aborted"):
            ledger.abort(GroupId(0), AbortReason.ENGINE_FAILED, TrajectoryId(member))
    with pytest.raises(ProtocolViolation, match="trajectory 0 of group 0 is not waiting to be sampled"):
        ledger.reserve(GroupId(0), TrajectoryId(0), PolicyVersion(0))
    ledger.validate()
    assert ledger.num_live == 3


def test_consume_rejects_a_group_beyond_its_deadline() -> None:
    ledger = make(1)
    route(ledger, 0, 0)
    finish(ledger, 0)
    ledger.next_step, ledger.version = 2, PolicyVersion(2)
    with pytest.raises(ProtocolViolation, match="group 0 of version 0 at step 2"):
        ledger.consume(2)
    assert ledger.num_occupied == 1


def test_the_view_places_finished_groups_early_and_reserved_groups_late() -> None:
    ledger = make(2, batch=2)
    for group in range(5):
        route(ledger, group, 0)
    for group in (1, 3, 4):
        finish(ledger, group)
    views = [(view.step, view.reserved, view.occupied, view.capacity) for view in ledger.buffer_views()]
    assert views == [(0, {}, {0: 2}, 2), (1, {}, {0: 1}, 2), (2, {0: 2}, {}, 2)]
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    route(ledger, 5, 1)
    views = [(view.step, view.reserved, view.occupied, view.capacity) for view in ledger.buffer_views()]
    assert views == [(1, {}, {0: 1}, 2), (2, {0: 2}, {}, 2), (3, {1: 1}, {}, 2)]
    for group in (6, 7):  # the newest take the latest places first
        route(ledger, group, 1)
    views = [(view.step, view.reserved, view.occupied, view.capacity) for view in ledger.buffer_views()]
    assert views == [(1, {0: 1}, {0: 1}, 2), (2, {1: 1, 0: 1}, {}, 2), (3, {1: 2}, {}, 2)]
    for group in (5, 6):  # no step gets more groups than its places, whatever their versions are
        finish(ledger, group)
    views = [(view.step, view.reserved, view.occupied, view.capacity) for view in ledger.buffer_views()]
    assert views == [(1, {}, {0: 1, 1: 1}, 2), (2, {0: 2}, {}, 2), (3, {1: 1}, {1: 1}, 2)]


def test_the_view_ends_with_the_planned_end() -> None:
    ledger = make(2, num_steps=2)
    for group in (0, 1):
        route(ledger, group, 0)
    views = [(view.step, view.reserved, view.occupied) for view in ledger.buffer_views()]
    assert views == [(0, {0: 1}, {}), (1, {0: 1}, {})]


@pytest.mark.parametrize("version", [-1, 1])
def test_reserving_at_an_unpublished_version_raises(version: int) -> None:
    ledger = make(1)
    ledger.start(GroupId(0))
    with pytest.raises(ProtocolViolation, match=f"group 0 .*: version {version} is not published, only 0 to 0 are"):
        ledger.reserve(GroupId(0), TrajectoryId(0), PolicyVersion(version))
    assert ledger.reservation_refusal(PolicyVersion(version)) == f"version {version} is not published, only 0 to 0 are"
    assert not ledger.can_reserve(GroupId(0), PolicyVersion(version))


def test_finished_groups_due_earlier_fill_entries_of_later_steps() -> None:
    """With redundancy there may be more reservations than entries, so finished groups are counted separately."""
    ledger = make(1, groups_started_per_step=2)
    for group in (0, 1):
        route(ledger, group, 0)
        finish(ledger, group)
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    route(ledger, 2, 1)
    finish(ledger, 2)
    assert ledger.reservation_refusal(PolicyVersion(1)) == "finished groups fill all entries up to step 2"
    assert ledger.num_reservable(PolicyVersion(1)) == 0


@pytest.mark.parametrize(
    "bad", [{"eta": -1}, {"groups_per_step": 0}, {"groups_started_per_step": 0}, {"members_started_per_group": 0}]
)
def test_invalid_calls_raise_and_change_nothing(bad: dict[str, int]) -> None:
    numbers: dict[str, Any] = {"eta": 1, "groups_per_step": 1, "group_size": 1, **bad}
    with pytest.raises(ValueError, match=r"must be"):
        StalenessLedger(**numbers)


def test_a_resumed_ledger_continues_from_the_restored_counts() -> None:
    ledger = make(eta=1)
    consumed, lost = (Fate.CONSUMED, AbortReason.NONE), (Fate.ABORTED, AbortReason.RUN_ENDED)
    ledger.resume(3, {consumed: 3, lost: 2})
    ledger.validate()
    assert (ledger.version, ledger.next_step, ledger.num_started, ledger.num_live) == (3, 3, 5, 0)
    route(ledger, 5, 3)
    finish(ledger, 5)
    assert ledger.consume(3).groups == (5,)
    ledger.publish(PolicyVersion(4))
    ledger.validate()
    with pytest.raises(ProtocolViolation, match="cannot resume at step"):
        ledger.resume(4, {consumed: 4})
    other_ledger = make(eta=1)
    with pytest.raises(ProtocolViolation, match="2 trajectories consumed by 3 steps"):
        other_ledger.resume(3, {consumed: 2})
    assert (other_ledger.version, other_ledger.next_step, other_ledger.num_started) == (0, 0, 0)
    other_ledger.resume(3, {consumed: 3})


@pytest.mark.parametrize("members", [[0, 5], [0], [0, 0], [0, 1, 1]], ids=["foreign", "few", "repeated", "excess"])
def test_resumed_group_takes_enough_members_of_its_own_each_once(members: list[int]) -> None:
    ledger = StalenessLedger(eta=1, groups_per_step=1, group_size=2, num_steps=2)
    with pytest.raises(ProtocolViolation, match=r"group 0 cannot be taken up with members"):
        ledger.start(GroupId(0), [TrajectoryId(member) for member in members])
    assert ledger.start(GroupId(0), [TrajectoryId(1), TrajectoryId(0)]) == (1, 0)


def test_a_window_limits_how_far_a_step_passes_over_unfinished_groups() -> None:
    """The window starts at the oldest group, and consumed groups within it still count."""
    ledger = WindowedLedger(3, eta=2, groups_per_step=3, group_size=1)
    for group in range(6):
        route(ledger, group, 0)
    for group in (0, 1, 4, 5):
        finish(ledger, group)
    assert ledger.is_batch_ready()
    assert ledger.consume(0).groups == (0, 1, 4)  # 2 is slow, 5 lies outside of 2, 3 and 4
    ledger.publish(PolicyVersion(1))
    finish(ledger, 3)
    for group in range(6, 9):
        route(ledger, group, 1)
        finish(ledger, group)
    assert not ledger.is_batch_ready(), "3 may be taken, but 5 and what follows may not while 2 is unfinished"
    finish(ledger, 2)
    assert ledger.consume(1).groups == (2, 3, 5)
    ledger.validate()
    edge = WindowedLedger(3, eta=2, groups_per_step=3, group_size=1)
    for group in range(6):
        route(edge, group, 0)
    for group in (0, 1, 5):
        finish(edge, group)
    assert not edge.is_batch_ready(), "2, 3 and 4 are in the window, the first place outside of it is that of 5"
    finish(edge, 3)
    assert edge.consume(0).groups == (0, 1, 3)
    free = StalenessLedger(eta=2, groups_per_step=3, group_size=1)
    for group in range(6):
        route(free, group, 0)
    for group in (0, 1, 5):
        finish(free, group)
    assert free.consume(0).groups == (0, 1, 5)


def add(ledger: Any, count: int, *, finished: bool = False) -> None:
    """Reserve entries of version 0 for more groups than there are entries, or finish them."""
    make_group: Any = LiveGroup
    for group in range(10, 10 + count):
        if finished:
            ledger._occupied.setdefault(0, {})[group] = (group,), (0,)
        else:
            ledger.live_groups[group] = make_group(group, {group}, version=0, member_versions={group: 0})
            ledger._reserved.setdefault(0, {})[group] = None
        ledger.num_started += 1


def end_all(ledger: Any, *, next_step: int = 2, version: int = 2) -> None:
    """Count the trajectories of two steps as consumed."""
    ledger.num_ended[Fate.CONSUMED, AbortReason.NONE] = 2
    ledger.num_started += 2
    ledger.next_step, ledger.version = next_step, version


@pytest.mark.parametrize(
    ("message", "spoil"),
    [
        ("a group has entries under two versions", lambda ledger: ledger._reserved.update({1: {0: None}})),
        ("a group has entries under two versions", lambda ledger: ledger._occupied.update({1: {1: ((1,), (1,))}})),
        ("reserved entries and groups differ", lambda ledger: ledger._reserved[0].clear()),
        ("groups [0] are both finished and unfinished", lambda ledger: ledger._occupied[0].update({0: ((0,), (0,))})),
        ("group 1 of version 0: () of versions ()", lambda ledger: ledger._occupied[0].update({1: ((), ())})),
        ("group 1 of version 0: (1,) of versions (-1,)", lambda ledger: ledger._occupied[0].update({1: ((1,), (-1,))})),
        ("group 0: members both unfinished and done", lambda ledger: ledger.live_groups[0].completed.append(0)),
        ("group 2: members both unfinished and done", lambda ledger: ledger.live_groups[2].completed.append(3)),
        ("group 2 has version -1", lambda ledger: ledger.live_groups[2].member_versions.update({2: 0})),
        ("group 0 has version 0, its members have {}", lambda ledger: ledger.live_groups[0].member_versions.clear()),
        ("started 4 - ended 0 = 4, but 3 live", lambda ledger: setattr(ledger, "num_started", 4)),
        ("2 trajectories consumed by 0 steps", lambda ledger: end_all(ledger, next_step=0)),
        ("4 groups (3 finished) are due by step 1, which has 2 entries", lambda ledger: add(ledger, 2, finished=True)),
        ("3 groups (1 finished) are due by step 1, which has 2 entries", lambda ledger: add(ledger, 1)),
        ("2 groups (1 finished) are due by step 1, which has 0 entries",
         lambda ledger: end_all(ledger, version=1)),
        ("live work of version 0 at step 2, bound 1", end_all),
    ],
)  # fmt: skip
def test_validate_describes_a_broken_invariant(message: str, spoil: Callable[[Any], object]) -> None:
    """Steps 0 and 1 have one entry each; group 0 is reserved, 1 finished and 2 queued."""
    ledger = make(1)
    route(ledger, 0, 0)
    route(ledger, 1, 0)
    finish(ledger, 1)
    ledger.start(GroupId(2))
    ledger.validate()
    spoil(ledger)
    with pytest.raises(ProtocolViolation, match=re.escape(message)):
        ledger.validate()


def test_ledger_of_a_run_without_steps_is_never_ready() -> None:
    ledger = StalenessLedger(eta=1, groups_per_step=1, group_size=1, num_steps=0)
    assert not ledger.is_batch_ready() and ledger.num_reservable(PolicyVersion(0)) == 0


def test_validate_counts_entries_from_the_next_step() -> None:
    ledger = make(1)
    route(ledger, 0, 0)
    finish(ledger, 0)
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    add(ledger, 2, finished=True)
    message = "2 groups (2 finished) are due by step 1, which has 1 entries"
    with pytest.raises(ProtocolViolation, match=re.escape(message)):
        ledger.validate()


def test_redundancy_may_reserve_but_not_finish_more_groups_than_entries() -> None:
    ledger = make(0, groups_started_per_step=3)
    for group in (0, 1, 2):
        route(ledger, group, 0)
    ledger.validate()
    finish(ledger, 2)
    add(ledger, 1, finished=True)
    with pytest.raises(
        ProtocolViolation, match=re.escape("2 groups (2 finished) are due by step 0, which has 1 entries")
    ):
        ledger.validate()

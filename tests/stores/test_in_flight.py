"""In-flight state: deliveries in any order, repeated, late or missing, and what a resume keeps."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool_entries import (
    BatchTaken,
    Entry,
    EpisodeRestarted,
    EvaluationEnded,
    GroupDrawn,
    InFlightResumed,
    RewardDelivered,
    TeacherLogprobsDelivered,
    TokensDelivered,
    TrajectoriesDiscarded,
    TrajectoriesRouted,
    decode,
    encode,
)
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import LedgerState, SourceState
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Trajectory,
    TrajectoryId,
)
from tests.support.segments import sampled_segment

MEMBERS = 3


def drawn(group: int) -> GroupDrawn:
    return GroupDrawn(group=GroupId(group), prompt_tokens=np.arange(4, dtype=np.int32), at_s=1.0)


def routed(trajectory: int, route_number: int) -> TrajectoriesRouted:
    return TrajectoriesRouted(routed=((TrajectoryId(trajectory), route_number),), at_s=2.0)


def token(trajectory: int, position: int) -> int:
    return 1000 * trajectory + position


def tokens(
    trajectory: int,
    route_number: int,
    first: int,
    count: int,
    *,
    switch: int = 10**9,
    finish: FinishReason = FinishReason.UNFINISHED,
    at: str = "a",
) -> TokensDelivered:
    """Return a delivery of tokens from position first on; those from `switch` on have version 1, earlier ones 0."""
    segments = []
    for version, begin, end in (
        (0, first, min(first + count, max(first, switch))),
        (1, max(first, switch), first + count),
    ):
        if end > begin:
            ids = np.asarray([token(trajectory, i) for i in range(begin, end)], np.int32)
            segments.append(sampled_segment(ids, -ids, version=version, instance=at))
    return TokensDelivered(
        trajectory=TrajectoryId(trajectory),
        route_number=route_number,
        start=first,
        segments=tuple(segments),
        finish=finish,
        at_s=3.0,
    )


def reward(trajectory: int, count: int, value: float = 1.0) -> RewardDelivered:
    return RewardDelivered(
        trajectory=TrajectoryId(trajectory), num_tokens=count, reward=value, parts={}, error="", at_s=4.0
    )


def resumed(version: int, *from_prompt: int) -> InFlightResumed:
    return InFlightResumed(version=PolicyVersion(version), from_prompt=tuple(map(TrajectoryId, from_prompt)), at_s=0.5)


def flight(*entries: Entry) -> InFlightState:
    made = InFlightState(group_size=MEMBERS)
    for entry in entries:
        made.apply(entry)
    return made


def check_tokens(t: Trajectory, switch: int = 10**9) -> None:
    assert list(t.response_tokens) == [token(t.id, i) for i in range(t.num_tokens)]
    np.testing.assert_array_equal(t.logprobs, -t.response_tokens.astype(np.float32))
    assert list(t.versions) == [int(i >= switch) for i in range(t.num_tokens)]


@pytest.mark.parametrize("seed", range(60))
def test_deliveries_in_any_order_leave_no_duplicate_token_and_no_gap(seed: int) -> None:
    """Parts of one route overlap; some are lost, repeated or late."""
    rng = random.Random(seed)
    state, held, route_number, switch = flight(drawn(0)), 0, 1, rng.randint(1, 30)
    state.apply(routed(0, route_number))
    for _ in range(40):
        if rng.random() < 0.1:
            route_number += 1
            assert state.apply(routed(0, route_number))
        sent_under = rng.choice((route_number, route_number, route_number, route_number - 1))
        first, count = rng.randint(max(0, held - 4), held + 3), rng.randint(0, 6)
        taken = state.apply(tokens(0, sent_under, first, count, switch=switch, at=f"i{sent_under}"))
        expected = sent_under == route_number and first <= held < first + count
        assert taken == expected
        held = first + count if taken else held
        t = state.live[TrajectoryId(0)]
        assert t.num_tokens == held
        check_tokens(t, switch)
    merged = [(s.version, s.instance) for s in t.segments]
    assert len(merged) == len(set(merged)), "what one instance sampled under one version is one segment"


def test_a_new_route_starts_a_segment_on_the_same_instance_and_version() -> None:
    """The context was recomputed, so logprobs before and after may differ as between two instances."""
    state = flight(drawn(0), routed(0, 1), tokens(0, 1, 0, 3), tokens(0, 1, 3, 2), routed(0, 2), tokens(0, 2, 5, 4))
    state.apply(tokens(0, 2, 9, 1))
    t = state.live[TrajectoryId(0)]
    assert [(s.version, s.instance, len(s.tokens)) for s in t.segments] == [(0, "a", 5), (0, "a", 5)]
    check_tokens(t)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_a_delivery_with_a_non_finite_logprob_is_rejected(value: float) -> None:
    """The state is unchanged, and the same tokens with finite logprobs are accepted."""
    state = flight(drawn(0), routed(0, 1), tokens(0, 1, 0, 5))
    entry = tokens(0, 1, 3, 6, finish=FinishReason.STOP)
    (segment,) = entry.segments
    logprobs = segment.logprobs.copy()
    logprobs[4] = value
    assert not state.apply(replace(entry, segments=(replace(segment, logprobs=logprobs),)))
    t = state.live[TrajectoryId(0)]
    assert (t.num_tokens, t.finish) == (5, FinishReason.UNFINISHED)
    assert state.apply(entry)
    check_tokens(state.live[TrajectoryId(0)])


def test_a_finished_response_stays_finished_and_a_reward_needs_its_token_count() -> None:
    state = flight(drawn(0), routed(0, 1), tokens(0, 1, 0, 5))
    assert not state.apply(reward(0, 4))
    assert state.apply(tokens(0, 1, 5, 0, finish=FinishReason.STOP))
    assert not state.apply(tokens(0, 1, 3, 2))
    assert not state.apply(tokens(0, 1, 3, 9))
    assert state.apply(reward(0, 5))
    (group,) = state.group_summaries()
    assert [(m.trajectory, m.tokens, m.sampled, m.scored, m.reward) for m in group.members] == [
        (0, 5, True, True, 1.0),
        (1, 0, False, False, None),
        (2, 0, False, False, None),
    ]


def eventful_entries() -> list[Entry]:
    """Return entries of two groups consumed by steps 0 and 1, one retired, one partly sampled under versions 0 and
    1."""
    entries: list[Entry] = [drawn(g) for g in range(4)]
    for i in range(12):
        entries.append(routed(i, 1))
        count = 6 if i < 9 else 4
        finish = FinishReason.STOP if i < 9 else FinishReason.UNFINISHED
        entries.append(tokens(i, 1, 0, count, switch=3 if i >= 9 else 10**9, finish=finish))
        entries += [reward(i, 6)] if i < 9 else []
    batches = [tuple(TrajectoryId(i) for i in range(g * 3, g * 3 + 3)) for g in (0, 1)]
    entries += [
        BatchTaken(step=step, trajectories=b, versions=(PolicyVersion(0),) * 3) for step, b in enumerate(batches)
    ]
    endings = tuple(
        Ending(trajectory=TrajectoryId(i), group=GroupId(2), fate=Fate.FILTERED, reason=AbortReason.NO_SIGNAL, step=1)
        for i in (6, 7, 8)
    )
    return [*entries, TrajectoriesDiscarded(endings=endings, versions=(PolicyVersion(0),) * 3)]


def test_a_resume_keeps_tokens_up_to_its_version() -> None:
    state = flight(*eventful_entries())
    assert state.live.keys() == {9, 10, 11}
    assert state.batches.keys() == {0, 1}
    assert [e.trajectory.id for e in state.discarded] == [6, 7, 8]
    before = repr(state)
    later = state.copy_with(resumed(0, 5, 11))
    assert repr(state) == before
    assert list(later.live) == list(range(12))
    assert not later.batches
    assert not later.discarded
    assert later.scored == {0, 1, 2, 3, 4, 6, 7, 8}
    for i, t in later.live.items():
        assert t.num_tokens == {5: 0, 9: 3, 10: 3, 11: 0}.get(i, 6)
        assert t.finish is (FinishReason.STOP if i < 9 and i != 5 else FinishReason.UNFINISHED)
        assert t.v_traj == -1
        assert max(t.timings.arrived_s, t.timings.routed_s, t.timings.sampled_s, t.timings.rewarded_s) <= 0.5
        check_tokens(t)
    assert all(t.num_tokens == 4 for i, t in state.copy_with(resumed(1)).live.items() if i >= 9)


def test_a_late_delivery_of_the_undone_run_is_rejected() -> None:
    """Its entries precede the resume in the spool; later ones start where the resume truncated."""
    state = flight(*eventful_entries(), resumed(0))
    assert state.apply(routed(9, 2))
    assert not state.apply(tokens(9, 2, 4, 2))
    assert state.apply(tokens(9, 2, 3, 2, at="b"))
    check_tokens(state.live[TrajectoryId(9)])


def test_stored_groups_are_removed_and_unknown_groups_are_reported_lost() -> None:
    ledger = LedgerState(num_started=12, num_ended={}, live=((3, 6), (9, 12)), next_step=1, version=0)
    state = flight(*eventful_entries(), drawn(4))
    state.remove_stored(ledger)
    assert state.live.keys() == {9, 10, 11, 12, 13, 14}
    assert state.batches.keys() == {1}
    assert state.discarded == []
    assert state.lost_trajectories(ledger) == {}
    less = flight(*(e for e in eventful_entries() if not isinstance(e, BatchTaken)), drawn(6))
    less.live.clear()
    less.remove_stored(ledger)
    assert less.lost_trajectories(ledger) == {
        1: [3, 4, 5],
        3: [9, 10, 11],
        4: [12, 13, 14],
        5: [15, 16, 17],
        6: [18, 19, 20],
    }
    prompt = np.zeros(2, np.int32)
    less.add_members([TrajectoryId(4)], GroupDrawn(group=GroupId(2), prompt_tokens=prompt, at_s=9.0, dataset_row=7))
    assert less.live[TrajectoryId(4)].group == 1
    assert less.remove_committed([TrajectoryId(6), TrajectoryId(3)], None) == {2}


def test_trajectories_have_the_dataset_row_of_their_prompt() -> None:
    prompt = np.arange(4, dtype=np.int32)
    state = flight(
        GroupDrawn(group=GroupId(0), prompt_tokens=prompt, at_s=0.0, dataset_row=17), *eventful_entries()[1:]
    )
    state.apply(resumed(0, 1))
    assert {t.dataset_row for t in state.live.values() if t.group == 0} == {17}
    assert {t.dataset_row for t in state.live.values() if t.group != 0} <= {-1}


@pytest.mark.parametrize("seed", range(20))
def test_missing_spool_entries_leave_a_valid_state(seed: int) -> None:
    """A spool that could not be written has gaps: the state has less and nothing wrong."""
    rng = random.Random(seed)
    entries = [decode(encode(e)) for e in eventful_entries() if rng.random() < 0.7]
    state = flight(*entries)
    ledger = LedgerState(num_started=0, num_ended={}, live=(), next_step=0, version=0)
    for members in state.lost_trajectories(ledger).values():
        drawn = GroupDrawn(group=GroupId(0), prompt_tokens=np.arange(4, dtype=np.int32), at_s=0.0)
        state.add_members(members, drawn)
    state.apply(resumed(0))
    assert list(state.live) == list(range(state.num_drawn * MEMBERS))
    for t in state.live.values():
        check_tokens(t)
        assert t.id not in state.scored or t.num_tokens == 6


def evaluation_group(number: int) -> GroupDrawn:
    return GroupDrawn(group=GroupId(-number), prompt_tokens=np.arange(4, dtype=np.int32), at_s=1.0)


def discarded(trajectory: int) -> TrajectoriesDiscarded:
    ending = Ending(
        trajectory=TrajectoryId(trajectory), group=GroupId(trajectory // MEMBERS), fate=Fate.ABORTED,
        reason=AbortReason.SURPLUS_MEMBER, step=0,
    )  # fmt: skip
    return TrajectoriesDiscarded(endings=(ending,), versions=(PolicyVersion(0),))


def test_a_teachers_logprobs_are_accepted_once_after_the_reward_one_for_each_token() -> None:
    def teacher(*logprobs: float, count: int = 2) -> TeacherLogprobsDelivered:
        values = np.asarray(logprobs, np.float32)
        return TeacherLogprobsDelivered(trajectory=TrajectoryId(0), num_tokens=count, logprobs=values)

    state = flight(drawn(0), routed(0, 1), tokens(0, 1, 0, 2, finish=FinishReason.STOP))
    assert not state.apply(teacher(-1.0, -2.0)), "before the reward"
    state.apply(reward(0, 2))
    for entry in (teacher(-1.0), teacher(-1.0, count=1), teacher(-1.0, np.nan), teacher(-1.0, -2.0, -3.0)):
        assert not state.apply(entry)
    assert state.live[TrajectoryId(0)].teacher_logprobs is None
    assert state.apply(teacher(-1.0, -2.0))
    assert not state.apply(teacher(-3.0, -4.0)), "the second answer of a teacher"
    stored = state.live[TrajectoryId(0)].teacher_logprobs
    assert stored is not None
    assert stored.tolist() == [-1.0, -2.0]


def test_a_batch_is_taken_once_and_whole() -> None:
    state = flight(drawn(0))
    member, absent = TrajectoryId(0), TrajectoryId(10 * MEMBERS)
    versions = (PolicyVersion(0),)
    assert not state.apply(BatchTaken(step=0, trajectories=(member, absent), versions=versions * 2))
    assert member in state.live
    assert state.apply(BatchTaken(step=0, trajectories=(member,), versions=versions))
    assert not state.apply(BatchTaken(step=0, trajectories=(TrajectoryId(1),), versions=versions))
    assert [t.id for t in state.batches[0]] == [member]


def test_an_entry_that_changes_nothing_is_reported_as_such() -> None:
    state = flight()
    for entry in (drawn(0), evaluation_group(1), discarded(2)):
        assert state.apply(entry) is True
        assert state.apply(entry) is False
    assert state.apply(discarded(99)) is False


def test_the_end_of_an_evaluation_drops_its_trajectories_and_their_scores() -> None:
    member = -MEMBERS
    state = flight(
        drawn(0), evaluation_group(1), EpisodeRestarted(trajectory=TrajectoryId(member), num_tokens=0, route_number=0),
        routed(member, 1), replace(tokens(member, 1, 0, 2, finish=FinishReason.STOP), attempt=1),
    )  # fmt: skip
    assert state.apply(replace(reward(member, 2), attempt=1))
    assert state.scored == {member}
    assert state.apply(EvaluationEnded(at_s=5.0)) is True
    assert (set(state.live), state.scored) == ({0, 1, 2}, set())
    assert (state.routings, state.attempts, state.turn_limits) == ({}, {}, {})
    assert state.apply(EvaluationEnded(at_s=6.0)) is False


def test_trajectories_not_yet_stored_are_listed_from_the_first_one_on() -> None:
    state = flight(drawn(0), drawn(1), evaluation_group(1), discarded(4), discarded(5))
    assert sorted(state.unstored(6, stored=[TrajectoryId(5)])) == [0, 1, 2, 3, 4]
    assert sorted(state.unstored(3, stored=[])) == [0, 1, 2]


def test_a_live_trajectory_that_the_store_has_is_removed() -> None:
    state = flight(drawn(0), drawn(1), routed(0, 1))
    state.remove_stored(LedgerState(num_started=6, num_ended={}, live=((3, 6),), next_step=1, version=0))
    assert (set(state.live), state.routings) == ({3, 4, 5}, {})


def test_a_group_of_which_one_member_is_left_is_summarized() -> None:
    prompt = np.arange(4, dtype=np.int32)
    state = flight(GroupDrawn(group=GroupId(0), prompt_tokens=prompt, at_s=0.0, source=1, task=7))
    state.apply(discarded(0))
    state.apply(discarded(1))
    (group,) = state.group_summaries()
    assert (group.source, group.task, [member.trajectory for member in group.members]) == (1, 7, [2])


def test_the_ledger_state_lists_tasks_in_flight_and_counts_later_draws() -> None:
    prompt = np.arange(4, dtype=np.int32)
    state = flight(
        evaluation_group(1),
        *(GroupDrawn(group=GroupId(g), prompt_tokens=prompt, at_s=0.0, source=g % 2, task=10 + g) for g in range(3)),
    )
    before = LedgerState(
        num_started=3, num_ended={}, live=(), next_step=0, version=0,
        sources=(SourceState(num_drawn=1), SourceState(num_drawn=1)),
    )  # fmt: skip
    after = state.with_tasks(before, num_counted=3)
    assert after.tasks_in_flight == ((0, 0, 10), (1, 1, 11), (2, 0, 12))
    assert [source.num_drawn for source in after.sources] == [2, 2], "groups 1 and 2 were drawn since"
    assert replace(after, sources=before.sources, tasks_in_flight=()) == before
    assert state.tasks_of([GroupId(1), GroupId(7)]) == {1: (1, 11)}

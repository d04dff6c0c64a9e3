"""In-flight state of multi-turn episodes: observations and restarts, repeated, late or missing, and what a resume
keeps."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.in_flight.spool_entries import (
    Entry,
    EpisodeEntry,
    EpisodeRestarted,
    ObservationDelivered,
    TokensDelivered,
    TrajectoriesDiscarded,
    decode,
    encode,
)
from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria, find_stop
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import (
    AbortReason,
    EnvSpan,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Segment,
    Trajectory,
    TrajectoryId,
)
from tests.stores.test_in_flight import drawn, flight, resumed, reward, routed
from tests.support.segments import sampled_segment

ID = TrajectoryId(0)


def sampled(
    route_number: int, first: int, versions: list[int], finish: FinishReason = FinishReason.STOP, episode: int = 0
) -> TokensDelivered:
    """Return a delivery of tokens first, first + 1, ... under these versions; each value encodes attempt and
    position."""
    segments, at = [], first
    for version, group in itertools.groupby(versions):
        ids = [1000 * episode + at + i for i, _ in enumerate(group)]
        segments.append(sampled_segment(ids, -0.5, version=version))
        at += len(ids)
    return TokensDelivered(
        trajectory=ID,
        route_number=route_number,
        start=first,
        segments=tuple(segments),
        finish=finish,
        at_s=3.0,
        attempt=episode,
    )


def observation(first: int, count: int = 2, *, episode: int = 0) -> ObservationDelivered:
    tokens = np.asarray([1000 * episode + first + i for i in range(count)], np.int32)
    return ObservationDelivered(
        trajectory=ID, start=first, role="tool", tokens=tokens, seconds=0.5, at_s=4.0, attempt=episode
    )


def restarted(tokens: int, route_number: int, attempt: int = 0) -> EpisodeRestarted:
    return EpisodeRestarted(trajectory=ID, num_tokens=tokens, route_number=route_number, attempt=attempt)


BEGIN = (drawn(0), routed(0, 1))


def test_the_limits_of_a_turn_are_spooled_with_its_observation() -> None:
    state, stop = flight(), StopCriteria(("\n\n", "é"), (5, 7))
    for entry in (*BEGIN, sampled(1, 0, [0, 0])):
        assert state.apply(entry)
    for limits in ({"max_turn_tokens": 5}, {"stop": stop}, {"max_turn_tokens": 5, "stop": stop}):
        read = decode(encode(replace(observation(2), **limits)))
        assert isinstance(read, ObservationDelivered)
        after = state.copy_with(read)
        assert after.turn_limits == {ID: (limits.get("max_turn_tokens", 0), limits.get("stop", NO_STOP))}
        assert after.copy_with(resumed(0)).turn_limits == {}
    # The observation of the next turn has none.
    for later in (routed(0, 2), sampled(2, 4, [0]), observation(5)):
        assert after.apply(later)
    assert after.turn_limits == {ID: (0, NO_STOP)}


def test_the_limits_of_a_turn_end_with_the_attempt_or_the_trajectory() -> None:
    """Otherwise the first turn of the next attempt has those of another turn, and each ended trajectory leaves its
    own."""
    state = flight(*BEGIN, sampled(1, 0, [0, 0]), replace(observation(2), max_turn_tokens=5))
    assert state.turn_limits == {ID: (5, NO_STOP)}
    assert state.copy_with(restarted(4, 1)).turn_limits == {}
    ending = Ending(trajectory=ID, group=GroupId(0), fate=Fate.ABORTED, reason=AbortReason.ENGINE_FAILED, step=0)
    assert state.copy_with(TrajectoriesDiscarded(endings=(ending,), versions=(PolicyVersion(0),))).turn_limits == {}


def span_summary(t: Trajectory) -> list[tuple[int, int]]:
    """Return (version, number of tokens) of each span."""
    return [(-1 if isinstance(s, EnvSpan) else s.version, len(s.tokens)) for s in t.spans]


def test_an_observation_starts_the_next_turn() -> None:
    state = flight(*BEGIN, sampled(1, 0, [0, 0, 0]))
    assert state.group_summaries()[0].members[0].sampled
    assert state.apply(observation(3))
    assert not state.apply(observation(3))
    (member, *_) = state.group_summaries()[0].members
    assert (member.tokens, member.sampled, member.version) == (5, False, 0)
    assert state.apply(sampled(1, 5, [1], FinishReason.UNFINISHED))
    assert state.apply(sampled(1, 6, [1, 0]))
    t = state.live[ID]
    assert span_summary(t) == [(0, 3), (-1, 2), (1, 2), (0, 1)]
    assert t.sampled.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert t.versions.tolist() == [0, 0, 0, -1, -1, 1, 1, 0]
    assert [x.tolist() for x in t.turns] == [[0, 1, 2], [5, 6, 7]]
    assert t.response_tokens.tolist() == list(range(8))
    assert (t.num_tokens, t.num_sampled, t.num_given, t.environment_s) == (8, 6, 2, 0.5)
    assert t.logprobs.tolist() == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 3


def test_an_empty_observation_starts_a_turn() -> None:
    state = flight(*BEGIN, sampled(1, 0, [0, 0]))
    assert state.apply(observation(2, 0))
    assert not state.apply(observation(2, 0))
    assert state.apply(sampled(1, 2, [0]))
    t = state.live[ID]
    assert span_summary(t) == [(0, 2), (-1, 0), (0, 1)]
    assert [x.tolist() for x in t.turns] == [[0, 1], [2]]
    assert (t.num_given, t.has_env_steps, t.environment_s) == (0, True, 0.5)


@pytest.mark.parametrize(
    "entries",
    [
        (observation(0),),
        (sampled(1, 0, [0, 0], FinishReason.UNFINISHED), observation(2)),
        (sampled(1, 0, [0, 0]), observation(1)),
        (sampled(1, 0, [0, 0]), observation(3)),
        (sampled(1, 0, [0, 0]), reward(0, 2), observation(2)),
        (sampled(1, 0, [0, 0]), sampled(1, 2, [0])),
        (sampled(1, 0, [0, 0]), sampled(1, 4, [0])),
        (sampled(1, 0, [0, 0]), reward(0, 2), restarted(2, 1)),
        (sampled(1, 0, [0, 0]), routed(0, 2), restarted(2, 1)),
    ],
    ids=[
        "before anything", "in mid-turn", "too early", "too late", "after the reward",
        "a turn without its answer", "a turn after a gap", "restarted after the reward", "restarted late",
    ],
)  # fmt: skip
def test_out_of_order_entries_are_rejected(entries: tuple[Entry, ...]) -> None:
    state = flight(*BEGIN, *entries[:-1])
    before = repr(state)
    assert not state.apply(entries[-1])
    assert repr(state) == before


def test_a_restarted_episode_has_only_its_prompt_and_rejects_old_deliveries() -> None:
    state = flight(*BEGIN, sampled(1, 0, [0, 0]), observation(2))
    assert state.apply(restarted(4, 1))
    assert not state.apply(restarted(4, 1))
    assert not state.apply(sampled(1, 0, [0, 0, 0]))
    assert state.apply(routed(0, 2))
    assert state.apply(sampled(2, 0, [1, 1, 1], episode=1))
    assert state.live[ID].response_tokens.tolist() == [1000, 1001, 1002]


def test_a_restart_removes_all_known_tokens() -> None:
    """An entry is missing, so fewer tokens are known than were removed."""
    state = flight(*BEGIN, sampled(1, 0, [0, 0]), restarted(9, 1), routed(0, 2), sampled(2, 0, [0, 0, 0], episode=1))
    assert state.live[ID].response_tokens.tolist() == [1000, 1001, 1002]


def test_a_missing_restart_never_joins_two_attempts() -> None:
    first = (*BEGIN, sampled(1, 0, [0, 0, 0]))
    for later in (
        sampled(2, 3, [0], episode=1),
        observation(3, episode=1),
        replace(reward(0, 3), attempt=1),
        restarted(3, 2, attempt=1),
    ):
        state = flight(*first)
        assert state.apply(later)
        t = state.live[ID]
        assert (t.spans, t.finish, t.id in state.scored) == ((), FinishReason.UNFINISHED, False)
        assert state.attempt(ID) == (2 if isinstance(later, EpisodeRestarted) else 1)
    deliveries = sampled(2, 0, [1], FinishReason.UNFINISHED, episode=1), sampled(2, 1, [1], episode=1)
    state = flight(*first, replace(reward(0, 3), attempt=0), *deliveries)
    t = state.live[ID]
    assert (t.response_tokens.tolist(), t.reward, ID in state.scored) == ([1000, 1001], 0.0, False)
    assert len(t.spans) == 1
    assert not state.apply(observation(2)), "it is of the attempt before"


@pytest.mark.parametrize(
    ("version", "expected", "finish"),
    [
        (0, [(0, 2), (-1, 2)], FinishReason.UNFINISHED),
        (1, [(0, 2), (-1, 2), (1, 2)], FinishReason.UNFINISHED),
        (2, [(0, 2), (-1, 2), (1, 2), (2, 1), (0, 1)], FinishReason.STOP),
    ],
)
def test_a_resume_truncates_a_later_turn(version: int, expected: list[tuple[int, int]], finish: FinishReason) -> None:
    whole = (sampled(1, 0, [0, 0]), observation(2), sampled(1, 4, [1, 1, 2, 0]))
    state = flight(*BEGIN, *whole, reward(0, 8), resumed(version))
    t = state.live[ID]
    assert span_summary(t) == expected
    assert t.finish is finish
    assert (ID in state.scored) == (version == 2)
    assert t.response_tokens.tolist() == list(range(sum(count for _, count in expected)))


def test_a_resume_drops_an_observation_with_its_turn() -> None:
    state = flight(*BEGIN, sampled(1, 0, [0, 2]), observation(2), sampled(1, 4, [0]), resumed(1))
    assert span_summary(state.live[ID]) == [(0, 1)]
    assert state.live[ID].finish is FinishReason.UNFINISHED


@dataclass
class Episode:
    """The true history of a trajectory: every entry in order with the tokens after it."""

    entries: list[tuple[Entry, list[int]]] = field(default_factory=list)

    @classmethod
    def random(cls, rng: random.Random) -> Episode:
        made = cls([(drawn(0), []), (routed(0, 1), [])])
        route_number, episode, truth, ended = 1, 0, list[int](), False
        for _ in range(rng.randint(1, 14)):
            entry: Entry
            if rng.random() < 0.12:
                entry = restarted(len(truth), route_number, episode)
                route_number, episode, truth, ended = route_number + 1, episode + 1, [], False
                made.entries += [(entry, []), (routed(0, route_number), [])]
                continue
            if ended:
                count, ended = rng.randint(0, 3), False
                entry = observation(len(truth), count, episode=episode)
            else:
                count, ended = rng.randint(1, 4), rng.random() < 0.5
                finish = FinishReason.STOP if ended else FinishReason.UNFINISHED
                versions = [rng.randint(0, 2) for _ in range(count)]
                entry = sampled(route_number, len(truth), versions, finish, episode)
            truth = [*truth, *(1000 * episode + len(truth) + i for i in range(count))]
            made.entries.append((entry, truth))
            if rng.random() < 0.2:
                route_number += 1
                made.entries.append((routed(0, route_number), truth))
        return made


@given(st.integers(0, 2**32), st.sampled_from(["repeated", "missing"]))
@settings(deadline=None)
def test_repeated_or_missing_entries_never_mix_attempts(seed: int, kind: str) -> None:
    """The state is a prefix of one attempt, and the whole of it if entries are only repeated. If a restart is missing,
    it may be the previous attempt until an entry of the new one comes."""
    rng = random.Random(seed)
    whole = Episode.random(rng).entries
    state = flight()
    for number, (entry, truth) in enumerate(whole):
        if kind == "missing" and rng.random() < 0.2:
            continue
        state.apply(decode(encode(entry)))
        if kind == "repeated":
            for _ in range(rng.randint(0, 3)):
                again = rng.choice(whole[: number + 1])[0]
                state.apply(again)
        if ID not in state.live:
            continue
        t = state.live[ID]
        held = t.response_tokens.tolist()
        if kind == "missing" and not isinstance(entry, EpisodeEntry):
            assert any(held == earlier[: len(held)] for _, earlier in whole[: number + 1])
        else:
            assert held == truth[: len(held)]
        assert kind == "missing" or len(held) == len(truth)
        assert all(isinstance(a, Segment) or isinstance(b, Segment) for a, b in itertools.pairwise(t.spans))
        cut = state.copy_with(resumed(1)).live[ID]
        assert cut.response_tokens.tolist() == held[: cut.num_tokens]
        assert cut.versions.max(initial=-1) <= 1
        later = [i for i, v in enumerate(t.versions.tolist()) if v > 1]
        assert cut.num_tokens == (later[0] if later else len(held))


@pytest.mark.parametrize(
    ("text", "where"),
    [("stop here", (0, 4)), ("go up stop", (6, 10)), ("on", (0, 2)), ("a station", (2, 7)), ("", None)],
)
def test_the_first_stop_string_of_a_text_is_found_from_its_first_character_on(
    text: str, where: tuple[int, int] | None
) -> None:
    assert find_stop(text, ["stop", "stati", "on"]) == where

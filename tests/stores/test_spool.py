"""The spool: entries are read back up to the first lost byte, and parts that are not needed are removed."""

from __future__ import annotations

import logging
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.errors import ActorLost
from staleflow.stores.in_flight.spool import FRAME, HEADER, Spool
from staleflow.stores.in_flight.spool_entries import (
    BatchTaken,
    Entry,
    EpisodeRestarted,
    GroupDrawn,
    InFlightResumed,
    ObservationDelivered,
    RewardDelivered,
    TeacherLogprobsDelivered,
    TokensDelivered,
    TrajectoriesDiscarded,
    TrajectoriesRouted,
    decode,
    encode,
)
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Segment,
    TrajectoryId,
)
from tests.support.segments import sampled_segment

SMALL = st.integers(0, 50)
SECONDS = st.floats(0, 1e6)
IDS = st.integers(0, 11).map(TrajectoryId)
VERSIONS = st.integers(0, 5).map(PolicyVersion)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    count = draw(st.integers(0, 5))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count))
    return sampled_segment(
        tokens, logprobs, version=draw(VERSIONS), instance=draw(st.sampled_from(["rollout-0", "rollout-1.2"]))
    )


ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.builds(
        GroupDrawn,
        group=st.integers(0, 3).map(GroupId),
        prompt_tokens=st.lists(SMALL, max_size=5).map(lambda x: np.asarray(x, np.int32)),
        at_s=SECONDS,
        dataset_row=SMALL,
    ),
    st.builds(TrajectoriesRouted, routed=st.lists(st.tuples(IDS, SMALL)).map(tuple), at_s=SECONDS),
    st.builds(
        TokensDelivered,
        trajectory=IDS,
        route_number=SMALL,
        start=SMALL,
        segments=st.lists(segments(), max_size=3).map(tuple),
        finish=st.sampled_from(FinishReason),
        at_s=SECONDS,
    ),
    st.builds(
        ObservationDelivered,
        trajectory=IDS,
        start=SMALL,
        role=st.text(max_size=4),
        tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(lambda x: np.asarray(x, np.int32)),
        seconds=SECONDS,
        at_s=SECONDS,
    ),
    st.builds(EpisodeRestarted, trajectory=IDS, num_tokens=SMALL, route_number=SMALL),
    st.builds(
        RewardDelivered,
        trajectory=IDS,
        num_tokens=SMALL,
        reward=st.floats(allow_nan=False),
        parts=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=2),
        error=st.text(max_size=9),
        at_s=SECONDS,
    ),
    st.builds(
        TeacherLogprobsDelivered,
        trajectory=IDS,
        num_tokens=SMALL,
        logprobs=st.lists(st.floats(-50, 0, width=32), max_size=5).map(lambda x: np.asarray(x, np.float32)),
        attempt=SMALL,
    ),
    st.lists(st.tuples(IDS, VERSIONS), max_size=4).flatmap(
        lambda pairs: st.builds(
            BatchTaken,
            step=SMALL,
            trajectories=st.just(tuple(t for t, _ in pairs)),
            versions=st.just(tuple(v for _, v in pairs)),
        )
    ),
    st.lists(st.tuples(IDS, VERSIONS), max_size=4).flatmap(
        lambda pairs: st.builds(
            TrajectoriesDiscarded,
            endings=st.just(
                tuple(
                    Ending(
                        trajectory=t,
                        group=GroupId(t // 3),
                        fate=Fate.ABORTED,
                        reason=AbortReason.SURPLUS_MEMBER,
                        step=2,
                    )
                    for t, _ in pairs
                )
            ),
            versions=st.just(tuple(v for _, v in pairs)),
        )
    ),
    st.builds(InFlightResumed, version=VERSIONS, from_prompt=st.lists(IDS, max_size=3).map(tuple), at_s=SECONDS),
)


@given(entry=ENTRIES)
def test_entries_round_trip(entry: Entry) -> None:
    data = encode(entry)
    decoded = decode(data)
    assert type(decoded) is type(entry)
    assert encode(decoded) == data
    if isinstance(decoded, TokensDelivered) and isinstance(entry, TokensDelivered):
        for first, second in zip(decoded.segments, entry.segments, strict=True):
            assert (first.version, first.instance) == (second.version, second.instance)
            np.testing.assert_array_equal(first.tokens, second.tokens)
            np.testing.assert_array_equal(first.logprobs, second.logprobs)
    if isinstance(decoded, ObservationDelivered) and isinstance(entry, ObservationDelivered):
        assert (decoded.role, decoded.start, decoded.seconds) == (entry.role, entry.start, entry.seconds)
        np.testing.assert_array_equal(decoded.tokens, entry.tokens)
    if isinstance(decoded, TeacherLogprobsDelivered) and isinstance(entry, TeacherLogprobsDelivered):
        np.testing.assert_array_equal(decoded.logprobs, entry.logprobs)
        assert decoded.logprobs.dtype == np.float32


def test_a_reward_that_is_a_numpy_number_is_spooled_as_a_number() -> None:
    reward: Any = np.float32(0.5)
    decoded = decode(
        encode(RewardDelivered(trajectory=TrajectoryId(1), num_tokens=2, reward=reward, parts={}, error="", at_s=0.0))
    )
    assert isinstance(decoded, RewardDelivered)
    assert decoded.reward == 0.5
    identifier: Any = np.int64(5)
    taken = BatchTaken(step=1, trajectories=(identifier,), versions=(PolicyVersion(0),))
    again = decode(encode(taken))
    assert isinstance(again, BatchTaken) and type(again.trajectories[0]) is int


@given(data=st.binary(max_size=60))
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="entry"):
        decode(data)


def part(folder: Path, number: int = 1) -> Path:
    return folder / f"part-{number:08d}.log"


@settings(max_examples=settings().max_examples // 4)
@given(batches=st.lists(st.lists(ENTRIES, min_size=1, max_size=3), min_size=1, max_size=4), data=st.data())
def test_a_truncated_spool_is_a_prefix_of_its_entries(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Entry]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spool") / "spool"
    spool = Spool(folder, group_size=3)
    assert list(spool.read()) == []
    for batch in batches:
        assert spool.append(batch)
    whole = part(folder).read_bytes()
    written = [encode(entry) for batch in batches for entry in batch]
    assert [encode(entry) for entry in Spool(folder, group_size=3).read()] == written

    cut = data.draw(st.integers(0, len(whole)))
    garbage = data.draw(st.binary(max_size=9))
    part(folder).write_bytes(whole[:cut] + garbage)
    left = [encode(entry) for entry in Spool(folder, group_size=3).read()]
    assert left == written[: len(left)]
    if not garbage:
        ends = np.cumsum([len(HEADER), *(FRAME.size + len(w) for w in written)])
        assert len(left) == max(0, int((ends <= cut).sum()) - 1)


@given(batch=st.lists(ENTRIES, min_size=2, max_size=4), flip=st.data())
def test_a_changed_byte_ends_the_part_there(
    tmp_path_factory: pytest.TempPathFactory, batch: list[Entry], flip: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spool") / "spool"
    spool = Spool(folder, group_size=3)
    spool.append(batch)
    data = bytearray(part(folder).read_bytes())
    at = flip.draw(st.integers(0, len(data) - 1))
    data[at] ^= flip.draw(st.integers(1, 255))
    part(folder).write_bytes(data)
    left = [encode(entry) for entry in Spool(folder, group_size=3).read()]
    assert left == [encode(entry) for entry in batch][: len(left)]
    assert len(left) < len(batch)


def drawn(group: int) -> GroupDrawn:
    return GroupDrawn(group=GroupId(group), prompt_tokens=np.zeros(3, np.int32), at_s=0.0)


def groups_in(folder: Path) -> set[int]:
    return {entry.group for entry in Spool(folder, group_size=3).read() if isinstance(entry, GroupDrawn)}


def test_parts_are_removed_once_every_resume_point_includes_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", group_size=3)
    for step in range(20):  # group g is drawn before step g and consumed by step g + 1
        spool.append([drawn(step)])
        spool.mark_stored(step, [GroupId(step - 1)] if step else [])
        spool.rotate(oldest_resume_version=max(0, step - 2))
        needed = {group for group in range(step + 1) if group + 1 >= max(0, step - 2)}
        assert groups_in(tmp_path / "spool") == needed
        assert len(list((tmp_path / "spool").iterdir())) <= 5
        assert len(spool._stored_at_step) <= 5
    spool.append([drawn(20)])
    spool.mark_stored(20, [GroupId(19), GroupId(20)])
    spool.rotate(oldest_resume_version=None)
    assert groups_in(tmp_path / "spool") == set()


def test_a_group_in_flight_keeps_all_later_parts(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", group_size=3)
    spool.append([drawn(0), drawn(1)])
    for step in range(1, 6):
        spool.mark_stored(step, [GroupId(step)])
        spool.rotate(oldest_resume_version=step)
        spool.append([drawn(step + 1)])
    assert groups_in(tmp_path / "spool") == set(range(7))
    spool.mark_stored(6, [GroupId(0)])
    spool.rotate(oldest_resume_version=7)
    assert groups_in(tmp_path / "spool") == {6}


def test_a_reopened_spool_appends_to_a_new_part(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool", group_size=3)
    first.append([drawn(0), drawn(1)])
    part(tmp_path / "spool").write_bytes(part(tmp_path / "spool").read_bytes()[:-2])
    again = Spool(tmp_path / "spool", group_size=3)
    assert [entry.group for entry in again.resume() if isinstance(entry, GroupDrawn)] == [0]
    again.append([drawn(2)])
    assert groups_in(tmp_path / "spool") == {0, 2}
    again.clear()
    assert groups_in(tmp_path / "spool") == set()
    assert again.append([drawn(3)])
    assert groups_in(tmp_path / "spool") == {3}


def test_a_part_that_another_server_has_begun_is_not_overwritten(tmp_path: Path) -> None:
    """A server that was silent and replaced removed what its successor had acknowledged."""
    old = Spool(tmp_path / "spool", group_size=3)
    assert old.append([drawn(0)])
    new = Spool(tmp_path / "spool", group_size=3)
    list(new.resume())
    old.rotate(oldest_resume_version=None)
    assert new.append([drawn(1)])
    for _ in range(2):
        with pytest.raises(ActorLost, match="was replaced"):
            old.append([drawn(2)])
        old.rotate(oldest_resume_version=None)
    assert new.append([drawn(3)])
    assert groups_in(tmp_path / "spool") == {0, 1, 3}


def test_a_replaced_server_acknowledges_nothing(tmp_path: Path) -> None:
    """Its successor has read the spool already. A repeated call has no entries left, and is refused too."""
    old = Spool(tmp_path / "spool", group_size=3)
    assert old.append([drawn(0)])
    list(Spool(tmp_path / "spool", group_size=3).resume())
    for entries in ([drawn(1)], []):
        with pytest.raises(ActorLost, match="was replaced"):
            old.append(entries)


def test_a_group_that_is_drawn_again_is_in_flight_again(tmp_path: Path) -> None:
    """The evaluations of a resumed run have the numbers of those before."""
    first = Spool(tmp_path / "spool", group_size=3)
    first.append([drawn(-1)])
    spool = Spool(tmp_path / "spool", group_size=3)
    list(spool.resume())
    spool.mark_stored(-1, [GroupId(-1)])
    spool.append([drawn(-1)])
    for step in range(3):
        spool.rotate(oldest_resume_version=step)
        spool.append([drawn(step)])
        spool.mark_stored(step, [GroupId(step)])
    assert -1 in groups_in(tmp_path / "spool")
    spool.mark_stored(-1, [GroupId(-1)])
    spool.rotate(oldest_resume_version=3)
    assert groups_in(tmp_path / "spool") == set()


def test_a_full_disk_is_logged_once_and_the_next_part_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file size limit stands in for a full disk; it also truncates a write."""
    spool = Spool(tmp_path / "spool", group_size=3)
    assert spool.append([drawn(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(part(tmp_path / "spool")) + 5, hard))
        with caplog.at_level(logging.WARNING):
            assert [spool.append([drawn(group)]) for group in (1, 2, 3)] == [False, False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len(caplog.records) == 1
    assert "cannot be written: File too large; the run goes on" in caplog.text
    assert not spool.append([drawn(4)])
    spool.rotate(oldest_resume_version=0)
    assert spool.append([drawn(5)])
    assert groups_in(tmp_path / "spool") == {0, 5}


def test_a_part_that_cannot_begin_is_logged_and_the_next_one_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "spool"
    folder.write_text("a file in place of the folder")
    spool = Spool(folder, group_size=3)
    with caplog.at_level(logging.WARNING):
        assert [spool.append([drawn(group)]) for group in (0, 1)] == [False, False]
        spool.rotate(oldest_resume_version=0)
    assert [record.message.partition("; ")[0] for record in caplog.records] == [
        f"{folder} cannot be written: File exists"
    ]
    folder.unlink()
    assert not spool.append([drawn(2)])
    spool.rotate(oldest_resume_version=0)
    assert spool.append([drawn(3)])
    assert groups_in(folder) == {3}


def test_a_part_whose_first_write_fails_does_not_stop_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool", group_size=3)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(spool, "_write", full)
        assert not spool.append([drawn(0)])
    assert not spool.append([drawn(1)]), "entries of a part follow each other"
    spool.rotate(oldest_resume_version=0)
    assert spool.append([drawn(2)])
    assert groups_in(tmp_path / "spool") == {2}


def test_trailing_fields_are_left_out_only_if_they_have_their_own_default() -> None:
    restarted = EpisodeRestarted(trajectory=TrajectoryId(1), num_tokens=2, route_number=3)
    assert encode(restarted).rstrip().endswith(b"1,2,3]")
    assert encode(replace(restarted, attempt=4)).rstrip().endswith(b"1,2,3,4]")
    prompt = np.zeros(1, np.int32)
    for source, task, row in ((0, 0, -1), (0, -1, 0), (-1, 0, 0)):
        entry = GroupDrawn(group=GroupId(0), prompt_tokens=prompt, at_s=0.0, dataset_row=row, source=source, task=task)
        decoded = decode(encode(entry))
        assert isinstance(decoded, GroupDrawn)
        assert (decoded.source, decoded.task, decoded.dataset_row) == (source, task, row)


def test_a_part_of_another_spool_version_is_ignored_and_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", group_size=3)
    spool.append([drawn(0)])
    data = part(tmp_path / "spool").read_bytes()
    part(tmp_path / "spool").write_bytes(data.replace(b"spool 1", b"spool 9"))
    assert groups_in(tmp_path / "spool") == set()

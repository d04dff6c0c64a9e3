"""Conformance suite of trajectory stores. Subclass it and provide `make`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, RunHeader
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    EnvSpan,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Span,
    Timings,
    Trajectory,
    TrajectoryId,
)
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from tests.support.memory_store import TrajectoryStore
from tests.support.segments import sampled_segment

HEADER = RunHeader(run="test", eta=1, groups_per_step=2, group_size=2, members_started_per_group=2)


def segment(rng: np.random.Generator, version: int, length: int, instance: str = "rollout-0") -> Segment:
    return sampled_segment(
        rng.integers(0, 50_000, length), rng.normal(-1, 0.5, length), version=version, instance=instance
    )


def env_span(rng: np.random.Generator, seconds: float, role: str = "tool") -> EnvSpan:
    tokens = rng.integers(0, 50_000, int(rng.integers(1, 9))).astype(np.int32)
    return EnvSpan(role=role, tokens=tokens, seconds=seconds)


def ended(rng: np.random.Generator, i: int, step: int, fate: Fate = Fate.CONSUMED, **changes: Any) -> EndedTrajectory:
    """Return a row. Every third one has three turns, the last of which continues the version of the first."""
    versions = sorted({max(0, step - 1), step})
    spans: list[Span] = [segment(rng, v, int(rng.integers(1, 30))) for v in versions]
    if i % 3 == 1:
        spans += [env_span(rng, 1.5), segment(rng, step, 3), env_span(rng, 0.25, "user"), segment(rng, versions[0], 4)]
    trajectory = Trajectory(
        id=TrajectoryId(i),
        group=GroupId(i // 2),
        prompt_tokens=rng.integers(0, 50_000, int(rng.integers(1, 9))).astype(np.int32),
        v_traj=PolicyVersion(versions[0]),
        spans=tuple(spans),
        finish=FinishReason.STOP,
        reward=float(np.float32(rng.random())),
        reward_parts={"format": 0.5},
        error="" if i % 3 else "ValueError: no",
        timings=Timings(arrived_s=1.0, routed_s=2.0, sampled_s=3.5, rewarded_s=4.25),
        dataset_row=7 * i,
    )
    values: dict[str, Any] = {"advantage": float(np.float32(rng.normal())), "loss_mask": bool(i % 3)}
    reason = AbortReason.NONE if fate is Fate.CONSUMED else AbortReason.RUN_ENDED
    return EndedTrajectory(trajectory=trajectory, fate=fate, reason=reason, step=step, **(values | changes))


def with_teacher(row: EndedTrajectory) -> EndedTrajectory:
    """A row with logprobs of a teacher."""
    t = row.trajectory
    logprobs = np.where(t.sampled, t.logprobs - np.float32(0.5), np.float32(0))
    return replace(row, trajectory=replace(t, teacher_logprobs=logprobs))


def verified(instance: str, version: int, fingerprint: str) -> WeightCheck:
    """Return the weight check of an instance with the published weights."""
    return WeightCheck(
        instance=InstanceId(instance), version=PolicyVersion(version), fingerprint=fingerprint,
        weights=WeightReport(verified=1), drift=0.0, limit=1.0,
    )  # fmt: skip


def record(step: int, kind: str = "step") -> CommitRecord:
    return CommitRecord(
        kind=kind,
        step=step,
        ledger=LedgerState(
            num_started=4 * (step + 1),
            num_ended={"consumed:none": 4 * (step + 1)},
            live=((3, 5), (8, 9)),
            next_step=step + 1,
            version=step,
        ),
        metrics={"reward": 0.5},
        weight_fingerprint=f"w{step}",
        weight_checks=(verified("rollout-0", step, f"w{step - 1}"),),
        batch_fingerprint="b",
    )


def assert_same(a: EndedTrajectory, b: EndedTrajectory) -> None:
    assert (a.fate, a.reason, a.step, a.advantage, a.loss_mask) == (b.fate, b.reason, b.step, b.advantage, b.loss_mask)
    s, t = a.trajectory, b.trajectory
    for name in ("id", "group", "v_traj", "finish", "reward", "reward_parts", "error", "timings", "dataset_row"):
        assert getattr(s, name) == getattr(t, name), name
    for name in ("prompt_tokens", "response_tokens", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(s, name), getattr(t, name))
        assert getattr(s, name).dtype == getattr(t, name).dtype
    assert (s.teacher_logprobs is None) == (t.teacher_logprobs is None)
    if s.teacher_logprobs is not None and t.teacher_logprobs is not None:
        np.testing.assert_array_equal(s.teacher_logprobs, t.teacher_logprobs)
        assert s.teacher_logprobs.dtype == t.teacher_logprobs.dtype
    assert list(map(span_fields, s.spans)) == list(map(span_fields, t.spans))
    assert [x.tolist() for x in s.turns] == [x.tolist() for x in t.turns]


def span_fields(span: Span) -> tuple[object, ...]:
    """Return the fields of a span except its arrays."""
    if isinstance(span, EnvSpan):
        return span.role, span.seconds, len(span.tokens)
    return span.version, span.instance, len(span.tokens)


class TrajectoryStoreTests:
    """The conformance suite."""

    def make(self, folder: Path) -> TrajectoryStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> TrajectoryStore:
        return self.make(tmp_path / "store")

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def test_an_empty_store(self, store: TrajectoryStore) -> None:
        assert replace(store.header, url="") == HEADER
        assert list(store.trajectories()) == []
        assert store.commits() == []
        assert store.get(TrajectoryId(0)) is None

    def test_teachers_logprobs_are_read_back_where_there_are_any(self, store: TrajectoryStore, rng: Any) -> None:
        """Also beside rows without, and in commits before and after those that have some."""
        kept: list[EndedTrajectory] = []
        for step in range(4):
            batch = [ended(rng, 4 * step + i, step) for i in range(4)]
            batch = [with_teacher(row) if step in (1, 2) and i != 1 else row for i, row in enumerate(batch)]
            kept += batch
            store.commit(record(step), batch)
        for a, b in zip(kept, store.trajectories(), strict=True):
            assert_same(a, b)
        read = store.get(kept[6].trajectory.id)
        assert read is not None
        assert_same(kept[6], read)

    def test_committed_rows_are_read_back_bit_for_bit(self, store: TrajectoryStore, rng: Any) -> None:
        kept: list[EndedTrajectory] = []
        for step in range(3):
            batch = [ended(rng, 4 * step + i, step) for i in range(4)]
            kept += batch
            store.commit(record(step), batch)
        read = list(store.trajectories())
        assert len(read) == len(kept)
        for a, b in zip(read, kept, strict=True):
            assert_same(a, b)
        got = store.get(TrajectoryId(7))
        assert got is not None
        assert_same(got, kept[7])

    def test_ended_returns_the_batch_of_a_step_in_its_order(self, store: TrajectoryStore, rng: Any) -> None:
        for step in range(2):
            rows = [ended(rng, 10 * step + i, step) for i in (3, 1, 2, 0)]
            store.commit(record(step), [*rows, ended(rng, 10 * step + 5, step, Fate.ABORTED)])
        assert [e.trajectory.id for e in store.trajectories(1)] == [13, 11, 12, 10]
        assert all(e.staleness == 1 for e in store.trajectories(1))

    def test_commit_records_have_the_ledger_and_the_row_count(self, store: TrajectoryStore, rng: Any) -> None:
        rows = [ended(rng, i, 0) for i in range(4)]
        store.commit(record(0), rows)
        store.commit(record(1, "end"), [])
        first, last = store.commits()
        assert first.ledger == record(0).ledger
        assert first.metrics == {"reward": 0.5}
        assert first.weight_checks == (verified("rollout-0", 0, "w-1"),)
        assert first.num_rows == 4
        assert first.num_tokens == sum(len(r.trajectory.prompt_tokens) + r.trajectory.num_tokens for r in rows)
        assert (last.kind, last.num_rows, last.num_tokens) == ("end", 0, 0)

    def test_a_trajectory_without_tokens(self, store: TrajectoryStore, rng: Any) -> None:
        empty = Trajectory(id=TrajectoryId(0), group=GroupId(0), prompt_tokens=np.asarray([5], np.int32))
        row = EndedTrajectory(
            trajectory=empty, fate=Fate.ABORTED, reason=AbortReason.SURPLUS_GROUP, step=0, loss_mask=False
        )
        store.commit(record(0), [row])
        (read,) = store.trajectories()
        assert_same(read, row)
        assert read.staleness == -1

    def test_duplicate_trajectories_are_rejected(self, store: TrajectoryStore, rng: Any) -> None:
        store.commit(record(0), [ended(rng, 0, 0)])
        with pytest.raises(StoreError):
            store.commit(record(1), [ended(rng, 0, 1)])
        assert len(list(store.trajectories())) == 1
        assert len(store.commits()) == 1

"""Batches on their way to the trainer: packed into messages of limited size and unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.pipeline.config import actor_settings
from staleflow.stores.errors import ConfigError, ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, RunHeader
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    EndedTrajectory,
    EnvSpan,
    Fate,
    GroupId,
    PolicyVersion,
    Span,
    Trajectory,
    TrajectoryId,
)
from staleflow.tasks.actors import step_batches
from staleflow.tasks.actors.store_thread import StoreThread
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.training import microbatches as microbatches_module
from staleflow.tasks.training.batches import check_batch
from staleflow.tasks.training.microbatches import MAX_LAG, ROW_BYTES, BatchMessage, Row, microbatches
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from tests.stores.store_conformance import HEADER
from tests.support.bodies import Body
from tests.support.segments import sampled_segment
from tests.tasks.test_trainer import Weights

LENGTHS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=1, max_size=12
)
"""Number of prompt tokens of each row, and of tokens of the segments of its response."""


def consumed_rows_of(lengths: list[tuple[int, list[int]]]) -> list[EndedTrajectory]:
    """Return consumed trajectories with these lengths."""
    rng = np.random.default_rng(0)

    def one(i: int, prompt: int, parts: list[int]) -> EndedTrajectory:
        spans: list[Span] = []
        for n in parts:
            if spans and i % 2:
                spans.append(EnvSpan(role="tool", tokens=rng.integers(0, 99, 3).astype(np.int32)))
            spans.append(sampled_segment(rng.integers(0, 99, n), rng.normal(size=n), version=2, instance="rollout-0"))
        trajectory = Trajectory(
            id=TrajectoryId(i),
            group=GroupId(i),
            prompt_tokens=rng.integers(0, 99, prompt).astype(np.int32),
            spans=tuple(spans),
            v_traj=PolicyVersion(i % 3),
        )
        return EndedTrajectory(
            trajectory=trajectory, fate=Fate.CONSUMED, step=2, advantage=i - 0.5, loss_mask=i % 4 != 3
        )

    return [one(i, *length) for i, length in enumerate(lengths)]


def same_row(first: Row, second: Row) -> bool:
    arrays = all(
        getattr(first, n).tolist() == getattr(second, n).tolist()
        for n in ("prompt", "response", "behaviour", "sampled", "lags")
    )
    return arrays and all(
        getattr(first, n) == getattr(second, n) for n in ("advantage", "staleness", "trained", "group")
    )


def num_bytes(rows: list[Row]) -> int:
    arrays = (getattr(row, name) for row in rows for name in ("prompt", "response", "behaviour", "sampled", "lags"))
    return sum(int(array.nbytes) for array in arrays) + ROW_BYTES * len(rows)


@given(LENGTHS)
def test_rows_survive_packing(lengths: list[tuple[int, list[int]]]) -> None:
    data = consumed_rows_of(lengths)
    assert all(same_row(a, Row.of(b)) for a, b in zip(BatchMessage.of(data, 0).rows(), data, strict=True))


def test_lag_of_a_token_is_that_of_its_version() -> None:
    (row,) = consumed_rows_of([(3, [2])])
    spans = (
        row.trajectory.segments[0],
        EnvSpan(role="tool", tokens=np.asarray([5], np.int32)),
        replace(row.trajectory.segments[0], version=PolicyVersion(0)),
    )
    mixed = replace(row, trajectory=replace(row.trajectory, spans=spans, v_traj=PolicyVersion(0)), step=100_000)
    packed = Row.of(replace(mixed, step=3))
    assert packed.lags is not None
    assert packed.lags.tolist() == [1, 1, 0, 3, 3]
    (batch,) = microbatches([packed], [0], np.ones(1, np.float32), 100)
    assert batch.lags.tolist() == [[1, 1, 0, 3, 3]]
    (old,) = microbatches([replace(packed, lags=None, staleness=2)], [0], np.ones(1, np.float32), 100)
    assert old.lags.tolist() == [[2, 2, 2, 2, 2]]
    late = Row.of(mixed)
    assert late.lags is not None
    assert late.lags.tolist() == [MAX_LAG, MAX_LAG, 0, MAX_LAG, MAX_LAG]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 2000))
def test_a_batch_in_parts_keeps_all_rows_within_the_message_size(
    lengths: list[tuple[int, list[int]]], most_bytes: int
) -> None:
    data = consumed_rows_of(lengths)
    got: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatches_module, "MESSAGE_BYTES", most_bytes)
        while len(got) < len(data):
            message = BatchMessage.of(data, len(got))
            part = message.rows()
            assert len(part) == 1 or len(message.pickled_rows) <= most_bytes + 1024, "pickle's own head has 1 KiB"
            assert num_bytes(part) <= most_bytes or len(part) == 1
            got += part
            next_row = [Row.of(row) for row in data[len(got) :][:1]]
            assert not next_row or num_bytes([*part, *next_row]) > most_bytes, "one more would fit"
    assert all(same_row(a, Row.of(b)) for a, b in zip(got, data, strict=True))


async def test_fetch_requests_rows_until_the_batch_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches_module, "MESSAGE_BYTES", 720)
    data = consumed_rows_of([(3, [5]), (4, [40]), (2, [1, 2]), (9, [9])])
    requests: list[int] = []

    class Server:
        async def take_batch(self, step: int, trajectories: Any, versions: Any, first: int) -> BatchMessage:
            requests.append(first)
            return BatchMessage.of(data, first)

    class Keeps(Weights):
        def build(self, threads: int, rank: Rank = SINGLE_RANK) -> Keeps:
            return self

        def step(self, step: int, rows: Any) -> dict[str, float]:
            self.rows = rows
            return {}

    weights = Keeps()
    actor = Trainer(weights, str(tmp_path / "memory"), 1, 60.0, str(tmp_path / "resume"), 0)
    await actor.train(Server(), 2, (), ())
    await actor.close()
    assert requests == [0, 1, 2]
    assert all(same_row(a, Row.of(b)) for a, b in zip(weights.rows, data, strict=True))


async def test_a_stored_step_is_read_once_and_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches_module, "MESSAGE_BYTES", 650)
    rows = [replace(row, step=0) for row in consumed_rows_of([(3, [5]), (4, [40]), (2, [1, 2]), (9, [9])])]
    store = VersionedStore.create(
        tmp_path / "s", RunHeader(run="r", eta=2, groups_per_step=4, group_size=1, members_started_per_group=1)
    )
    ledger = LedgerState(num_started=4, num_ended={"consumed:none": 4}, live=(), next_step=1, version=0)
    store.commit(CommitRecord(kind="step", step=0, ledger=ledger), rows)
    readings: list[int] = []

    class Counted(StoreThread):
        async def consumed_rows(self, step: int) -> list[EndedTrajectory]:
            readings.append(step)
            return await super().consumed_rows(step)

    thread = Counted(store, 60.0)
    settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "s", 128)
    batches = step_batches.StepBatches(InFlightState(group_size=1), thread, settings)
    parts: list[Row] = []
    for count in (1, 2):
        parts = []
        while len(parts) < len(rows):
            message = await batches.message(0, len(parts))
            parts += message.rows()
            assert message.num_remaining == len(rows) - len(parts)
        assert readings == [0] * count
        assert batches._repeated_batch == [], "sent rows are not kept"
    thread.close()
    assert all(same_row(a, Row.of(b)) for a, b in zip(parts, rows, strict=True))


async def test_the_batch_of_a_step_is_cached_until_the_step_is_undone(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[int] = []

    def record_step(step: int, *_: Any) -> list[Any]:
        made.append(step)
        return []

    monkeypatch.setattr(step_batches, "rows_with_advantages", record_step)
    monkeypatch.setattr(step_batches, "batch_metrics", lambda *_: {})
    thread = StoreThread(VersionedStore.create(tmp_path / "s", HEADER), 60.0)
    settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "s", 128)
    flight = InFlightState(group_size=1)
    flight.batches[0] = ()
    batches = step_batches.StepBatches(flight, thread, settings)
    assert await batches.batch(0).fingerprint == await batches.batch(0).fingerprint
    assert made == [0]
    batches.forget_all()
    await batches.batch(0).fingerprint
    thread.close()
    assert made == [0, 0]


def test_a_batch_larger_than_a_message_is_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches_module, "MESSAGE_BYTES", 650)
    run = Body(tmp_path).run()
    run.check()
    firsts = [c.args[3] for c in run.workers.calls if c.method == "take_batch"]
    assert len(firsts) > run.config.steps
    assert firsts.count(0) == run.config.steps


def test_a_share_of_failed_responses_at_the_limit_is_allowed() -> None:
    row = consumed_rows_of([(3, [2])])[0].trajectory
    batch = [replace(row, error="it failed")] * 29 + [replace(row, error="")] * 71
    check_batch(1, batch, 100, 0.29, "reward.function = 'f'")
    with pytest.raises(ConfigError, match=r"reward.function = 'f': failed on 29 of 100 .* = 0.28\)"):
        check_batch(1, batch, 100, 0.28, "reward.function = 'f'")


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1), (0,)])
def test_a_batch_consists_of_whole_groups_each_in_one_block(groups: tuple[int, ...]) -> None:
    row = replace(consumed_rows_of([(3, [2])])[0].trajectory, error="")
    check_batch(1, [replace(row, group=GroupId(g)) for g in (0, 0, 1, 1)], 2, 0.5, "")
    with pytest.raises(ProtocolViolation, match="whole groups"):
        check_batch(1, [replace(row, group=GroupId(g)) for g in groups], 2, 0.5, "")

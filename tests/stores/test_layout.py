"""Rows with any spans are packed for a commit and unpacked."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.trajectories.layout import pack, unpack
from staleflow.stores.trajectory import (
    EndedTrajectory,
    EnvSpan,
    Fate,
    GroupId,
    Span,
    Trajectory,
    TrajectoryId,
)
from tests.stores.store_conformance import assert_same
from tests.support.segments import sampled_segment

SEGMENTS = st.builds(
    lambda version, at, count: sampled_segment(
        np.arange(count, dtype=np.int32), -0.5, version=version, instance=f"rollout-{at}"
    ),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 4),
)
ANSWERS = st.builds(
    lambda role, count, millis: EnvSpan(role=role, tokens=np.arange(count, dtype=np.int32), seconds=millis / 1000),
    st.text(max_size=5),
    st.integers(0, 4),
    st.integers(0, 10**6),
)
ROWS = st.lists(st.tuples(st.lists(st.one_of(SEGMENTS, ANSWERS), max_size=6), st.booleans()), max_size=4)


@given(rows=ROWS, begin=st.integers(0, 99), text_begin=st.integers(0, 99))
@settings(deadline=None)
def test_rows_with_any_spans_survive_packing(rows: list[tuple[list[Span], bool]], begin: int, text_begin: int) -> None:
    ended = [
        EndedTrajectory(
            trajectory=Trajectory(
                id=TrajectoryId(i), group=GroupId(0), prompt_tokens=np.arange(i, dtype=np.int32), spans=tuple(spans)
            ),
            fate=Fate.CONSUMED,
            step=3,
            loss_mask=trained,
        )
        for i, (spans, trained) in enumerate(rows)
    ]
    packed = pack(ended, begin, text_begin)
    assert packed.num_tokens == len(packed.tokens["ids"])
    at = begin
    names = packed.rows.dtype.names
    assert names is not None
    for i, row in enumerate(ended):
        t = row.trajectory
        turns = dict(zip(names, packed.rows[i].item(), strict=True))
        assert_same(unpack(turns, packed.tokens, begin, packed.text, text_begin), row)
        assert (turns["turns"], turns["given_tokens"]) == (len(t.turns), len(t.response_tokens) - t.sampled.sum())
        assert abs(turns["tool_s"] - t.environment_s) < 1e-9
        first = at - begin + len(t.prompt_tokens)
        at += len(t.prompt_tokens) + t.num_tokens
        mask = packed.tokens["mask"][first : at - begin]
        assert mask.tolist() == [int(sampled and row.loss_mask) for sampled in t.sampled]
        assert not packed.tokens["mask"][first - len(t.prompt_tokens) : first].any()
        assert packed.tokens["logprobs"][first : at - begin][~t.sampled].tolist() == [0.0] * t.num_given

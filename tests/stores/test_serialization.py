"""The codec: output of older versions byte for byte, round trips, and one-line errors for invalid data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from staleflow.stores.trajectories.records import RECORD_CODEC, CommitRecord, LedgerState, RunHeader
from staleflow.stores.trajectory import Fate, InstanceId, PolicyVersion
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport

STEP = CommitRecord(
    kind="step",
    step=7,
    ledger=LedgerState(
        num_started=96,
        num_ended={"consumed:none": 64, "aborted:run_ended": 3},
        live=((70, 72), (90, 96)),
        next_step=8,
        version=7,
    ),
    metrics={"reward": 0.625, "loss": -0.0125, "staleness_max": 2.0},
    weight_fingerprint="ab",
    batch_fingerprint="ef",
    num_rows=16,
    num_tokens=480,
)
END = CommitRecord(kind="end", step=8, ledger=LedgerState(num_started=0, num_ended={}, live=(), next_step=8, version=8))
WRITTEN = {
    '{"kind":"step","step":7,"ledger":{"num_started":96,"num_ended":{"consumed:none":64,"aborted:run_ended":3},'
    '"live":[[70,72],[90,96]],"next_step":8,"version":7},"metrics":{"reward":0.625,"loss":-0.0125,"staleness_max":2.0},'
    '"weight_fingerprint":"ab","batch_fingerprint":"ef","num_rows":16,'
    '"num_tokens":480}': STEP,
    '{"kind":"end","step":8,"ledger":{"num_started":0,"num_ended":{},"live":[],"next_step":8,"version":8},"metrics":{},'
    '"weight_fingerprint":"","batch_fingerprint":"","num_rows":0,"num_tokens":0}': END,
}
"""Stored step records without their weight checks."""


@pytest.mark.parametrize("text", WRITTEN)
def test_step_records_encode_to_the_same_bytes_as_before(text: str) -> None:
    record = WRITTEN[text]
    assert json.dumps(RECORD_CODEC.encode(record), separators=(",", ":")) == text[:-1] + ',"weight_checks":[]}'
    assert RECORD_CODEC.decode(json.loads(text), CommitRecord) == record


def test_weight_checks_are_read_back() -> None:
    report = WeightReport(verified=3, not_verified={"packed": 1}, contradicted=1, names=("norm.weight",))
    check = WeightCheck(
        instance=InstanceId("rollout-0"), version=PolicyVersion(2), fingerprint="ab", weights=report,
        drift=0.5, limit=0.1, refused="off",
    )  # fmt: skip
    record = dataclasses.replace(END, weight_checks=(check,))
    assert RECORD_CODEC.decode(json.loads(json.dumps(RECORD_CODEC.encode(record))), CommitRecord) == record


def test_headers_with_added_or_missing_default_fields_decode() -> None:
    header = RunHeader(run="a", eta=1, groups_per_step=2, group_size=4, members_started_per_group=4)
    plain = RECORD_CODEC.encode(header)
    first_names = {
        "members_started_per_group": "members_started", "num_held_out": "held_out",
        "max_prompt_tokens": "longest_prompt",
    }  # fmt: skip
    expected = {first_names.get(name, name): value for name, value in dataclasses.asdict(header).items()}
    assert plain | {"sources": ()} == expected
    held_out = RECORD_CODEC.decode({**plain, "held_out": 3, "longest_prompt": 9}, RunHeader)
    assert (held_out.num_held_out, held_out.max_prompt_tokens) == (3, 9)
    assert (
        RECORD_CODEC.decode(RECORD_CODEC.encode(mixed := dataclasses.replace(header, sources=("a", "b"))), RunHeader)
        == mixed
    )
    assert RECORD_CODEC.decode({**plain, "since": 1}, RunHeader) == header
    del plain["held_out"]  # as stores are that were written before there was one
    assert RECORD_CODEC.decode(plain, RunHeader) == header
    del plain["eta"]
    with pytest.raises(ValueError, match=r"^eta: missing$"):
        RECORD_CODEC.decode(plain, RunHeader)


@dataclasses.dataclass(frozen=True)
class Inner:
    fate: Fate
    counts: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    flag: bool
    pair: tuple[int, str] = (0, "")
    words: tuple[str, ...] = ()


def test_enums_tuples_and_integer_keys_round_trip() -> None:
    value = Outer(inner=(Inner(Fate.FILTERED, {3: 1.5}), Inner(Fate.CONSUMED)), flag=True, pair=(2, "b"), words=("c",))
    plain = RECORD_CODEC.encode(value)
    assert json.loads(json.dumps(plain)) == {
        "inner": [{"fate": "filtered", "counts": {"3": 1.5}}, {"fate": "consumed", "counts": {}}],
        "flag": True,
        "pair": [2, "b"],
        "words": ["c"],
    }
    assert RECORD_CODEC.decode(json.loads(json.dumps(plain)), Outer) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flag": 1}, "flag: expected bool, got 1"),
        ({"flag": None}, "flag: expected bool, got None"),
        ({"pair": [True, "b"]}, "pair[0]: expected int, got True"),
        ({"pair": [1.0, "b"]}, "pair[0]: expected int, got 1.0"),
        ({"pair": [1, 2]}, "pair[1]: expected str, got 2"),
        ({"inner": [{"fate": "eaten", "counts": {}}]}, "inner[0].fate: 'eaten' is not a valid Fate"),
        ({"inner": [{"counts": {}}]}, "inner[0].fate: missing"),
        ({"inner": [{"fate": "filtered", "counts": {"x": 1}}]}, "inner[0].counts: expected int, got 'x'"),
        *(
            ({"inner": [{"fate": "filtered", "counts": {key: 1}}]}, f"inner[0].counts: expected int, got {key!r}")
            for key in ("1_0", " 10", "1\n", "+1", "", "\u0661", 1)
        ),
        ({"inner": [{"fate": "filtered", "counts": []}]}, "inner[0].counts: expected dict, got []"),
        ({"inner": 3}, "inner: expected list, got 3"),
        ({"inner": "abc"}, "inner: expected list, got 'abc'"),
        ({"words": "abc"}, "words: expected list, got 'abc'"),
        ({"words": {"k": 1}}, "words: expected list, got {'k': 1}"),
        ({"pair": {1: 0, "b": 0}}, "pair: expected list, got {1: 0, 'b': 0}"),
    ],
)
def test_invalid_values_are_rejected_with_their_path(change: dict[str, Any], message: str) -> None:
    plain = RECORD_CODEC.encode(Outer(inner=(), flag=True)) | change
    with pytest.raises(ValueError) as error:  # noqa: PT011  its text is compared below
        RECORD_CODEC.decode(plain, Outer)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("garbage", [None, 3, "text", [], ["flag"], {}])
def test_invalid_top_level_values_give_a_one_line_error(garbage: Any) -> None:
    for kind in (Outer, CommitRecord, RunHeader):
        with pytest.raises(ValueError) as error:  # noqa: PT011  whatever it says, it is one line
            RECORD_CODEC.decode(garbage, kind)
        assert "\n" not in str(error.value)

"""Expressions over a store's columns: the rows they select, and the errors for invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.selection import Selection

COLUMNS: dict[str, Any] = {
    "reward": np.array([0.0, 1.0, 0.5, 1.0]),
    "staleness": np.array([0, 1, 2, -1]),
    "response_tokens": np.array([10, 20, 30, 40]),
    "fate": np.array(["consumed", "consumed", "consumed", "aborted"]),
    "source": np.array([40, 1, 0, -3], np.int16),
    "kl": np.array([0.1, 0.5, 0.3, np.nan], np.float32),
    "loss_mask": np.array([True, True, False, False]),
}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", [0, 1, 2, 3]),
        ("staleness <= 1 and reward > 0", [1, 3]),
        ("0 <= staleness < 2", [0, 1]),
        ("not fate == 'aborted'", [0, 1, 2]),
        ("fate in ('aborted', 'filtered') or reward == 0.5", [2, 3]),
        ("staleness not in [0, -1]", [1, 2]),
        ("reward * response_tokens - 5 > 10", [1, 3]),
        ("response_tokens / staleness >= 20", [0, 1]),
        ("response_tokens % 20 == 0", [1, 3]),
        ("-loss_mask < 0", [0, 1]),
        ("loss_mask - loss_mask == 0", [0, 1, 2, 3]),
        ("loss_mask + loss_mask == 2", [0, 1]),
        ("0 < 0.5 < reward", [1, 3]),
        ("reward > 0.5 < 0", []),
        ("kl == 0.1", [0]),
        ("kl in (0.1, 0.5)", [0, 1]),
        ("kl not in (0.1, 0.5)", [2, 3]),
        ("kl in ()", []),
        ("source * 1000 > 5", [0, 1]),
        ("source + 40000 > 5", [0, 1, 2, 3]),
        ("response_tokens * 1000000000000000000.0 > 2.5e19", [2, 3]),
        ("response_tokens % (staleness * 1.0) == 0", [1, 2, 3]),
    ],
)
def test_a_selection_returns_the_matching_rows(text: str, chosen: list[int]) -> None:
    assert np.flatnonzero(Selection(text).mask(COLUMNS)).tolist() == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd > 0", "no column 'rewrd'; did you mean 'reward'"),
        ("zzz > 0", "there are reward, staleness"),
        ("reward", "is not a condition"),
        ("1 < 2", "is not a condition"),
        ("1 in (1, 2)", "is not a condition"),
        ("-(1 in (1, 2)) == 1", "is not a condition"),
        ("1 not in (1, 2) and reward > 0", "'1 not in (1, 2)' is neither true nor false"),
        ("reward and staleness", "'reward' is neither true nor false"),
        ("fate == 1", "quote text"),
        ("reward == 'x'", "quote text"),
        ("reward >", "cannot be read"),
        ("reward.x > 1", "not supported"),
        ("__import__('os').system('true')", "not supported"),
        ("(lambda: 1)() > 0", "not supported"),
        ("staleness in reward", "cannot be compared"),
        ("reward is 1", "cannot be compared"),
        ("fate + 1 > 2", "is not a number"),
        ("reward > 1 / 0", "cannot be computed: division by zero"),
        ("reward > 1 % 0", "cannot be computed"),
        (f"reward > {'9' * 400}", "cannot be computed"),
        (f"staleness * {'9' * 40} > 0", "cannot be computed"),
        ("response_tokens * 1000000000000000000 > 0", "cannot be computed: a row has an integer beyond 2**62"),
        ("response_tokens + 9223372036854775800 > 0", "cannot be computed: a row has an integer beyond 2**62"),
        ("-response_tokens - 9223372036854775800 < 0", "cannot be computed: a row has an integer beyond 2**62"),
        ("response_tokens % staleness == 0", "or a remainder by 0; multiply a number by 1.0"),
        ("staleness in (1, reward)", "may hold only numbers or only texts"),
        ("1 in ()", "is not a condition"),
        (f"-('{'x' * 300}') > 0", 'xxx..." is not a number'),
        (f"{'x' * 300} > 0", f"no column '{'x' * 200}...'"),
        ("-" * 5000 + "reward > 0", "is nested too deeply"),
        ("not " * 3000 + "(reward > 0)", "is nested too deeply"),
        ("+".join(["reward"] * 20_000) + " > 0", "is nested too deeply"),
    ],
)
def test_invalid_expressions_give_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^where ") as caught:
        Selection(text).mask(COLUMNS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 550


@given(st.integers(-2, 3), st.floats(-1, 2), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.booleans())
def test_expressions_have_the_meaning_of_python(lag: int, reward: float, sign: str, is_and: bool) -> None:
    text = f"staleness {sign} {lag} {'and' if is_and else 'or'} reward {sign} {reward!r}"
    rows = zip(COLUMNS["staleness"].tolist(), COLUMNS["reward"].tolist(), strict=True)
    expected = [bool(eval(text, {}, {"staleness": s, "reward": r})) for s, r in rows]
    assert Selection(text).mask(COLUMNS).tolist() == expected

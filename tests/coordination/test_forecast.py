"""Forecasts of lengths: how good they were, over the latest ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.coordination import forecast
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.stores.trajectory import GroupId


@given(st.lists(st.tuples(st.floats(1.0, 500.0), st.integers(1, 500)), max_size=60), st.integers(1, 20))
def test_its_error_is_that_of_the_latest(pairs: list[tuple[float, int]], window: int) -> None:
    before, forecast.WINDOW = forecast.WINDOW, window
    try:
        learned = LengthForecast(500)
        for expected, length in pairs:
            learned.observe(GroupId(0), length, expected)
    finally:
        forecast.WINDOW = before
    latest = pairs[-window:]
    count = len(latest)
    error = learned.error
    assert error.count == count
    for mean, values in (
        (error.mean_length, [length for _, length in latest]),
        (error.mean_error, [abs(expected - length) for expected, length in latest]),
        (error.bias, [expected - length for expected, length in latest]),
    ):
        assert abs(mean - sum(values) / max(1, count)) < 1e-6

"""Forecasts from simulations, and their comparison with runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.jobs.forecasting import make_forecast
from staleflow.pipeline.simulator import run_forecast
from staleflow.pipeline.simulator.analysis import as_metrics, compute_stats
from staleflow.pipeline.simulator.run_forecast import (
    QUANTITY_UNITS,
    SPEED_UNITS,
    compare_with_run,
    measure_run,
    predict_ranges,
)
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.emulation.workload import RecordedWorkload, Turn
from tests.support.simulated_store import JOB

SMALL = ("batch.groups_per_step=4", "batch.group_size=4", "steps=12", "rollout.instances=2")


def steps_of(*seconds: float) -> list[dict[str, float]]:
    """Steps that end at these times; each has 100 tokens."""
    return [{"elapsed_s": s, "response_tokens": 100.0, "staleness_mean": float(i)} for i, s in enumerate(seconds)]


def test_real_and_simulated_steps_are_measured_alike() -> None:
    config = loading.load(JOB, SMALL)
    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    stats, measured = compute_stats(config, trace), measure_run(as_metrics(trace.steps))
    histogram = stats.staleness
    assert set(measured) == set(QUANTITY_UNITS)
    assert measured["total_s"] == trace.steps[-1].finished_s
    assert measured["tokens_per_s"] == pytest.approx(stats.tokens_per_s)
    assert measured["lag"] == pytest.approx(sum(k * n for k, n in histogram.items()) / sum(histogram.values()))
    assert measured["total_tokens"] == sum(step.tokens for step in trace.steps)


def test_the_first_step_counts_in_totals_only() -> None:
    assert measure_run(steps_of(10.0, 11.0, 12.0, 13.0)) == {
        "step_s": 1.0, "tokens_per_s": 400 / 13, "total_s": 13.0, "total_tokens": 400.0, "lag": 1.5,
    }  # fmt: skip
    assert measure_run(steps_of(10.0))["step_s"] == 10.0


def test_intervals_widen_with_seeds_and_with_the_error_of_the_cost_model() -> None:
    def widths(*runs: dict[str, float], error: float) -> dict[str, float]:
        ranges = predict_ranges(runs, error, eta=2)
        assert all(0 <= r.low <= r.expected <= r.high for r in ranges.values())
        return {name: r.high - r.low for name, r in ranges.items()}

    values = dict.fromkeys(QUANTITY_UNITS, 1.0)
    same = widths(values, values, error=0.0)
    spread = widths(values, dict.fromkeys(values, 1.1), error=0.0)
    erring = widths(values, values, error=0.2)
    assert all(spread[name] > same[name] > 0 for name in values)
    assert {name for name in values if erring[name] > same[name]} == set(SPEED_UNITS)
    half = run_forecast.STUDENT_T * math.hypot(run_forecast.MODEL_ERROR["step_s"], 0.2)
    assert erring["step_s"] == pytest.approx(2 * half)


def test_a_mean_lag_is_between_zero_and_the_bound() -> None:
    at_bound = predict_ranges([dict.fromkeys(QUANTITY_UNITS, 2.0)] * 2, 0.0, eta=2)["lag"]
    assert at_bound.low < at_bound.high == 2.0
    synchronous = predict_ranges([dict.fromkeys(QUANTITY_UNITS, 0.0)] * 2, 0.0, eta=0)["lag"]
    assert (synchronous.low, synchronous.high) == (0.0, 0.0)


def test_most_runs_are_inside_of_intervals_made_with_other_seeds() -> None:
    config = loading.load(JOB, SMALL)
    forecast = make_forecast(config, "exact times", "job")
    inside = dict.fromkeys(QUANTITY_UNITS, 0)
    for seed in range(100, 120):
        other = replace(config, seed=seed)
        steps = as_metrics(SimulatedRun(other, actor_settings.make_workload(other)).run().steps)
        result = compare_with_run(forecast, steps, "")
        for name in QUANTITY_UNITS:
            inside[name] += result.is_inside(name)
    assert all(count >= 16 for count in inside.values()), inside
    assert make_forecast(config, "exact times", "job") == forecast


def test_emulated_time_that_runs_faster_is_forecast_in_real_seconds() -> None:
    config = loading.load(JOB, SMALL)
    fast = loading.load(JOB, (*SMALL, "rollout.engine.time_scale=10.0"))
    slow_range, fast_range = (make_forecast(c, "times", "job").ranges for c in (config, fast))
    assert fast_range["total_s"].expected == pytest.approx(slow_range["total_s"].expected / 10)
    assert fast_range["total_tokens"] == slow_range["total_tokens"]


def test_a_run_is_compared_over_the_steps_of_its_forecast() -> None:
    forecast = make_forecast(loading.load(JOB, (*SMALL, "steps=3", "staleness.eta=0")), "times", "job")
    short = compare_with_run(forecast, steps_of(1.0, 2.0), "trainer")
    assert short.lines == ["forecast: not compared, 2 of 3 steps are stored"]
    exact = compare_with_run(forecast, steps_of(1.0, 2.0, 3.0), "trainer")
    extended = compare_with_run(forecast, steps_of(1.0, 2.0, 3.0, 99.0), "trainer")
    assert extended.measured == exact.measured
    assert exact.measured["total_s"] == 3.0


def test_a_result_names_what_is_outside() -> None:
    forecast = make_forecast(loading.load(JOB, SMALL), "times", "job")
    ranges = {name: replace(r, low=0.0, high=1e9) for name, r in forecast.ranges.items()}
    narrow = replace(forecast, ranges={**ranges, "total_s": replace(ranges["total_s"], high=1.0)}, bottleneck="reward")
    result = compare_with_run(narrow, steps_of(*map(float, range(1, 13))), "trainer")
    assert result.verdict == "forecast: 4 of 5 values are inside of their 90% intervals"
    assert result.line.startswith(f"{result.verdict}; outside: 12 s in all, forecast ")
    assert compare_with_run(replace(narrow, ranges=ranges), steps_of(*map(float, range(1, 13))), "").line.endswith(
        "intervals"
    )
    assert [line.rpartition(" ")[2] for line in result.lines[1:6]] == [
        "inside", "inside", "outside", "inside", "inside",
    ]  # fmt: skip
    assert result.lines[-1] == "bottleneck: trainer, forecast reward"
    assert result.as_dict()["inside"]["total_s"] is False


def test_a_resampled_workload_has_the_recorded_responses() -> None:
    lengths = np.arange(1, 81).reshape(40, 2)
    turns = {(3, 1): (Turn(4), Turn(4))}
    recorded = RecordedWorkload(np.arange(40), lengths, lengths / 100, turns)
    sample = recorded.resample(1, max_tokens=60)
    rows = [sample.prompt_tokens(group) for group in range(400)]
    assert len(set(rows)) > 15
    for group, row in enumerate(rows):
        expected = turns.get((row, 1)) or (Turn(min(60, int(lengths[row, 1]))),)
        assert sample.turns(group, 1) == expected
        assert sample.reward(group, 0) == lengths[row, 0] / 100
    assert [recorded.resample(2, 60).prompt_tokens(group) for group in range(400)] != rows

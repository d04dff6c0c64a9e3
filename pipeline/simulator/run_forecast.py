"""Forecast of a run from simulations of its job, and the comparison with the run. Pure.

Invariants:
- Simulated and real steps are measured by the same function, so a forecast and its result mean the same.
- A run is compared over the steps that were forecast; a shorter one is not compared.

An interval is meant to have the run's value in `COVERAGE` of all cases. Its half width is

    STUDENT_T sqrt((1 + 1 / n) sd^2 + (expected e)^2)

with the standard deviation sd over n simulations with different seeds, and the relative error e of what is simulated:
that of the cost model on decode steps which its fit left out, and `MODEL_ERROR` for all else.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.stores.metrics import tokens_per_s

COVERAGE = 0.9
"""Share of runs whose values are meant to be inside their intervals."""
NUM_SIMULATIONS = 10
"""Simulations of a forecast, each with another seed."""
STUDENT_T = 1.83
"""Two-sided 90 % quantile of Student's t with NUM_SIMULATIONS - 1 degrees of freedom."""
SPEED_UNITS = {"step_s": "s per step", "tokens_per_s": "tokens/s", "total_s": "s in all"}
QUANTITY_UNITS = {**SPEED_UNITS, "total_tokens": "tokens in all", "lag": "versions behind, mean"}
"""Units of the quantities of a forecast, for display."""
MODEL_ERROR = {**dict.fromkeys(SPEED_UNITS, 0.08), "total_tokens": 0.02, "lag": 0.05}
"""Relative error of simulated values besides that of the cost model and of the seed. For times it is about the root
mean square of seven runs of `benchmarks/forecasts.py`, with other seeds than those in docs/results.md, on two busy
cores (load 10 to 20); tokens and lags differed by less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRange:
    """A forecast value with its interval."""

    low: float
    expected: float
    high: float

    def __str__(self) -> str:
        return f"{format_number(self.expected)} ({format_number(self.low)} to {format_number(self.high)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast of a run, made before its first step."""

    steps: int
    """Training steps that are forecast."""
    ranges: dict[str, PredictedRange]
    """By the names of QUANTITY_UNITS."""
    bottleneck: str
    """The most frequent cause in the simulations; see profiling/diagnosis.py."""
    agreement: float
    """Share of the simulations with this cause."""
    memory_gb: dict[str, float]
    """Planned GB of a GPU for a rank, an instance and a teacher; empty if unknown. Runs do not measure it."""
    basis: str
    """The origin of the measured times, for display."""
    job: str
    """Digest of the job's settings."""

    @property
    def lines(self) -> list[str]:
        """The forecast as lines for display."""
        memory = ", ".join(f"{role} {gb:.1f} GB" for role, gb in self.memory_gb.items())
        return [
            f"forecast of {self.steps} steps, with {COVERAGE:.0%} intervals, from {self.basis}:",
            *(f"  {self.ranges[name]} {unit}" for name, unit in QUANTITY_UNITS.items()),
            f"  bottleneck: {self.bottleneck} (in {self.agreement:.0%} of the simulations)",
            *([f"  memory of a GPU, planned: {memory}"] if memory else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastComparison:
    """The comparison of a forecast with its run."""

    forecast: Forecast
    num_stored_steps: int
    """Steps that the run has stored."""
    measured: dict[str, float]
    """The run's values by the names of QUANTITY_UNITS; empty if it is shorter than its forecast."""
    bottleneck: str
    """The run's bottleneck; empty if unknown."""

    def is_inside(self, name: str) -> bool:
        """Whether the measured value of a quantity is in its interval."""
        predicted = self.forecast.ranges[name]
        return predicted.low <= self.measured[name] <= predicted.high

    @property
    def verdict(self) -> str:
        """How many values are inside of their intervals, in a few words."""
        if not self.measured:
            return f"forecast: not compared, {self.num_stored_steps} of {self.forecast.steps} steps are stored"
        num_inside = sum(map(self.is_inside, self.measured))
        return f"forecast: {num_inside} of {len(self.measured)} values are inside of their {COVERAGE:.0%} intervals"

    @property
    def line(self) -> str:
        """The verdict, and the values that are outside, in one line."""
        outside = [self._line(name) for name in self.measured if not self.is_inside(name)]
        return "; outside: ".join([self.verdict, *(["; ".join(outside)] if outside else [])])

    @property
    def lines(self) -> list[str]:
        """The verdict, and each value beside its forecast, as lines for display."""
        values = [f"{self._line(name)}: {'inside' if self.is_inside(name) else 'outside'}" for name in self.measured]
        if self.measured and self.bottleneck:
            values.append(f"bottleneck: {self.bottleneck}, forecast {self.forecast.bottleneck}")
        return [self.verdict, *values]

    def _line(self, name: str) -> str:
        """A measured value beside its forecast."""
        return f"{format_number(self.measured[name])} {QUANTITY_UNITS[name]}, forecast {self.forecast.ranges[name]}"

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for JSON."""
        inside = {name: self.is_inside(name) for name in self.measured}
        return {"lines": self.lines, "measured": self.measured, "inside": inside, "bottleneck": self.bottleneck}


def measure_run(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Measure the quantities of a forecast in the metrics of all steps of a simulated or real run. Seconds per step are
    a mean over all steps but the first, which fills the pipeline."""
    total_s = steps[-1]["elapsed_s"]
    return {
        "step_s": (total_s - steps[0]["elapsed_s"]) / (len(steps) - 1) if len(steps) > 1 else total_s,
        "tokens_per_s": tokens_per_s(steps),
        "total_s": total_s,
        "total_tokens": sum(step["response_tokens"] for step in steps),
        "lag": statistics.fmean(step["staleness_mean"] for step in steps),
    }


def predict_ranges(simulated: Sequence[Mapping[str, float]], cost_error: float, eta: int) -> dict[str, PredictedRange]:
    """Derive the intervals of a forecast.

    Args:
        simulated: `measure_run` of each simulation, at least two.
        cost_error: Relative error of decode steps, median.
        eta: Staleness bound, versions; a mean lag cannot be larger.
    """
    ranges = {}
    for name in QUANTITY_UNITS:
        values = [run[name] for run in simulated]
        expected, deviation = statistics.fmean(values), statistics.stdev(values)
        error = math.hypot(MODEL_ERROR[name], cost_error if name in SPEED_UNITS else 0.0)
        half = STUDENT_T * math.hypot(math.sqrt(1 + 1 / len(values)) * deviation, error * expected)
        high = min(expected + half, float(eta)) if name == "lag" else expected + half
        ranges[name] = PredictedRange(low=max(0.0, expected - half), expected=expected, high=high)
    return ranges


def most_frequent_cause(causes: Sequence[str]) -> tuple[str, float]:
    """The most frequent bottleneck, and its share of all."""
    cause, count = Counter(causes).most_common(1)[0]
    return cause, count / len(causes)


def compare_with_run(forecast: Forecast, steps: Sequence[Mapping[str, float]], bottleneck: str) -> ForecastComparison:
    """Compare a forecast with its run. steps: metrics of the run's stored steps."""
    is_complete = len(steps) >= forecast.steps
    measured = measure_run(steps[: forecast.steps]) if is_complete else {}
    return ForecastComparison(forecast=forecast, num_stored_steps=len(steps), measured=measured, bottleneck=bottleneck)


def format_number(value: float) -> str:
    """A number with three significant digits or all digits before the point.

    >>> [format_number(value) for value in (0.01234, 1.234, 1234.5)]
    ['0.0123', '1.23', '1,234']
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

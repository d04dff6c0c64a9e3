"""A comparison of runs as tables of text, for the terminal and the run page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from staleflow.pipeline.stored_runs.comparison import Comparison, CurvePoint, EvaluationPoint, PromptDifference

AXES = {"steps": "to step", "tokens": "to trained token", "seconds": "to second"}
TIMES = {
    "wait_s": "waits for batches", "train_s": "trains", "publish_s": "publishes", "overhead_s": "overhead",
    "rest_s": "rest",
}  # fmt: skip
"""What the trainer does, by metric; docs/metrics.md says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first column has the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_curve_tables(comparison: Comparison) -> Iterator[Table]:
    """Settings that differ, and rewards of batches over each axis."""
    jobs = list(comparison.jobs)
    settings = [[setting.key, *setting.values.values()] for setting in comparison.settings]
    yield Table(title="Settings that differ", columns=["", *jobs], rows=settings)
    for axis, column in AXES.items():
        points = {(p.end, p.job): p for p in comparison.rewards if p.axis == axis}
        digits = 1 if axis == "seconds" else 0
        rows = [
            [f"{end:,.{digits}f}", *(_format_point(points.get((end, job))) for job in jobs)]
            for end in sorted({end for end, _ in points})
        ]
        yield Table(title=f"Reward of batches over {axis}", columns=[column, *jobs], rows=rows)


def make_result_tables(comparison: Comparison) -> Iterator[Table]:
    """Rewards on held-out prompts, differences on the same prompts, and how the trainer spent its time."""
    jobs = list(comparison.jobs)
    yield Table(
        title="Reward on held-out prompts", columns=["set", "version", *jobs], rows=list(_evaluation_rows(comparison))
    )
    last = {(d.job, d.set, d.responses): d for d in comparison.differences}
    for job in jobs[1:]:
        rows = [_difference_row(d) for d in last.values() if d.job == job]
        columns = ["", "prompts", "version", "difference", "95 %", "p"]
        yield Table(title=f"{job} minus {jobs[0]}, on the same prompts", columns=columns, rows=rows)
    yield Table(title="Where the trainer's time went", columns=["", *jobs], rows=list(_time_rows(comparison)))


def _evaluation_rows(comparison: Comparison) -> Iterator[list[str]]:
    points = {(p.set, p.version, p.job): p for p in comparison.evaluations}
    for name, version in sorted({key[:2] for key in points}):
        points_of_jobs = [points.get((name, version, job)) for job in comparison.jobs]
        cells = (
            _format_point(p) + (f" ({p.tokens:,.0f} tokens, {p.seconds:,.1f} s)" if p else "") for p in points_of_jobs
        )
        yield [name, f"{version}", *cells]


def _format_point(point: CurvePoint | EvaluationPoint | None) -> str:
    """A mean with its standard error; empty where there is none."""
    if point is None:
        return ""
    return f"{point.reward:.3f}" + ("" if point.stderr is None else f" ± {point.stderr:.3f}")


def _difference_row(prompt_difference: PromptDifference) -> list[str]:
    subject, version = (
        f"{prompt_difference.set}, {prompt_difference.responses}",
        "" if prompt_difference.version < 0 else f"{prompt_difference.version}",
    )
    if prompt_difference.difference is None:
        return [subject, "", version, f"none: {prompt_difference.reason}", "", ""]
    difference = prompt_difference.difference
    p = f"{difference.p:.3f}" if difference.p >= 0.001 else "< 0.001"
    return [subject, f"{difference.num_prompts}", version, f"{difference.mean:+.3f}", str(difference.interval), p]


def _time_rows(comparison: Comparison) -> Iterator[list[str]]:
    uses = comparison.times
    yield ["seconds", *(f"{use.elapsed_s:,.1f}" for use in uses)]
    for name, title in TIMES.items():
        shares = (use.seconds[name] / use.elapsed_s if use.elapsed_s else 0.0 for use in uses)
        yield [title, *(f"{use.seconds[name]:,.1f} ({share:.0%})" for use, share in zip(uses, shares, strict=True))]
    yield ["trained tokens", *(f"{use.tokens:,.0f}" for use in uses)]
    yield ["tokens/s", *(f"{use.tokens_per_s:,.0f}" for use in uses)]

"""staleflow compare RUN RUN ..."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from staleflow.cli.stored import quiet_libraries

if TYPE_CHECKING:
    from staleflow.pipeline.stored_runs.comparison import Comparison, CurvePoint, EvaluationPoint, PromptDifference

Row = Sequence[str]
AXES = {"steps": "to step", "tokens": "to trained token", "seconds": "to second"}
TIMES = {
    "wait_s": "waits for batches",
    "train_s": "trains",
    "publish_s": "publishes",
    "overhead_s": "overhead",
    "rest_s": "rest",
}
"""What the trainer does, by metric; docs/metrics.md says more."""


@click.command("compare")
@click.argument("runs", type=click.Path(), nargs=-1, required=True, metavar="RUN[@BRANCH] RUN...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: settings that differ, rewards over steps, trained tokens and seconds, differences on the same
    prompts with 95 % intervals, and where time went.

    Runs that differ only in name and seed are one column: mean ± standard error. The others are compared with the first
    on the same prompts. `staleflow view RUN OTHER` draws two runs.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import compare
    from staleflow.stores.printable import printable

    comparison = compare(runs)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(comparison), indent=2))
        return
    jobs = list(comparison.jobs)
    for job, names in comparison.jobs.items():
        if len(names) > 1:
            click.echo(printable(f"{job}: {', '.join(names)}"))
    _print("settings that differ", ["", *jobs], ([d.key, *d.values.values()] for d in comparison.settings))
    for axis, title in AXES.items():
        _print(f"reward of batches over {axis}", [title, *jobs], _curves(comparison, axis))
    _print("reward on held-out prompts", ["set", "version", *jobs], _evaluations(comparison))
    last = {(d.job, d.set, d.responses): d for d in comparison.differences}
    columns = ["", "prompts", "version", "difference", "95 %", "p"]
    for job in jobs[1:]:
        rows = (_difference(d) for d in last.values() if d.job == job)
        _print(f"{job} minus {jobs[0]}, on the same prompts", columns, rows)
    _print("where the trainer's time went", ["", *jobs], _times(comparison))
    for use in comparison.times:
        for run, line in use.diagnosis.items():
            click.echo(printable(f"{run}: {line}"))


def _curves(comparison: Comparison, axis: str) -> list[Row]:
    points = {(p.end, p.job): p for p in comparison.rewards if p.axis == axis}
    digits = 1 if axis == "seconds" else 0
    return [
        [f"{end:,.{digits}f}", *(_shown(points.get((end, job))) for job in comparison.jobs)]
        for end in sorted({end for end, _ in points})
    ]


def _evaluations(comparison: Comparison) -> list[Row]:
    points = {(p.set, p.version, p.job): p for p in comparison.evaluations}
    rows = list[Row]()
    for name, version in sorted({key[:2] for key in points}):
        cells = []
        for job in comparison.jobs:
            point = points.get((name, version, job))
            cells.append(_shown(point) + (f"  {point.tokens:,.0f} tokens, {point.seconds:.1f} s" if point else ""))
        rows.append([name, f"{version}", *cells])
    return rows


def _shown(point: CurvePoint | EvaluationPoint | None) -> str:
    """A mean with its standard error; empty where there is none."""
    if point is None:
        return ""
    return f"{point.reward:.3f}" + ("" if point.stderr is None else f" ± {point.stderr:.3f}")


def _difference(row: PromptDifference) -> Row:
    subject, version = f"{row.set}, {row.responses}", "" if row.version < 0 else f"{row.version}"
    if row.difference is None:
        return [subject, "", version, f"none: {row.reason}", "", ""]
    found = row.difference
    p = f"{found.p:.3f}" if found.p >= 0.001 else "< 0.001"
    return [subject, f"{found.num_prompts}", version, f"{found.mean:+.3f}", str(found.interval), p]


def _times(comparison: Comparison) -> Iterable[Row]:
    uses = comparison.times
    yield ["seconds", *(f"{use.elapsed_s:,.1f}" for use in uses)]
    for name, title in TIMES.items():
        shares = (use.seconds[name] / use.elapsed_s if use.elapsed_s else 0.0 for use in uses)
        cells = (f"{use.seconds[name]:,.1f}  {share:.0%}" for use, share in zip(uses, shares, strict=True))
        yield [title, *cells]
    yield ["trained tokens", *(f"{use.tokens:,.0f}" for use in uses)]
    yield ["tokens/s", *(f"{use.tokens_per_s:,.0f}" for use in uses)]


def _print(title: str, columns: Row, rows: Iterable[Row]) -> None:
    """Print a table, unless it has no rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from staleflow.stores.printable import printable

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if table.row_count:
        console = Console()
        click.echo(f"\n{title}")
        (console if console.is_terminal else Console(width=180)).print(table)

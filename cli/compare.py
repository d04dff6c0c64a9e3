"""staleflow compare RUN RUN ..."""

from __future__ import annotations

import itertools

import click

from staleflow.cli.stored import print_json, print_table, quiet_libraries


@click.command("compare")
@click.argument("runs", type=click.Path(), nargs=-1, required=True, metavar="RUN[@BRANCH] RUN...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: settings that differ, rewards over steps, trained tokens and seconds, differences on the same
    prompts with 95 % intervals, and where time went.

    Runs that differ only in name and seed are one column: mean ± standard error. The others are compared with the first
    on the same prompts. `staleflow view RUN OTHER` shows two runs in the browser.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import compare
    from staleflow.pipeline.stored_runs.comparison import make_curve_tables, make_result_tables
    from staleflow.stores.printable import printable

    comparison = compare(runs)
    if as_json:
        print_json(comparison)
        return
    for job, names in comparison.jobs.items():
        if len(names) > 1:
            click.echo(printable(f"{job}: {', '.join(names)}"))
    for table in itertools.chain(make_curve_tables(comparison), make_result_tables(comparison)):
        if table.rows:
            click.echo(f"\n{printable(table.title)}")
            print_table(table.columns, table.rows)
    for use in comparison.times:
        for run, line in use.diagnosis.items():
            click.echo(printable(f"{run}: {line}"))

"""staleflow resume RUN"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options, print_submitted
from staleflow.cli.job import check, execute_job, warm_up

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import Where


@click.command("resume")
@click.argument("run", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of [cluster], or steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
@cluster_options
def command(run: str, overrides: tuple[str, ...], as_json: bool, verbose: int, where: Where) -> None:
    """Resume a stopped, killed or finished run from its newest resume point. If a cluster is named, it is submitted
    there."""
    from staleflow.pipeline.recovery import resumption

    config = resumption.load(Path(run), overrides)
    if note := resumption.schedule_note(config):
        click.echo(note, err=True)
    resumption.reached(config)
    if not where.named:
        warm_up(config, verbose)
    check(config, here=not where.named)
    if not where.named:
        execute_job(config, as_json=as_json, verbose=verbose, resume=True)
        return
    from staleflow.pipeline.config import user_files
    from staleflow.pipeline.jobs import submission

    job = asyncio.run(submission.submit(user_files.located(config), where, resume=True))
    print_submitted(job, as_json=as_json)

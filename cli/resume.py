"""staleflow resume RUN"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.jobs import cluster_options, told
from cli.run import carry_out

if TYPE_CHECKING:
    from pipeline.scheduler.connection import Where


@click.command("resume")
@click.argument("run", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Where and how long: cluster, steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
@cluster_options
def command(run: str, overrides: tuple[str, ...], as_json: bool, verbose: int, where: Where) -> None:
    """Go on with a run that was stopped, killed, or is to train further, from its newest resume point. With a cluster
    named it is submitted there."""
    from pipeline.runtime import resumption

    config = resumption.load(Path(run), overrides)
    if not where.named:
        carry_out(config, as_json=as_json, verbose=verbose, resume=True)
        return
    from pipeline.jobs import submission

    resumption.reached(config)
    told(config, asyncio.run(submission.submit(config, where, resume=True)))

"""staleflow resume RUN"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options, print_submitted
from staleflow.cli.job import check, execute_job, warm_up

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("resume")
@click.argument("run", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of [cluster], or steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
@cluster_options
def command(run: str, overrides: tuple[str, ...], as_json: bool, verbose: int, cluster: ClusterAddress) -> None:
    """Resume a stopped, killed or finished run from its newest resume point. If a cluster is named, it is submitted
    there."""
    from staleflow.pipeline.api.job_loading import resumable_job

    config = resumable_job(Path(run), overrides)
    if not cluster.is_named:
        warm_up(config, verbose)
    check(config, here=not cluster.is_named)
    if not cluster.is_named:
        execute_job(config, as_json=as_json, verbose=verbose, resume=True)
        return
    from staleflow.pipeline.jobs import job_driver

    print_submitted(asyncio.run(job_driver.submit(config, cluster, resume=True)), as_json=as_json)

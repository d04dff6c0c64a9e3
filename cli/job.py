"""Loads, checks and runs a job, for several commands."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from staleflow.cli.display import Display
    from staleflow.pipeline.config.schema import RunConfig
    from staleflow.pipeline.jobs.execution import RunEnd


store_option = click.option(
    "--store",
    default="",
    metavar="URL",
    help="Store the trajectories in a bucket: s3://BUCKET/PREFIX; the same as --set store=URL.",
)


def check(config: RunConfig, *, runs_here: bool = True) -> bool:
    """Check what a job names, and print what could not be checked. Returns whether nothing was printed. Raises
    ConfigError. runs_here: whether the job runs on this machine."""
    from staleflow.pipeline.config import preflight

    lines = preflight.check_job(config, runs_here=runs_here)
    for line in lines:
        click.echo(line, err=True)
    return not lines


def warm_up(config: RunConfig, verbose: int) -> None:
    """Set the environment variables that libraries read when they are imported, and let workers import them while this
    process checks the job. Call before importing anything heavy. verbose: see cli/display.py."""
    from staleflow.pipeline.processes import local_cluster

    if verbose > 1:
        os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "info")
    local_cluster.set_process_environment(config.cluster.threads)
    if config.cluster.kind == "local":
        local_cluster.start_fork_server(
            config.cluster.threads, local_cluster.modules_to_preload(emulated=config.emulated)
        )


def execute_job(config: RunConfig, *, as_json: bool, verbose: int, resume: bool) -> None:
    """Run or resume a job with a live view, and print its summary. Exits with 130 if it was stopped. Call `warm_up`
    first. verbose: see cli/display.py."""
    display, end = watch(config, quiet=as_json, verbose=verbose, resume=resume)
    if as_json:
        click.echo(json.dumps(end.summary, indent=2))
    else:
        display.summarize(end)
    if end.stopped:
        sys.exit(130)


def watch(config: RunConfig, *, quiet: bool, verbose: int, resume: bool) -> tuple[Display, RunEnd]:
    """Run or resume a job with a live view. Returns the view, and how the job ended. Exits with 130 if it was stopped
    before it began."""
    from staleflow.cli.display import Display, logging_to
    from staleflow.cli.interrupts import end_at_once
    from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest, execute, stopped_by_signals

    display = Display(config, quiet=quiet, verbosity=verbose)

    async def run() -> RunEnd:
        with StopRequest() as stop, stopped_by_signals(stop, display.on_line, end_at_once):
            return await execute(config, display, resume=resume, stop=stop)

    try:
        with display, logging_to(display.console, verbose):
            return display, asyncio.run(run())
    except StoppedBeforeStart as interruption:
        has_store = (config.run_dir / "store").exists()
        remedy = f"`staleflow resume {config.run_dir}` begins it" if has_store else "the same command begins it again"
        click.echo(f"stopped: {interruption} before the first step; nothing is lost, {remedy}", err=True)
        sys.exit(130)

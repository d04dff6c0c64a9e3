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


def check_and_print(config: RunConfig, *, runs_here: bool = True) -> bool:
    """Check what a job names, and print what could not be checked. Returns whether nothing was printed. Raises
    ConfigError. runs_here: whether the job runs on this machine."""
    from staleflow.pipeline.config import preflight

    lines = preflight.check_job(config, runs_here=runs_here)
    for line in lines:
        click.echo(line, err=True)
    return not lines


def prepare_process(config: RunConfig, verbosity: int) -> None:
    """Set the environment variables that libraries read when they are imported, and let workers import them while this
    process checks the job. Call before importing anything heavy. verbosity: see cli/display.py."""
    from staleflow.pipeline.processes import local_cluster

    if verbosity > 1:
        os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "info")
    local_cluster.set_process_environment(config.cluster.threads)
    if config.cluster.kind == "local":
        local_cluster.start_fork_server(
            config.cluster.threads, local_cluster.modules_to_preload(emulated=config.emulated)
        )


def execute_job(config: RunConfig, *, as_json: bool, verbosity: int, resume: bool) -> None:
    """Run or resume a job with a live view, and print its summary. Exits with 130 if it was stopped. Call
    `prepare_process` first. verbosity: see cli/display.py."""
    display, end = run_with_display(config, quiet=as_json, verbosity=verbosity, resume=resume)
    if as_json:
        click.echo(json.dumps(end.summary, indent=2))
    else:
        display.summarize(end)
    if end.stop_reason:
        sys.exit(130)


def run_with_display(config: RunConfig, *, quiet: bool, verbosity: int, resume: bool) -> tuple[Display, RunEnd]:
    """Run or resume a job with a live view. Returns the view, and how the job ended. Exits with 130 if it was stopped
    before it began."""
    from staleflow.cli.display import Display, logging_to
    from staleflow.cli.interrupts import end_at_once
    from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest, execute, stopped_by_signals

    display = Display(config, quiet=quiet, verbosity=verbosity)

    async def run() -> RunEnd:
        with StopRequest() as stop, stopped_by_signals(stop, display.on_line, end_at_once):
            return await execute(config, display, resume=resume, stop=stop)

    try:
        with display, logging_to(display.console, verbosity):
            return display, asyncio.run(run())
    except StoppedBeforeStart as interruption:
        has_store = (config.run_dir / "store").exists()
        remedy = f"`staleflow resume {config.run_dir}` begins it" if has_store else "the same command begins it again"
        click.echo(f"stopped: {interruption} before the first step; nothing is lost, {remedy}", err=True)
        sys.exit(130)

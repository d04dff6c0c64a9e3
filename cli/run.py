"""staleflow run CONFIG"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


@click.command("run")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
def command(config_path: str, overrides: tuple[str, ...], as_json: bool, verbose: int) -> None:
    """Run a job from start to end. Ctrl-C stops it cleanly and keeps what is stored."""
    config = load_new(config_path, overrides)
    warm_up(config, verbose)
    check(config)
    execute_job(config, as_json=as_json, verbose=verbose, resume=False)


def load_new(config_path: str, overrides: tuple[str, ...]) -> RunConfig:
    """The job of a file, with absolute paths. Raises ConfigError, also if its run's name is taken."""
    from pipeline.config import checks, loading, user_files
    from pipeline.runtime.run_folder import refuse_used

    config = loading.load(config_path, overrides)
    checks.check_names(config)
    config = user_files.located(config)
    refuse_used(config.run_dir)
    return config


def check(config: RunConfig, *, here: bool = True) -> None:
    """Check what a job names, and print what could not be checked. here: whether it runs on this machine. Raises
    ConfigError."""
    from pipeline.config import checks

    for line in checks.check_job(config, here=here):
        click.echo(line, err=True)


def warm_up(config: RunConfig, verbose: int) -> None:
    """Set the environment that libraries read when they are imported, and have them imported for the workers while this
    process still checks the job. Called before anything heavy is imported. verbose: see cli/verbosity.py."""
    # Before torch is loaded anywhere below: its thread pools spin on shared cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Dask's routine messages would be written across the live view. It reads this variable when it is imported, here
    # and in workers.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "info" if verbose > 1 else "critical")

    if config.cluster.kind == "local":
        from pipeline.runtime import local_cluster

        local_cluster.prepare(config.cluster.threads, local_cluster.modules(emulated=config.emulated))


def execute_job(config: RunConfig, *, as_json: bool, verbose: int, resume: bool) -> None:
    """Run or resume a job with a live view; exits with 130 if it was stopped. `warm_up` comes first."""
    from cli.display import Display
    from cli.interrupts import end_at_once
    from cli.verbosity import logging_to
    from pipeline.jobs.execution import RunEnd, execute
    from pipeline.jobs.stopping import Interrupted, Signals

    display = Display(config, quiet=as_json, verbosity=verbose)

    async def run() -> RunEnd:
        with Signals(display.announce, end_at_once) as signals:
            return await execute(config, display.progress, display.announce, resume=resume, signals=signals)

    try:
        with display, logging_to(display.console, verbose):
            end = asyncio.run(run())
    except Interrupted as stopped:
        click.echo(f"stopped: {stopped} before the first step; nothing is lost", err=True)
        sys.exit(130)
    if as_json:
        click.echo(json.dumps(end.summary, indent=2))
    else:
        display.summarize(end)
    if end.stopped:
        sys.exit(130)

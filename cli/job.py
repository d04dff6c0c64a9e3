"""Loading, checking and running a job, for the commands that do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cli.display import Display
    from pipeline.config.schema import RunConfig
    from pipeline.jobs.execution import RunEnd


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


def execute_job(config: RunConfig, *, as_json: bool, verbose: int, resume: bool) -> None:
    """Run or resume a job with a live view, and print its summary; exits with 130 if it was stopped. verbose: see
    cli/verbosity.py."""
    display, end = watch(config, quiet=as_json, verbose=verbose, resume=resume)
    if as_json:
        click.echo(json.dumps(end.summary, indent=2))
    else:
        display.summarize(end)
    if end.stopped:
        sys.exit(130)


def watch(config: RunConfig, *, quiet: bool, verbose: int, resume: bool) -> tuple[Display, RunEnd]:
    """Run or resume a job with a live view; returns the view and how the job ended."""
    # Before torch is loaded anywhere below: its thread pools spin on shared cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Dask's routine messages would be written across the live view. It reads this variable when it is imported, here
    # and in workers.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "info" if verbose > 1 else "critical")

    from cli.display import Display
    from cli.verbosity import logging_to
    from pipeline.jobs.execution import execute

    display = Display(config, quiet=quiet, verbosity=verbose)
    with display, logging_to(display.console, verbose):
        end = asyncio.run(execute(config, display.progress, display.announce, resume=resume))
    return display, end

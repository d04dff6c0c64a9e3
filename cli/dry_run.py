"""staleflow run --dry-run: run a job on random responses, in seconds."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import click

from staleflow.cli.job import check, warm_up, watch


def try_job(config_path: str, overrides: tuple[str, ...], *, as_json: bool, verbose: int) -> None:
    """Dry-run a job in a temporary folder, audit its store, and print the results. Exit code 1 if the audit has
    findings, 130 if the run was stopped. Raises ConfigError."""
    from staleflow.pipeline.api.dry_running import dry_job, dry_run_result
    from staleflow.pipeline.api.job_loading import load_job

    config = load_job(config_path, overrides)
    with tempfile.TemporaryDirectory(prefix="staleflow-dry-") as folder:
        small = dry_job(config, Path(folder))
        warm_up(small, verbose)
        check(dataclasses.replace(small, reward=config.reward))
        _, end = watch(small, quiet=as_json, verbose=verbose, resume=False)
        if end.stopped:
            sys.exit(130)
        result = dry_run_result(end.run_dir)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        size = f"{small.batch.groups_per_step} groups of {small.batch.group_size}"
        click.echo(f"dry run of {config.name}: {result.steps} of its {config.steps} steps, each of {size} responses")
        for line in result.lines:
            click.echo(f"  {line}")
        click.echo("no model sampled or was trained, and nothing is kept; `staleflow run` does both")
    if result.findings:
        sys.exit(1)

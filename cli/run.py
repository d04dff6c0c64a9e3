"""staleflow run | resume"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options, print_submitted
from staleflow.cli.job import check_and_print, execute_job, prepare_process, run_with_display, store_option

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("run")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@store_option
@click.option("--dry-run", is_flag=True, help="Try the job: three small steps on random responses; nothing is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
def command(
    config_path: str, overrides: tuple[str, ...], store: str, dry_run: bool, as_json: bool, verbose: int
) -> None:
    """Run a job from start to end. Ctrl-C stops it cleanly and keeps what is stored.

    With --dry-run, prompts, reward and coordination are the job's, the store is in a temporary folder, and no model
    samples or is trained.
    """
    from staleflow.pipeline.config.knob_tree import override_lines

    overrides += override_lines({"store": store} if store else {})
    if dry_run:
        dry_run_job(config_path, overrides, as_json=as_json, verbose=verbose)
        return
    from staleflow.pipeline.api.job_loading import load_job, prepare_job

    config = prepare_job(load_job(config_path, overrides))
    prepare_process(config, verbose)
    check_and_print(config)
    execute_job(config, as_json=as_json, verbosity=verbose, resume=False)


def dry_run_job(config_path: str, overrides: tuple[str, ...], *, as_json: bool, verbose: int) -> None:
    """Dry-run a job in a temporary folder, audit its store, and print the results. Exit code 1 if the audit has
    findings, 130 if the run was stopped. Raises ConfigError."""
    from staleflow.pipeline.api.dry_running import make_dry_job, read_dry_run_result
    from staleflow.pipeline.api.job_loading import load_job

    config = load_job(config_path, overrides)
    with tempfile.TemporaryDirectory(prefix="staleflow-dry-") as folder:
        dry_config = make_dry_job(config, Path(folder))
        prepare_process(dry_config, verbose)
        check_and_print(dataclasses.replace(dry_config, reward=config.reward))
        _, end = run_with_display(dry_config, quiet=as_json, verbosity=verbose, resume=False)
        if end.stop_reason:
            sys.exit(130)
        result = read_dry_run_result(end.run_dir)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        size = f"{dry_config.batch.groups_per_step} groups of {dry_config.batch.group_size}"
        click.echo(f"dry run of {config.name}: {result.steps} of its {config.steps} steps, each of {size} responses")
        for line in result.lines:
            click.echo(f"  {line}")
        click.echo("no model sampled or was trained, and nothing is kept; `staleflow run` does both")
    if result.findings:
        sys.exit(1)


@click.command("resume")
@click.argument("run", type=click.Path())
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override steps, a value of [cluster], [deadlines] or another of how it runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
@cluster_options
def resume(run: str, overrides: tuple[str, ...], as_json: bool, verbose: int, cluster: ClusterAddress) -> None:
    """Resume a stopped, killed or finished run from its newest resume point. If a cluster is named, it is submitted
    there."""
    from staleflow.pipeline.api.job_loading import load_resumable_job

    config = load_resumable_job(Path(run), overrides)
    if not cluster.is_named:
        prepare_process(config, verbose)
    check_and_print(config, runs_here=not cluster.is_named)
    if not cluster.is_named:
        execute_job(config, as_json=as_json, verbosity=verbose, resume=True)
        return
    from staleflow.pipeline.jobs import job_driver

    print_submitted(asyncio.run(job_driver.submit(config, cluster, resume=True)), as_json=as_json)

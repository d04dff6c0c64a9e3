"""staleflow unlearn RUN --where EXPR"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options
from staleflow.cli.stored import named_cluster, print_errors, quiet_libraries
from staleflow.cli.train_offline import progress

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("unlearn")
@click.argument("run", type=click.Path())
@click.option(
    "--where", "selection", required=True, metavar="EXPR", help='What to leave out, such as "dataset_row == 17".'
)
@click.option("--branch", default="unlearned", show_default=True, help="Name of the new branch.")
@click.option("--out", default="", help="Output folder; RUN-BRANCH by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def command(run: str, selection: str, branch: str, out: str, as_json: bool, cluster: ClusterAddress) -> None:
    """Repeat a run's training without the trajectories that match, from the first step that used one of them.

    The weights are those of train-offline without them, bit for bit. What remains was sampled by the run's policies,
    which had trained on them. Run a killed command again to resume it.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.stored_runs.run_files import format_steps

    stored = open_run(run)
    with named_cluster(cluster) as client, progress(quiet=as_json) as report:
        result = stored.unlearn(selection, branch=branch, out=out or None, client=client, report=report)
    training = result.training
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        click.echo(f"{training.checkpoint}: trained without {result.rows} trajectories")
        click.echo(f"  first used in step {result.first_step}; {result.never_trained} more match, never trained on")
        click.echo(f"  branch {result.branch}: {result.recomputed} advantages of others depended on them")
        if result.steps_left_out:
            click.echo(f"  not trained, as nothing of them remains: {format_steps(result.steps_left_out)}")
        begin = f"the resume point of version {result.start}" if result.start else f"the base model: {result.reason}"
        click.echo(f"  {training.steps - result.start} of {training.steps} steps trained again, from {begin}")
        print_errors(training.errors, "could not be read and were left out")
    if training.errors:
        sys.exit(1)

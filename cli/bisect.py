"""staleflow bisect RUN --at VERSION"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options
from staleflow.cli.stored import named_cluster, quiet_libraries
from staleflow.cli.train_offline import progress

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress
    from staleflow.stores.reward_statistics import PairedDifference


@click.command("bisect")
@click.argument("run", type=click.Path())
@click.option("--at", type=click.IntRange(min=1), required=True, help="Version with a lower reward.")
@click.option("--since", type=click.IntRange(min=0), help="Version before; by default the best one that was evaluated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def command(run: str, at: int, since: int | None, as_json: bool, cluster: ClusterAddress) -> None:
    """Find which trajectories made a policy worse between two versions.

    The steps between them are trained again without parts of their trajectories: stale ones, steps, groups. Each result
    answers the held-out prompts.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run

    stored = open_run(run)
    with named_cluster(cluster) as client, progress(quiet=as_json) as report:
        result = stored.bisect(at, since=since, client=client, report=report)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    click.echo(
        f"held-out reward: version {result.since} {result.reward_since:.3f}, version {at} {result.reward_at:.3f}"
    )
    if not result.same_weights:
        click.echo("not verified: the training repeated here gives other weights than the run published")
    width = max((len(trial.left_out) for trial in result.trials), default=0)
    for trial in result.trials:
        line = (
            f"  without {trial.left_out:<{width}} {trial.rows:6} rows  {trial.reward:.3f}  {_shown(trial.difference)}"
        )
        click.echo(line + ("  prevents it" if trial.prevents else ""))
    if result.cause is None:
        click.echo(f"no cause found: {result.reason}")
        return
    click.echo(f"smallest part tried that prevents it: {result.cause.left_out}, {result.cause.rows} rows")
    click.echo(f"  staleflow store show {run} --where '{result.cause.where}'")
    click.echo(f"  staleflow unlearn {run} --where '{result.cause.where}'")


def _shown(difference: PairedDifference | None) -> str:
    return "" if difference is None else f"{difference.mean:+.3f} (p {difference.p:.3f})"

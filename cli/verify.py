"""staleflow verify RUN | CHECKPOINT"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli.cluster_jobs import cluster_options
from staleflow.cli.stored import named_cluster, quiet_libraries
from staleflow.cli.train_offline import progress

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("verify")
@click.argument("source", type=click.Path(), metavar="RUN|CHECKPOINT")
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, metavar="K", help="Random steps to repeat."
)
@click.option("--seed", type=int, help="Seed of the choice; by default it is another each time.")
@click.option(
    "--signed-by", type=click.Path(), metavar="FILE", help="The checkpoint's certificate must be signed by a key in it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def command(
    source: str, steps: int, seed: int | None, signed_by: str | None, as_json: bool, cluster: ClusterAddress
) -> None:
    """Check the chain of a run, and repeat random steps, which must give the published weights bit for bit.

    A checkpoint is verified with the steps before it: it must have the weights that its step published. The folder of
    an offline training is verified with the chain of the run that it trained on.
    Exit code 1 if something contradicts the run, or if nothing could be verified.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.recovery import certificate
    from staleflow.pipeline.stored_runs import offline_verification
    from staleflow.stores.errors import ConfigError
    from staleflow.stores.printable import printable

    checkpoint = Path(source) if (Path(source) / certificate.FILE).exists() else None
    if checkpoint is None and (Path(source) / "config.json").exists():
        raise ConfigError(f"{source}: it has no {certificate.FILE}; name a run, or a checkpoint that a run saved")
    if signed_by is not None:
        if checkpoint is None:
            raise ConfigError(
                f"--signed-by: {source} is no checkpoint with {certificate.FILE}, which is what is signed"
            )
        signer = certificate.signer_of(checkpoint, Path(signed_by))
    run = source if checkpoint is None else certificate.run_of(checkpoint)
    stored = None if (Path(run) / offline_verification.RECORD).exists() else open_run(run)
    with named_cluster(cluster) as client, progress(quiet=as_json) as report:
        if stored is None:
            result = offline_verification.verify_offline(
                Path(run), steps=steps, seed=seed, client=client, report=report
            )
        else:
            result = stored.verify(checkpoint=checkpoint, steps=steps, seed=seed, client=client, report=report)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(result), "verified": result.verified}, indent=2))
    else:
        for line in result.lines:
            click.echo(printable(line))
        if signed_by is not None:
            click.echo(printable(f"  signed: {certificate.FILE}, by {signer}"))
    if not result.verified:  # an empty check does not pass
        sys.exit(1)

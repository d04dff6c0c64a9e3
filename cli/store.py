"""staleflow store ls | audit; the other commands of the group are in other modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli.lazy import LazyGroup
from staleflow.cli.stored import cluster_client, print_json, quiet_libraries, worker_options

if TYPE_CHECKING:
    from staleflow.pipeline.api.stored_run import Run
    from staleflow.pipeline.cluster.connection import ClusterAddress

COMMANDS = {
    "ls": ("staleflow.cli.store:list_stored_runs", "list the runs in a folder"),
    "show": ("staleflow.cli.show", "show a run's steps, a step's batch, or the worst, best or longest trajectories"),
    "audit": (
        "staleflow.cli.store:audit",
        "verify the bound, single consumption and conservation from the stored data alone",
    ),
    "rescore": ("staleflow.cli.store_process:rescore", "score the stored responses again, on a branch"),
    "diff": ("staleflow.cli.store_process:diff", "compare the rewards of two branches"),
    "recompute-logprobs": (
        "staleflow.cli.store_process:recompute_logprobs",
        "compute logprobs under other weights: KL, ESS, clipped share",
    ),
    "export": ("staleflow.cli.store_process:export", "export Parquet, JSON lines or a Hugging Face dataset"),
}


@click.group("store", cls=LazyGroup, sections={"Commands": COMMANDS})
def command() -> None:
    """Inspect, audit and process stored runs."""


@click.command("ls")
@click.argument("runs_dir", default="runs", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_stored_runs(runs_dir: str, as_json: bool) -> None:
    """List the runs in a folder, or one run by its folder or the URL of its store."""
    from staleflow.pipeline.api.stored_run import list_runs, open_run
    from staleflow.stores.s3_url import is_url

    is_run = is_url(runs_dir) or (Path(runs_dir) / "config.toml").is_file()
    runs = [open_run(runs_dir)] if is_run else list_runs(runs_dir)
    rows = [_run_facts(run) for run in runs]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no runs in {runs_dir}")
    for row in rows:
        reward = "" if row["reward"] is None else f"reward {row['reward']:.3f}"
        click.echo(
            f"{row['run']:<28} {row['steps']:>5} steps {row['trajectories']:>8} trajectories  {reward}  {row['state']}"
        )


def _run_facts(run: Run) -> dict[str, Any]:
    """What is listed of a run."""
    from staleflow.stores.errors import StaleflowError

    row: dict[str, Any] = {"run": run.source, "steps": 0, "trajectories": 0, "reward": None, "state": "no store"}
    try:
        summary = run.summary()
    except StaleflowError as error:
        return {**row, "state": str(error)}
    if summary is None:
        return row
    return {
        "run": run.source,
        "steps": summary.num_steps,
        "trajectories": summary.num_rows,
        "reward": summary.last_step.metrics.get("reward") if summary.last_step is not None else None,
        "state": "ended" if summary.has_ended else "unfinished",
    }


@click.command("audit")
@click.argument("run", type=click.Path())
@click.option("--full", is_flag=True, help="Also verify what earlier steps (--at-step) and other branches read.")
@click.option(
    "--memory",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    metavar="MIB",
    help="Most resident memory, of all local processes together.",
)
@worker_options
def audit(run: str, full: bool, memory: int, workers: int, as_json: bool, cluster: ClusterAddress) -> None:
    """Verify the bound, single consumption and conservation from the stored data alone. Exit code 1 if one fails,
    if no step is stored, or if the weights of no instance were verified."""
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.stores.errors import StoreError

    stored_run = open_run(run)
    with cluster_client(cluster, configured=False) as client:  # an audit needs none
        result = stored_run.audit(full=full, memory_mib=memory, workers=workers, client=client)
    # Statistics over groups need their numbers to be right.
    countable = not {"arrays", "once"} & {finding.check for finding in result.findings}
    bias = stored_run.drop_bias() if countable else None
    if as_json:
        print_json({**result.as_dict(), "bias": None if bias is None else bias.as_dict()})
    elif result.is_clean and not result.num_steps:
        click.echo(f"{run}: {result.verdict}")
    else:
        summary = f"{result.num_steps} steps, {result.num_trajectories} trajectories, largest staleness "
        summary += f"{result.max_staleness} ({stored_run.bound})"
        click.echo(f"{run}: {'damaged' if result.unchecked else summary}")
        click.echo("\n".join(result.lines))
        for line in bias.lines if bias is not None else ():
            click.echo(f"  {line}")
        try:
            if countable and (comparison := stored_run.compare_with_forecast()) is not None:
                click.echo(f"  {comparison.line}")
        except StoreError as error:
            click.echo(f"  {error}")
    if not result.is_verified:  # an empty check does not pass
        sys.exit(1)

"""staleflow train-offline RUN"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli.cluster_jobs import cluster_options
from staleflow.cli.stored import named_cluster, print_errors, quiet_libraries, selection_option

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("train-offline")
@click.argument("run", type=click.Path())
@click.option("--branch", default="main", show_default=True, help="Branch whose rewards and advantages to use.")
@selection_option
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes over the stored batches.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of [training], [model], or seed."
)
@click.option("--out", default="", help="Output folder; RUN-offline by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def command(
    run: str,
    branch: str,
    selection: str,
    epochs: int,
    overrides: tuple[str, ...],
    out: str,
    as_json: bool,
    cluster: ClusterAddress,
) -> None:
    """Train on a run's stored batches, in their order, with the same trainer and losses, without rollout.

    With all trajectories and nothing changed, this reproduces the run's weights bit for bit. Run a killed command again
    to resume it.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run

    stored = open_run(run, branch=branch)
    with named_cluster(cluster) as client, progress(quiet=as_json) as report:
        result = stored.train_offline(
            out or None, overrides=overrides, where=selection, epochs=epochs, client=client, report=report
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        click.echo(f"{result.checkpoint}: {result.steps} steps on {result.rows} trajectories")
        if result.before and result.after:
            click.echo(f"  {result.before.line}\n  {result.after.line}")
        if result.same_steps is not None:
            equal_steps = f"{result.same_steps} of {result.steps}"
            click.echo(f"  after {equal_steps} steps the weights equalled those the run published, bit for bit")
        print_errors(result.errors, "could not be read and were left out")
    if result.errors:
        sys.exit(1)


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Context manager: yields a function that shows training events, as a bar on a terminal and as a line every ten
    steps elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(event: Mapping[str, Any]) -> None:
            if quiet:
                return
            if "say" in event:
                console.print(event["say"], highlight=False, soft_wrap=True)
            if "metrics" in event:
                m, done, total = event["metrics"], event["done"], event["total"]
                kl = f"  KL {m['kl_rollout']:.2g}" if "kl_rollout" in m else ""
                line = f"reward {m['reward']:.3f}  loss {m.get('loss', 0):+.4f}{kl}"
                bar.update(task, completed=done, total=total, description=line)
                if not console.is_terminal and (done % 10 == 0 or done == total):
                    console.print(f"step {done}/{total}  {line}", highlight=False, soft_wrap=True)

        yield report

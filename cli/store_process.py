"""staleflow store rescore | diff | recompute-logprobs | export: work on a stored run, with Dask."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from staleflow.cli.stored import (
    cluster_client,
    print_errors,
    print_json,
    progress_bar,
    quiet_libraries,
    selection_option,
    starting_message,
    worker_options,
)

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress
    from staleflow.pipeline.stored_runs.exporting import ExportFormat


@click.command("rescore")
@click.argument("run", type=click.Path())
@click.option("--reward", default="", help="task, math_verify, path/to/file.py:name, or module:name; else the job's.")
@click.option(
    "--set", "changes", metavar="KEY=VALUE", multiple=True, help="Change [reward] or task.answer_pattern of the job."
)
@click.option("--branch", required=True, help="Name of the new branch for the rewards.")
@worker_options
def rescore(
    run: str, reward: str, changes: tuple[str, ...], branch: str, workers: int, as_json: bool, cluster: ClusterAddress
) -> None:
    """Score the stored responses again and store the rewards on a branch. Exit code 1 if some could not be scored."""
    if not (reward or changes):
        raise click.UsageError("name the reward: --reward FUNCTION, or change it with --set reward.KEY=VALUE")
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run

    stored_run = open_run(run)
    first_line = starting_message(cluster, workers)
    with cluster_client(cluster) as client, progress_bar("scored", quiet=as_json, first_line=first_line) as progress:
        result = stored_run.rescore(
            reward=reward, changes=changes, branch=branch, workers=workers, client=client, progress=progress
        )
    if as_json:
        print_json(result)
    else:
        click.echo(
            f"branch {branch}: {result.scored} responses of {result.rows} trajectories scored; mean reward of those "
            f"trained on: {result.mean_before:.3f} -> {result.mean_after:.3f}"
        )
        print_errors(result.errors, "could not be scored; the rest is stored")
        click.echo(f"see: staleflow store diff {run} main {branch}")
    if result.errors:
        sys.exit(1)


@click.command("diff")
@click.argument("run", type=click.Path())
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(run: str, first: str, second: str, as_json: bool) -> None:
    """Compare the rewards of the same trajectories on two branches."""
    from staleflow.pipeline.api.stored_run import open_run

    result = open_run(run).diff(first, second)
    if as_json:
        print_json(result)
        return
    click.echo(
        f"{result.trajectories} trajectories trained on: {result.changed} rewards differ, mean {result.mean[0]:.3f} in "
        f"{first}, {result.mean[1]:.3f} in {second}"
    )
    max_count = max((max(counts) for _, *counts in result.histogram), default=1)
    for edge, *counts in result.histogram:
        bars = (f"{count:7} {'#' * round(20 * count / max_count):<20}" for count in counts)
        click.echo(f"  from {edge:7.3f}  {'  '.join(bars)}".rstrip())
    for label, groups in (
        ("order of members changed", result.order_changed),
        (f"signal in {second} only", result.signal_second_only),
        (f"signal in {first} only", result.signal_first_only),
    ):
        examples = ", ".join(map(str, groups[:8])) + (", ..." if len(groups) > 8 else "")
        click.echo(f"  {len(groups):6} of {result.groups} groups: {label}{f' ({examples})' if groups else ''}")


@click.command("recompute-logprobs")
@click.argument("run", type=click.Path())
@click.option("--model", required=True, help="Folder of a checkpoint, or a hub name.")
@click.option(
    "--branch", default="", help="Store the logprobs on a new branch; `store show --branch` colours tokens by them."
)
@selection_option
@worker_options
def recompute_logprobs(
    run: str, model: str, branch: str, selection: str, workers: int, as_json: bool, cluster: ClusterAddress
) -> None:
    """Compute logprobs of the stored responses under a checkpoint, and its distance from the sampling policy."""
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run

    stored_run = open_run(run)
    first_line = starting_message(cluster, workers)
    with cluster_client(cluster) as client, progress_bar("read", quiet=as_json, first_line=first_line) as progress:
        result = stored_run.recompute_logprobs(
            model, branch=branch, where=selection, workers=workers, client=client, progress=progress
        )
    if as_json:
        print_json(result)
    else:
        click.echo(f"logprobs of {result.rows} responses of {run} under {model}")
        click.echo(
            f"{'staleness':>14} {'trajectories':>12} {'tokens':>9} {'KL, nats':>10} {'ESS tokens':>10} "
            f"{'responses':>9} {'clipped':>8} {'mean |log r|':>12} {'largest':>8}"
        )
        for row in result.by_staleness:
            lag = "not trained on" if row.staleness < 0 else str(row.staleness)
            click.echo(
                f"{lag:>14} {row.trajectories:12} {row.tokens:9} {row.kl:10.3g} {row.ess_tokens:10.1%} "
                f"{row.ess_sequences:9.1%} {row.clipped:8.1%} {row.mean_abs_log_ratio:12.3g} "
                f"{row.max_abs_log_ratio:8.3g}"
            )
        print_errors(result.errors, "could not be read; the rest is counted")
        if branch:
            click.echo(f"see: staleflow store show {run} --branch {branch} --worst 3")
    if result.errors:
        sys.exit(1)


@click.command("export")
@click.argument("run", type=click.Path())
@click.option(
    "--to",
    required=True,
    type=click.Choice(["parquet", "jsonl", "hf"]),
    help="Format; hf: a folder for datasets.load_dataset.",
)
@click.option(
    "--out", default="", help="Output folder (a file for jsonl); NAME.parquet, NAME.jsonl or NAME.hf by default."
)
@click.option("--branch", default="main", show_default=True, help="Branch whose rewards to use.")
@selection_option
@worker_options
def export(
    run: str,
    to: ExportFormat,
    out: str,
    branch: str,
    selection: str,
    workers: int,
    as_json: bool,
    cluster: ClusterAddress,
) -> None:
    """Export trajectories, as texts and tokens, for other tools."""
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run

    stored_run = open_run(run, branch=branch)
    first_line = starting_message(cluster, workers)
    with cluster_client(cluster) as client, progress_bar("written", quiet=as_json, first_line=first_line) as progress:
        result = stored_run.export(to, out or None, where=selection, workers=workers, client=client, progress=progress)
    if as_json:
        print_json(result)
    else:
        files = f"{result.files} file{'s' if result.files != 1 else ''}"
        click.echo(f"{result.path}: {result.rows} trajectories, {result.bytes / 2**20:.1f} MiB in {files}")
        print_errors(result.errors, "could not be read and were left out")
    if result.errors:
        sys.exit(1)

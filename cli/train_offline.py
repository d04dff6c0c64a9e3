"""staleflow train-offline | unlearn | bisect | verify: repeat the training of a stored run"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli.cluster_jobs import cluster_options
from staleflow.cli.stored import cluster_client, print_errors, print_json, quiet_libraries, selection_option

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress


@click.command("train-offline")
@click.argument("run", type=click.Path())
@click.option("--branch", default="main", show_default=True, help="Branch whose rewards and advantages to use.")
@selection_option
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes over the stored batches.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a value of [training] or [model], seed or task.eval_prompts.",
)
@click.option("--out", default="", help="Output folder; RUN-offline by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def train_offline(
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

    stored_run = open_run(run, branch=branch)
    with cluster_client(cluster) as client, training_progress(quiet=as_json) as report:
        result = stored_run.train_offline(
            out or None, overrides=overrides, where=selection, epochs=epochs, client=client, report=report
        )
    if as_json:
        print_json(result)
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
def training_progress(*, quiet: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
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
                console.print(event["say"], highlight=False, markup=False, soft_wrap=True)
            if "metrics" in event:
                m, num_done, total = event["metrics"], event["done"], event["total"]
                kl = f"  KL {m['kl_rollout']:.2g}" if "kl_rollout" in m else ""
                line = f"reward {m['reward']:.3f}  loss {m.get('loss', 0):+.4f}{kl}"
                bar.update(task, completed=num_done, total=total, description=line)
                if not console.is_terminal and (num_done % 10 == 0 or num_done == total):
                    console.print(f"step {num_done}/{total}  {line}", highlight=False, soft_wrap=True)

        yield report


@click.command("unlearn")
@click.argument("run", type=click.Path())
@click.option(
    "--where", "selection", required=True, metavar="EXPR", help='What to leave out, such as "dataset_row == 17".'
)
@click.option("--branch", default="unlearned", show_default=True, help="Name of the new branch.")
@click.option("--out", default="", help="Output folder; RUN-BRANCH by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def unlearn(run: str, selection: str, branch: str, out: str, as_json: bool, cluster: ClusterAddress) -> None:
    """Repeat a run's training without the trajectories that match, from the first step that used one of them.

    The weights are those of train-offline without them, bit for bit. What remains was sampled by the run's policies,
    which had trained on them. Run a killed command again to resume it.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.stored_runs.run_files import format_steps

    stored_run = open_run(run)
    with cluster_client(cluster) as client, training_progress(quiet=as_json) as report:
        result = stored_run.unlearn(selection, branch=branch, out=out or None, client=client, report=report)
    training = result.training
    if as_json:
        print_json(result)
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


@click.command("bisect")
@click.argument("run", type=click.Path())
@click.option("--at", type=click.IntRange(min=1), required=True, help="Version with a lower reward.")
@click.option("--since", type=click.IntRange(min=0), help="Version before; by default the best one that was evaluated.")
@click.option("--metric", default="reward", show_default=True, help="What is lower: the reward, or one of its parts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
@cluster_options
def bisect(run: str, at: int, since: int | None, metric: str, as_json: bool, cluster: ClusterAddress) -> None:
    """Find the smallest change that prevents that a policy became worse between two versions.

    The steps between them are trained again, each time with one change: settings of before a resume, without a part of
    the reward, without rows that stand out, without steps and groups. Each result answers the held-out prompts. A page
    in the run's folder shows all.
    """
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.stored_runs.bisection_page import result_lines

    stored_run = open_run(run)
    with cluster_client(cluster) as client, training_progress(quiet=as_json) as report:
        result = stored_run.bisect(at, since=since, metric=metric, client=client, report=report)
    if as_json:
        print_json(result)
    else:
        for line in result_lines(result):
            click.echo(line)


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
def verify(
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
        signer = certificate.verify_signature(checkpoint, Path(signed_by))
    run = source if checkpoint is None else certificate.find_run(checkpoint)
    stored_run = None if (Path(run) / offline_verification.RECORD_FILE).exists() else open_run(run)
    with cluster_client(cluster) as client, training_progress(quiet=as_json) as report:
        if stored_run is None:
            result = offline_verification.verify_offline(
                Path(run), checkpoint=checkpoint, steps=steps, seed=seed, client=client, report=report
            )
        else:
            result = stored_run.verify(checkpoint=checkpoint, steps=steps, seed=seed, client=client, report=report)
    if as_json:
        print_json({**dataclasses.asdict(result), "verified": result.is_verified})
    else:
        for line in result.lines:
            click.echo(printable(line))
        if signed_by is not None:
            click.echo(printable(f"  signed: {certificate.FILE}, by {signer}"))
    if not result.is_verified:  # an empty check does not pass
        sys.exit(1)

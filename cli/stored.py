"""Helpers of the commands on stored runs: options, the cluster they name, progress bars, errors of trajectories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from staleflow.cli.cluster_jobs import cluster_options

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress

ERRORS_SHOWN = 10

Command = TypeVar("Command", bound=Callable[..., Any])

selection_option = click.option(
    "--where",
    "selection",
    default="",
    metavar="EXPR",
    help='Only trajectories that match, such as "staleness <= 1 and reward > 0".',
)


def worker_options(function: Command) -> Command:
    """Decorator: options of the commands that process a run on Dask workers."""
    for option in (
        cluster_options,
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--workers",
            type=click.IntRange(1, 1024),
            default=2,
            show_default=True,
            help="Local worker processes, unless a cluster is named.",
        ),
    ):
        function = option(function)
    return function


@contextlib.contextmanager
def named_cluster(cluster: ClusterAddress, *, configured: bool = True) -> Iterator[Any]:
    """A client of the cluster that the options name; None if they name none. configured: whether Dask's configuration
    may name it, too. Raises ConfigError if it does not answer."""
    if not (cluster.is_named if configured else cluster.address or cluster.scheduler_file):
        yield None
        return
    with cluster.blocking() as client:
        yield client


def quiet_libraries() -> None:
    """Silence the progress and logs of Dask, torch and transformers. Call before they are imported."""
    from staleflow.pipeline.processes.local_cluster import set_process_environment

    set_process_environment(threads=1)


def announce(line: str) -> None:
    """Tell a person who waits what the command starts, where that takes seconds."""
    click.echo(line, err=True)


def starting(cluster: ClusterAddress, count: int) -> str:
    """What the next seconds are for; empty if workers of a cluster are there already."""
    plural = "es" if count != 1 else ""
    return "" if cluster.is_named else f"starting {count} worker process{plural}; --workers sets their number"


@contextlib.contextmanager
def progress_bar(label: str, *, quiet: bool, first: str = "") -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing elsewhere. first: a line for when all is checked and work begins, which the
    first call, (0, 0), says."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(label)

        def progress(done: int, total: int) -> None:
            if total:
                bar.update(task, completed=done, total=total)
            elif first and not quiet:
                console.print(first, highlight=False, soft_wrap=True)

        yield progress


def print_errors(errors: Mapping[int, str], outcome: str) -> None:
    """Print the first errors by trajectory, and their number. what: completes "N responses ..."."""
    for trajectory, error in sorted(errors.items())[:ERRORS_SHOWN]:
        click.echo(f"  trajectory {trajectory}: {error}")
    if errors:
        click.echo(f"  {len(errors)} responses {outcome}")

"""Helpers of the commands on stored runs: options, clusters, progress bars, errors of trajectories."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from staleflow.cli.cluster_jobs import cluster_options

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress

MAX_SHOWN_ERRORS = 10

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
def cluster_client(cluster: ClusterAddress, *, configured: bool = True) -> Iterator[Any]:
    """Context manager: a client of the cluster that the options name, or None if they name none. Raises ConfigError if
    the cluster does not answer.

    Args:
        configured: Whether the cluster may also be named by Dask's configuration.
    """
    if not (cluster.is_named if configured else cluster.address or cluster.scheduler_file):
        yield None
        return
    with cluster.open_blocking_client() as client:
        yield client


def quiet_libraries() -> None:
    """Silence the progress and logs of Dask, torch and transformers, and set OMP_NUM_THREADS to 1 unless it is set.
    Call before they are imported."""
    from staleflow.pipeline.processes.local_cluster import set_process_environment

    set_process_environment(threads=1)


def print_json(value: Any) -> None:
    """Print a value as JSON; dataclasses become objects."""
    click.echo(json.dumps(value, indent=2, default=dataclasses.asdict))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Container[int] = (0,)) -> None:
    """Print a table of text. left: numbers of the columns that are aligned to the left."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from staleflow.stores.printable import printable

    console, table = Console(), Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if number in left else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    (console if console.is_terminal else Console(width=180)).print(table)


def announce(line: str) -> None:
    """Print to standard error what the command is about to do, before work that takes seconds."""
    click.echo(line, err=True)


def starting_message(cluster: ClusterAddress, count: int) -> str:
    """The message that local worker processes are starting; empty if a cluster is named, whose workers run already."""
    plural = "es" if count != 1 else ""
    return "" if cluster.is_named else f"starting {count} worker process{plural}; --workers sets their number"


@contextlib.contextmanager
def progress_bar(label: str, *, quiet: bool, first_line: str = "") -> Iterator[Callable[[int, int], None]]:
    """Context manager: yields a function progress(done, total) that updates a bar on a terminal, and does nothing
    elsewhere.

    Args:
        quiet: Whether to print nothing.
        first_line: Printed when progress(0, 0) reports that checks are done and work begins.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(label)

        def progress(num_done: int, total: int) -> None:
            if total:
                bar.update(task, completed=num_done, total=total)
            elif first_line and not quiet:
                console.print(first_line, highlight=False, soft_wrap=True)

        yield progress


def print_errors(errors: Mapping[int, str], outcome: str) -> None:
    """Print the first errors by trajectory, and their number. outcome: completes the sentence "N responses ..."."""
    for trajectory, error in sorted(errors.items())[:MAX_SHOWN_ERRORS]:
        click.echo(f"  trajectory {trajectory}: {error}")
    if errors:
        click.echo(f"  {len(errors)} responses {outcome}")

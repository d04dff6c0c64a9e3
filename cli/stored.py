"""Helpers of the commands on stored runs: opening a run, progress bars, printing errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from staleflow.stores.trajectories.versioned import VersionedStore

ERRORS_SHOWN = 10

selection_option = click.option(
    "--where",
    "selection",
    default="",
    metavar="EXPR",
    help='Only trajectories that match, such as "staleness <= 1 and reward > 0".',
)


def run_folder(run: str) -> Path:
    """The folder of a run named by its path, or by the URL of its store: then a temporary one, until this process ends,
    with the job file that the store holds. Raises ConfigError, StoreError."""
    from staleflow.stores.s3_url import is_url

    if not is_url(run):
        return Path(run)
    from staleflow.stores.errors import ConfigError, StoreError
    from staleflow.stores.trajectories.storage import name_url, refuse_silent
    from staleflow.stores.trajectories.versioned import VersionedStore

    parent = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(parent.cleanup)
    folder = Path(parent.name) / run.rstrip("/").rpartition("/")[2]
    folder.mkdir()
    name_url(folder / "store", run)
    try:
        refuse_silent()
        store = VersionedStore.pinned(folder / "store")
    except (StoreError, OSError) as error:
        why = str(error).rpartition(": ")[2]
        raise ConfigError(
            f"{run}: no store can be read there: {why}; check the URL, AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID"
        ) from error
    (folder / "config.toml").write_text(store.header.job, "utf-8")
    return folder


def open_store(run: Path, at_step: int | None = None, branch: str = "main") -> VersionedStore:
    """The store of a run folder. Raises ConfigError, StoreError."""
    from staleflow.pipeline.recovery.run_folder import require_run
    from staleflow.stores.trajectories.versioned import VersionedStore

    require_run(run)
    return VersionedStore.open(run / "store", at_step, branch)


def quiet_libraries() -> None:
    """Silence the progress and logs of Dask, torch and transformers. Call before they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")


def announce(line: str) -> None:
    """Tell a person who waits what the command starts, where that takes seconds."""
    click.echo(line, err=True)


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_errors(errors: Mapping[int, str], what: str) -> None:
    """Print the first errors by trajectory, and their number. what: completes "N responses ..."."""
    for trajectory, error in sorted(errors.items())[:ERRORS_SHOWN]:
        click.echo(f"  trajectory {trajectory}: {error}")
    if errors:
        click.echo(f"  {len(errors)} responses {what}")

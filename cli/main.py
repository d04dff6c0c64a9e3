"""The `staleflow` command. Subcommands are imported when they are called, so that --help is instant."""

from __future__ import annotations

import sys

import click

from cli.lazy import LazyGroup

COMMANDS = {
    "run": ("cli.run", "run a job from start to end, with live progress"),
    "resume": ("cli.resume", "go on with a stored run where it left off"),
    "submit": ("cli.jobs:submit", "hand a job to a Dask cluster; it goes on when you leave"),
    "jobs": ("cli.jobs:list_jobs", "the jobs of a cluster"),
    "status": ("cli.jobs:status", "how a job stands, and what it waits for"),
    "logs": ("cli.jobs:logs", "what a job has said"),
    "cancel": ("cli.jobs:cancel", "ask a job to stop at its next step"),
    "train-offline": ("cli.train_offline", "train on stored trajectories, without any rollout"),
    "simulate": ("cli.simulate", "the same job in virtual time: what a run would take, and why"),
    "profile": ("cli.profile", "measure an engine's decode steps and fit the cost model"),
    "config": ("cli.config", "what a job file means"),
    "store": ("cli.store", "look at stored runs, and prove what they promise"),
    "replay": ("cli.replay", "feed a run's recorded events to the coordinator again"),
    "doctor": ("cli.doctor", "what works on this machine"),
}


@click.group(cls=LazyGroup, commands_at=COMMANDS)
@click.version_option(package_name="staleflow", message="%(prog)s %(version)s")
def cli() -> None:
    """Asynchronous RL post-training of language models on Dask, under a proved staleness bound."""


def main() -> None:
    """Entry point: wrong input is one line and exit code 2, a fault of ours a story and exit code 1."""
    from stores.errors import ConfigError, StaleflowError

    try:
        cli()
    except ConfigError as error:
        click.echo(f"staleflow: {error}", err=True)
        sys.exit(2)
    except StaleflowError as error:
        click.echo(f"staleflow: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

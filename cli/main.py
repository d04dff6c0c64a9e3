"""The `staleflow` command. Subcommands are imported only when called, so that --help is instant."""

from __future__ import annotations

import sys

import click

from cli.lazy import LazyGroup

COMMANDS = {
    "init": ("cli.init", "write a first job, with data, reward and model if you have none"),
    "run": ("cli.run", "run a job from start to end, with live progress"),
    "resume": ("cli.resume", "resume a stored run where it stopped"),
    "submit": ("cli.jobs:submit", "submit a job to a Dask cluster; it keeps running after you disconnect"),
    "jobs": ("cli.jobs:list_jobs", "list the jobs of a cluster"),
    "status": ("cli.jobs:status", "show a job's progress and what it waits for"),
    "logs": ("cli.jobs:logs", "print a job's log"),
    "cancel": ("cli.jobs:cancel", "stop a job at its next step"),
    "train-offline": ("cli.train_offline", "train on stored trajectories, without rollout"),
    "simulate": ("cli.simulate", "run a job in virtual time: how long it would take, and why"),
    "profile": ("cli.profile", "measure an engine's decode steps and fit the cost model"),
    "config": ("cli.config", "explain a job file, or print the schema"),
    "store": ("cli.store", "inspect, audit and process stored runs"),
    "replay": ("cli.replay", "replay a run's recorded events and compare the commands"),
    "doctor": ("cli.doctor", "check what works on this machine"),
}


@click.group(cls=LazyGroup, commands_at=COMMANDS)
@click.version_option(package_name="staleflow", message="%(prog)s %(version)s")
def cli() -> None:
    """Asynchronous RL post-training of language models on Dask, under a proved staleness bound."""


def main() -> None:
    """Entry point. Errors are one line; exit code 2 for wrong input, 1 for failures."""
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

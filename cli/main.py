"""The `staleflow` command. Subcommands are imported only when called, so that --help is instant."""

from __future__ import annotations

import errno
import io
import os
import sys

import click

from staleflow.cli.lazy import LazyGroup

SECTIONS = {
    "Run a job": {
        "init": ("staleflow.cli.init", "write a first job, with data, reward and model if you have none"),
        "run": ("staleflow.cli.run", "run a job from start to end, with live progress"),
        "resume": ("staleflow.cli.run:resume", "resume a stored run where it stopped"),
        "view": ("staleflow.cli.view", "show a run in the browser, live or finished"),
        "compare": ("staleflow.cli.compare", "compare runs: settings, curves, same prompts, and where time went"),
    },
    "Plan a job": {
        "config": ("staleflow.cli.config", "explain a job file, or print the schema"),
        "plan": (
            "staleflow.cli.simulate:plan",
            "forecast a run from measured times, and compare it with the run afterwards",
        ),
        "simulate": ("staleflow.cli.simulate:simulate", "run a job in virtual time: how long it would take, and why"),
        "profile": ("staleflow.cli.simulate:profile", "fit the cost model of simulations to a run"),
        "doctor": ("staleflow.cli.doctor", "check what works on this machine"),
    },
    "Run jobs on a Dask cluster": {
        "cluster": ("staleflow.cli.cluster_jobs:cluster", "start a cluster on this machine that only you can reach"),
        "submit": ("staleflow.cli.cluster_jobs:submit", "submit a job; it keeps running after you disconnect"),
        "jobs": ("staleflow.cli.cluster_jobs:list_jobs", "list the jobs of a cluster"),
        "status": ("staleflow.cli.cluster_jobs:status", "show a job's progress and what it waits for"),
        "logs": ("staleflow.cli.cluster_jobs:logs", "print a job's log"),
        "retire": ("staleflow.cli.cluster_jobs:retire", "make a job release one of its workers, without losing work"),
        "cancel": ("staleflow.cli.cluster_jobs:cancel", "stop a job at its next step"),
    },
    "Use a trained policy": {
        "chat": ("staleflow.cli.serve:chat", "talk to a run's policy, or a model, in the terminal"),
        "serve": ("staleflow.cli.serve:serve", "serve a run's policy, or a model, over HTTP"),
        "eval": ("staleflow.cli.serve:evaluate", "run benchmark tasks of lm-eval on a run's checkpoint, or a model"),
        "push": ("staleflow.cli.serve:push", "upload a run's checkpoint to the Hugging Face hub, with a model card"),
    },
    "Use a stored run": {
        "store": ("staleflow.cli.store", "inspect, audit and process stored runs"),
        "train-offline": ("staleflow.cli.train_offline:train_offline", "train on stored trajectories, without rollout"),
        "unlearn": ("staleflow.cli.train_offline:unlearn", "repeat a run's training without some trajectories"),
        "bisect": ("staleflow.cli.train_offline:bisect", "find which change prevents that a policy became worse"),
        "verify": ("staleflow.cli.train_offline:verify", "check a run's chain, and repeat random steps bit for bit"),
        "replay": ("staleflow.cli.replay", "replay a run's recorded events and compare the commands"),
    },
}
OUTPUT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Error numbers of an output that cannot be written any more."""
PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Error numbers of a path that is invalid, or that this user cannot use."""


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    subgroups=("config", "store"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="staleflow", message="%(prog)s %(version)s")
def cli() -> None:
    """Asynchronous RL post-training of language models on Dask, under a proved staleness bound."""


def entry() -> None:
    """Entry point of the `staleflow` command: run `main`, and end this process."""
    from staleflow.cli.interrupts import FinalExitCode

    final_exit_code = FinalExitCode()
    try:
        main()
    except SystemExit as error:
        final_exit_code.value = error.code if isinstance(error.code, int) else 0
        raise


def main() -> None:
    """Run the command that sys.argv names. Errors are one line; exit code 2 for wrong input, 1 for failures."""
    from staleflow.cli.interrupts import ctrl_c
    from staleflow.stores.errors import StaleflowError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        with ctrl_c():
            code = cli(prog_name="staleflow", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        exit_with_error("interrupted", 130)
    except (click.UsageError, StaleflowError) as error:
        exit_with_error(*format_error(error))
    except OSError as error:
        if error.errno in PATH_ERRNOS and error.filename:
            name = os.fsdecode(error.filename)[:200]
            exit_with_error(f"{name}: cannot be used: {error.strerror}; check the path and its permissions", 2)
        if error.errno not in OUTPUT_ERRNOS:
            raise
        discard_output()
        exit_with_error(f"the output cannot be written: {error.strerror}", 1)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def format_error(error: Exception) -> tuple[str, int, str]:
    """Format an error for the terminal. Returns (line, exit code, command to name as its origin)."""
    from staleflow.stores.errors import ConfigError, ProtocolViolation

    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "staleflow"
        return f"{' '.join(error.format_message().split()).rstrip('.')}; see {command} -h", 2, command
    bug = "a bug in staleflow, please report it: " if isinstance(error, ProtocolViolation) else ""
    return f"{bug}{error}", 2 if isinstance(error, ConfigError) else 1, "staleflow"


def exit_with_error(message: str, code: int, command: str = "staleflow") -> None:
    """Print one line to standard error, and exit."""
    from staleflow.stores.printable import printable

    click.echo(f"{command}: {printable(message)}", err=True)
    sys.exit(code)


def discard_output() -> None:
    """Discard further output to a standard output that failed, because Python would write to it again at exit."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    entry()

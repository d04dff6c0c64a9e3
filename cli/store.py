"""staleflow store ls | audit; the other commands of the group are in other modules."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli.lazy import LazyGroup
from staleflow.cli.store_process import worker_options
from staleflow.cli.stored import open_store, quiet_libraries, run_folder

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import Where

COMMANDS = {
    "ls": ("staleflow.cli.store:ls", "list the runs in a folder"),
    "show": ("staleflow.cli.show", "show a run's steps, a step's batch, or the worst, best or longest trajectories"),
    "audit": (
        "staleflow.cli.store:audit",
        "verify the bound, single consumption and conservation from the stored data alone",
    ),
    "reprocess": ("staleflow.cli.store_process:reprocess", "score the stored responses again, on a branch"),
    "diff": ("staleflow.cli.store_process:diff", "compare the rewards of two branches"),
    "rescore-logprobs": (
        "staleflow.cli.store_process:rescore",
        "compute logprobs under other weights: KL, ESS, clipped share",
    ),
    "export": ("staleflow.cli.store_process:export", "export Parquet, JSON lines or a Hugging Face dataset"),
}


@click.group("store", cls=LazyGroup, commands_at=COMMANDS)
def command() -> None:
    """Inspect, audit and process stored runs."""


@click.command("ls")
@click.argument("runs_dir", default="runs", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(runs_dir: str, as_json: bool) -> None:
    """List the runs in a folder, or the one whose store is at a URL."""
    from staleflow.pipeline.recovery.run_folder import list_runs
    from staleflow.stores.errors import ConfigError, StaleflowError
    from staleflow.stores.s3_url import is_url

    if not is_url(runs_dir) and not Path(runs_dir).is_dir() and (runs_dir != "runs" or Path(runs_dir).exists()):
        why = "a file, not a folder" if Path(runs_dir).exists() else "no such folder"
        raise ConfigError(f"{runs_dir}: {why}; name the folder that holds runs, by default runs")
    rows = []
    for run in [run_folder(runs_dir)] if is_url(runs_dir) else list_runs(Path(runs_dir)):
        shown = runs_dir if is_url(runs_dir) else str(run)
        row: dict[str, Any] = {"run": shown, "steps": 0, "trajectories": 0, "reward": None, "state": "no store"}
        if (run / "store").exists():
            try:
                stored = open_store(run).summary()
            except StaleflowError as error:
                row["state"] = str(error)
            else:
                row |= {
                    "steps": stored.num_steps,
                    "trajectories": stored.num_rows,
                    "reward": stored.last_step.metrics.get("reward") if stored.last_step is not None else None,
                    "state": "ended" if stored.ended else "unfinished",
                }
        rows.append(row)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(f"no runs in {runs_dir}")
    for row in rows:
        reward = "" if row["reward"] is None else f"reward {row['reward']:.3f}"
        click.echo(
            f"{row['run']:<28} {row['steps']:>5} steps {row['trajectories']:>8} trajectories  {reward}  {row['state']}"
        )


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
def audit(run: str, full: bool, memory: int, workers: int, as_json: bool, where: Where) -> None:
    """Verify the bound, single consumption and conservation from the stored data alone. Exit code 1 if one fails."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.auditing import audit_within
    from staleflow.stores.auditing import snapshot_audit
    from staleflow.stores.auditing.drop_bias import bias_report

    store = open_store(run_folder(run))
    result = audit_within(store, memory, workers, where)
    if full:
        earlier = snapshot_audit.audit_history(store.path)
        result = dataclasses.replace(
            result, checks=(*result.checks, snapshot_audit.CHECK), findings=(*result.findings, *earlier)
        )
    readable = all(finding.check != "arrays" for finding in result.findings)
    bias = bias_report(store) if readable else None
    if as_json:
        told = {"clean": result.clean, "bias": None if bias is None else bias.as_dict()}
        if result.unchecked:
            told |= dict.fromkeys(("num_steps", "num_trajectories", "num_tokens", "max_staleness"))
        click.echo(json.dumps({**dataclasses.asdict(result), **told}, indent=2))
    elif result.clean and not result.num_steps:
        click.echo(f"{run}: no steps stored yet, nothing to verify")
    else:
        covered = f"{result.num_steps} steps, {result.num_trajectories} trajectories, largest staleness "
        covered += f"{result.max_staleness} ({store.header.bound})"
        click.echo(f"{run}: {'damaged' if result.unchecked else covered}")
        for check in result.checks:
            found = [f for f in result.findings if f.check == check]
            holds = "not verified: the run keeps no bound" if check in result.not_verified else "holds"
            click.echo(f"  {check:<13} {holds if not found else f'BROKEN, {len(found)} findings'}")
            for finding in found[:10]:
                click.echo(f"      {finding.where}: {finding.what}")
        for check in result.unchecked:
            click.echo(f"  {check:<13} not checked: it needs what cannot be read")
        for line in bias.lines if bias is not None else ():
            click.echo(f"  {line}")
    if not result.clean:
        sys.exit(1)

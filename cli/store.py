"""staleflow store ls | show | audit | reprocess | diff"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.jobs import cluster_options

if TYPE_CHECKING:
    from pipeline.jobs import Where
    from stores.versioned import VersionedStore


@click.group("store")
def command() -> None:
    """Look at stored runs, and prove what they promise."""


@command.command("ls")
@click.argument("runs_dir", default="runs", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(runs_dir: str, as_json: bool) -> None:
    """The runs in a folder."""
    from pipeline.runs import list_runs
    from stores.errors import StaleflowError

    rows = []
    for run in list_runs(Path(runs_dir)):
        row: dict[str, Any] = {"run": str(run), "steps": 0, "trajectories": 0, "reward": None, "state": "no store"}
        if (run / "store").is_dir():
            try:
                records = _open(run).steps()
            except StaleflowError as error:
                row["state"] = str(error)
            else:
                steps = [r for r in records if r.kind == "step"]
                ended = bool(records) and records[-1].kind == "end"
                row |= {
                    "steps": len(steps),
                    "trajectories": sum(r.num_rows for r in records),
                    "reward": steps[-1].metrics.get("reward") if steps else None,
                    "state": "ended" if ended else "unfinished",
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


@command.command("show")
@click.argument("run", type=click.Path())
@click.option("--trajectory", type=int, help="One trajectory: its text, versions, logprobs and reward.")
@click.option("--at-step", type=int, help="The store as it was when this training step was committed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(run: str, trajectory: int | None, at_step: int | None, as_json: bool) -> None:
    """A run's steps, or one trajectory."""
    from stores.errors import ConfigError
    from stores.trajectory import TrajectoryId

    store = _open(Path(run), at_step)
    if trajectory is None:
        _show_steps(store, as_json)
        return
    row = store.get(TrajectoryId(trajectory))
    if row is None:
        raise ConfigError(f"{run}: no stored trajectory {trajectory}; it was never started or is still in flight")
    t = row.trajectory
    text = _decoder(Path(run))
    value = {
        "trajectory": t.id,
        "group": t.group,
        "fate": row.fate.value,
        "reason": row.reason.value,
        "step": row.step,
        "v_traj": t.v_traj,
        "staleness": row.staleness,
        "finish": t.finish.value,
        "reward": t.reward,
        "reward_parts": t.reward_parts,
        "error": t.error,
        "advantage": row.advantage,
        "timings": dataclasses.asdict(t.timings),
        "prompt": text(t.prompt_tokens.tolist()),
        "response": text(t.response_tokens.tolist()),
        "segments": [
            {
                "version": s.version,
                "instance": s.instance,
                "tokens": s.tokens.tolist(),
                "logprobs": [round(float(x), 6) for x in s.logprobs],
                "text": text(s.tokens.tolist()),
            }
            for s in t.segments
        ],
    }
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return
    for key in (
        "trajectory",
        "group",
        "fate",
        "reason",
        "step",
        "v_traj",
        "staleness",
        "finish",
        "reward",
        "advantage",
    ):
        click.echo(f"{key:<10} {value[key]}")
    if t.error:
        click.echo(f"error      {t.error}")
    click.echo(f"prompt     {value['prompt']}")
    for segment in t.segments:
        click.echo(f"v{segment.version:<4} {segment.instance:<10} {text(segment.tokens.tolist())}")


@command.command("audit")
@click.argument("run", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit(run: str, as_json: bool) -> None:
    """Prove the bound, single consumption and conservation from the stored data alone. Exit code 1 if it fails."""
    from stores.audit import audit as audit_store

    store = _open(Path(run))
    result = audit_store(store)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(result), "clean": result.clean}, indent=2))
    else:
        click.echo(
            f"{run}: {result.num_steps} steps, {result.num_trajectories} trajectories, largest staleness "
            f"{result.max_staleness} (bound {store.header.eta})"
        )
        for check in result.checks:
            found = [f for f in result.findings if f.check == check]
            click.echo(f"  {check:<13} {'holds' if not found else f'BROKEN, {len(found)} findings'}")
            for finding in found[:10]:
                click.echo(f"      {finding.where}: {finding.what}")
    if not result.clean:
        sys.exit(1)


@command.command("reprocess")
@click.argument("run", type=click.Path())
@click.option("--reward", required=True, help="task, math_verify, path/to/file.py:name, or module:name.")
@click.option("--branch", required=True, help="Name of the branch that gets the new rewards.")
@click.option("--workers", default=2, show_default=True, help="Local processes, unless a cluster is named.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_options
def reprocess(run: str, reward: str, branch: str, workers: int, as_json: bool, where: Where) -> None:
    """Score the stored responses again, with Dask, onto a branch. Exit code 1 if the reward function failed on some."""
    import os

    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from pipeline import reprocessing
    from pipeline.runs import only_here

    store = _open(Path(run))
    del store
    with only_here(Path(run)), where.workers(workers) as client, _progress("scored", quiet=as_json) as progress:
        result = reprocessing.reprocess(Path(run), reward, branch, client, progress)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        click.echo(
            f"branch {branch}: {result.scored} responses of {result.rows} trajectories scored, mean reward of what was "
            f"trained on {result.mean_before:.3f} -> {result.mean_after:.3f}"
        )
        for trajectory, error in sorted(result.errors.items())[:10]:
            click.echo(f"  trajectory {trajectory}: {error}")
        if result.errors:
            click.echo(f"  {len(result.errors)} responses could not be scored; the rest is stored")
        click.echo(f"look: staleflow store diff {run} main {branch}")
    if result.errors:
        sys.exit(1)


@command.command("diff")
@click.argument("run", type=click.Path())
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(run: str, first: str, second: str, as_json: bool) -> None:
    """What two branches' rewards have made of the same trajectories."""
    from pipeline import reprocessing

    _open(Path(run))
    result = reprocessing.difference(Path(run), first, second)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    click.echo(
        f"{result.trajectories} trajectories trained on: {result.changed} rewards differ, mean {result.mean[0]:.3f} in "
        f"{first}, {result.mean[1]:.3f} in {second}"
    )
    widest = max((max(m, n) for _, m, n in result.histogram), default=1)
    for edge, m, n in result.histogram:
        click.echo(
            f"  from {edge:7.3f}  {m:7} {'#' * round(20 * m / widest):<20}  {n:7} {'#' * round(20 * n / widest)}"
        )
    for what, groups in (
        ("order of members flipped", result.flipped),
        (f"signal in {second} only", result.gained),
        (f"signal in {first} only", result.lost),
    ):
        some = ", ".join(map(str, groups[:8])) + (", ..." if len(groups) > 8 else "")
        click.echo(f"  {len(groups):6} of {result.groups} groups: {what}{f' ({some})' if groups else ''}")


@contextlib.contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _open(run: Path, at_step: int | None = None) -> VersionedStore:
    """A run's store, given its folder."""
    from stores.errors import ConfigError
    from stores.versioned import VersionedStore

    if not run.is_dir():
        raise ConfigError(f"{run}: no such run; `staleflow store ls` lists the ones there are")
    return VersionedStore.open(run / "store", at_step)


def _show_steps(store: VersionedStore, as_json: bool) -> None:
    from stores.base import record_to_json

    records = store.steps()
    if as_json:
        click.echo(json.dumps([record_to_json(r) for r in records], indent=2))
        return
    header = store.header
    click.echo(
        f"{header.run}: {header.groups_per_step} groups of {header.group_size} a step, staleness bound {header.eta}"
    )
    for record in records:
        m = record.metrics
        ended = ", ".join(f"{n} {k.removesuffix(':none')}" for k, n in record.ledger.num_ended.items())
        figures = ""
        if record.kind == "step":
            figures = (
                f"reward {m['reward']:.3f}  length {m['response_mean']:.1f}  staleness {m['staleness_mean']:.2f}  "
                f"loss {m['loss']:+.4f}  "
            )
        click.echo(f"{record.kind:<4} {record.step:>4}  {figures}{ended}, {record.ledger.num_live} in flight")


def _decoder(run: Path) -> Any:
    """Token ids to text with the run's tokenizer, or the ids themselves if it is gone."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from pipeline import config as configuration

    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(configuration.load(run / "config.toml").model.path)
    except (OSError, ValueError):
        return lambda tokens: " ".join(map(str, tokens))
    return tokenizer.decode

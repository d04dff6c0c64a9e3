"""staleflow store show RUN: a run's steps, a step's batch, or readable trajectories."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli.stored import print_json, quiet_libraries
from staleflow.stores.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

    from staleflow.pipeline.api.stored_run import Run
    from staleflow.pipeline.stored_runs.response_texts import MessageSpan
    from staleflow.pipeline.stored_runs.stored_trajectories import ConsumedBatch, StoredTrajectory
    from staleflow.pipeline.stored_runs.views import Order, TrajectoryView

VERSION_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""Styles of the versions in a trajectory, oldest first, repeated if there are more."""
RATIO_STYLES = (
    (0.5, "bold blue"), (0.8, "blue"), (0.95, "bright_blue"), (1.05, ""), (1.25, "bright_red"), (2.0, "red"),
    (float("inf"), "bold red"),
)  # fmt: skip
"""Upper limits of the importance ratio, with the style of tokens below them."""


@click.command("show")
@click.argument("run", type=click.Path())
@click.option("--trajectory", type=int, help="The trajectory with this id.")
@click.option("--worst", type=click.IntRange(1), metavar="N", help="The N trajectories with the lowest reward.")
@click.option("--best", type=click.IntRange(1), metavar="N", help="The N trajectories with the highest reward.")
@click.option(
    "--longest", type=click.IntRange(1), metavar="N", help="The N trajectories with the most response tokens."
)
@click.option(
    "--where", "selection", default="", metavar="EXPR",
    help='Only trajectories that match, such as "staleness == 1"; the 3 worst unless an order is given.',
)  # fmt: skip
@click.option("--at-step", type=int, help="The batch of this training step, from the store as of that step.")
@click.option("--branch", default="main", show_default=True, help="Branch whose rewards or logprobs to use.")
@click.option("--model", default="", help="Checkpoint folder or hub name: colour tokens by importance ratio under it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    run: str,
    trajectory: int | None,
    worst: int | None,
    best: int | None,
    longest: int | None,
    selection: str,
    at_step: int | None,
    branch: str,
    model: str,
    as_json: bool,
) -> None:
    """Show a run's steps; with --at-step the batch of one step; or trajectories, with tokens coloured by the policy
    version that sampled them or by importance ratio."""
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.stores.errors import ConfigError

    counts: tuple[tuple[Order, int | None], ...] = (("worst", worst), ("best", best), ("longest", longest))
    orders = {order: count for order, count in counts if count is not None}
    if (selection or model) and not orders and trajectory is None:
        orders = {"worst": 3}
    if selection and trajectory is not None:
        raise ConfigError("--where has no effect with --trajectory; leave it out")
    if len(orders) + (trajectory is not None) > 1:
        raise ConfigError("give only one of --trajectory, --worst, --best and --longest")
    stored_run = open_run(run, branch=branch, at_step=at_step)
    if orders or trajectory is not None:
        ids = [] if trajectory is None else [trajectory]
        for order, count in orders.items():
            ids = stored_run.sorted_ids(order, count, selection, step=at_step)
        show_trajectories(stored_run, ids, model, as_json)
    elif at_step is None:
        show_steps(stored_run, as_json)
    elif not show_batch(stored_run.batch(at_step), as_json):
        sys.exit(1)


def show_trajectories(run: Run, ids: list[int], model: str, as_json: bool) -> None:
    """Print trajectories to the terminal or as JSON."""
    quiet_libraries()
    views = run.view(ids, model=model)
    if as_json:
        print_json([_to_plain(view) for view in views])
    elif not views:
        click.echo("no trajectory matches")
    for view in views if not as_json else ():
        print_trajectory(view)


def _to_plain(view: TrajectoryView) -> dict[str, Any]:
    value = dataclasses.asdict(view)
    return {**value.pop("facts"), **value}


def show_steps(run: Run, as_json: bool) -> None:
    """Print one line per commit."""
    from staleflow.stores.metrics import REWARD_PART_PREFIX

    commits = run.commits()
    if as_json:
        print_json(commits)
        return
    batch = run.job.batch
    click.echo(f"{run.name}: {batch.groups_per_step} groups of {batch.group_size} per step, {run.bound}")
    if derived_branches := run.branches[1:]:
        click.echo(f"other branches: {', '.join(derived_branches)}")
    for commit in commits:
        metrics = commit.metrics
        outcomes = ", ".join(f"{n} {k.removesuffix(':none')}" for k, n in commit.ledger.num_ended.items())
        figures = ""
        if commit.kind == "step":
            reward_parts = {
                name.removeprefix(REWARD_PART_PREFIX): metrics[name]
                for name in metrics
                if name.startswith(REWARD_PART_PREFIX)
            }
            parts = "".join(f"{printable(name, 100)} {value:.3f}  " for name, value in reward_parts.items())
            turns = f"turns {metrics['turns_mean']:.1f}  " if metrics.get("turns_max", 0.0) > 1 else ""
            figures = (
                f"reward {metrics['reward']:.3f}  {parts}length {metrics['response_mean']:.1f}  {turns}"
                f"staleness {metrics['staleness_mean']:.2f}  loss {metrics['loss']:+.4f}  "
            )
        click.echo(f"{commit.kind:<4} {commit.step:>4}  {figures}{outcomes}, {commit.ledger.num_live} in flight")


def show_batch(batch: ConsumedBatch, as_json: bool) -> bool:
    """Print a step's batch in training order. Returns whether it equals the batch that the trainer received."""
    rows = [_trajectory_facts(trajectory) for trajectory in batch.trajectories]
    if as_json:
        value = {
            "step": batch.record.step,
            "recorded_fingerprint": batch.record.batch_fingerprint,
            "fingerprint": batch.fingerprint,
            "metrics": batch.record.metrics,
            "trajectories": rows,
        }
        print_json(value)
        return batch.is_intact
    click.echo(
        f"step {batch.record.step}: {len(rows)} trajectories; "
        + (
            f"as the trainer received them, bit for bit ({batch.fingerprint})"
            if batch.is_intact
            else f"NOT what the trainer received: {batch.fingerprint}"
        )
    )
    click.echo(f"{'trajectory':>10} {'group':>7} {'v_traj':>6} {'staleness':>9} {'tokens':>6} {'reward':>8} advantage")
    for value in rows:
        click.echo(
            f"{value['trajectory']:10} {value['group']:7} {value['v_traj']:6} {value['staleness']:9} "
            f"{value['response_tokens']:6} {value['reward']:8.3f} {value['advantage']:+9.3f}"
            + (f"  {value['error']}" if value["error"] else "")
        )
    return batch.is_intact


def _trajectory_facts(trajectory: StoredTrajectory) -> dict[str, Any]:
    names = ("group", "v_traj", "staleness", "turns", "reward", "advantage", "error")
    values = {name: getattr(trajectory, name) for name in names}
    return {"trajectory": trajectory.id, **values, "response_tokens": trajectory.num_sampled}


def print_trajectory(view: TrajectoryView) -> None:
    """Print a trajectory: its facts on one line, prompt, response, and the legend of the colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    facts = "  ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in view.facts.items()
    )
    console.print(Text(facts, style="bold"), soft_wrap=True)
    if view.error:
        console.print(Text(f"error: {printable(view.error)}", style="red"), soft_wrap=True)
    if view.reward_parts:
        parts = ", ".join(f"{printable(name, 100)} {value:g}" for name, value in view.reward_parts.items())
        console.print(Text(f"reward parts: {parts}", style="dim"), soft_wrap=True)
    console.print(Text.assemble(("prompt   ", "dim"), printable(view.prompt)), soft_wrap=True)
    if len(view.message_spans) <= 1:
        console.print(Text.assemble(("response ", "dim"), colour_tokens(view)), soft_wrap=True)
    for span in view.message_spans if len(view.message_spans) > 1 else ():
        console.print(speaker_line(span), soft_wrap=True)
        console.print(colour_tokens(view, span.start, span.stop), soft_wrap=True)
    console.print(colour_legend(view), soft_wrap=True)
    console.print()


def speaker_line(span: MessageSpan) -> Text:
    """Name the speaker of a message span, and the seconds that an environment took for it."""
    from rich.text import Text

    seconds = f", {span.seconds:.2f} s" if span.seconds else ""
    return Text(f"{printable(span.role)} ({span.stop - span.start} tokens{seconds})", style="dim")


def colour_tokens(view: TrajectoryView, start: int = 0, stop: int | None = None) -> Text:
    """Colour the tokens of the response at start <= i < stop; tokens of environments are dim."""
    from rich.text import Text

    versions = _versions(view)
    text = Text()
    for token in view.tokens[start:stop]:
        if token.version < 0:
            style = "dim"
        elif token.ratio is None:
            style = VERSION_STYLES[versions.index(token.version) % len(VERSION_STYLES)]
        else:
            style = next(style for limit, style in RATIO_STYLES if token.ratio < limit or limit == float("inf"))
        text.append(printable(token.text), style=style)
    return text


def colour_legend(view: TrajectoryView) -> Text:
    """Describe the colours, and the instances that sampled each version."""
    from rich.text import Text

    text = Text("         ", style="dim")
    if any(token.ratio is not None for token in view.tokens):
        text.append("importance ratio: ")
        for limit, style in RATIO_STYLES:
            text.append(f"< {limit:g} " if limit != float("inf") else ">= 2 ", style=style)
        return text
    for i, version in enumerate(_versions(view)):
        instances = ", ".join(dict.fromkeys(t.instance for t in view.tokens if t.version == version))
        count = sum(t.version == version for t in view.tokens)
        text.append(f"v{version}", style=VERSION_STYLES[i % len(VERSION_STYLES)])
        text.append(f" {count} tokens on {instances}  ")
    return text


def _versions(view: TrajectoryView) -> list[int]:
    """Return the versions that sampled tokens, oldest first."""
    return sorted({t.version for t in view.tokens if t.version >= 0})

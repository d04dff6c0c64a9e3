"""staleflow replay RUN"""

from __future__ import annotations

import dataclasses
import json
import sys

import click


@click.command("replay")
@click.argument("run", type=click.Path())
@click.option("--trajectory", "trajectory", type=int, help="Print the events of this trajectory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str, trajectory: int | None, as_json: bool) -> None:
    """Replay a run's recorded events in a new coordinator, which must decide exactly the recorded commands.

    Exit code 1 if it does not, or if the store holds more than the journal covers."""
    from staleflow.pipeline.api.stored_run import open_run

    result = open_run(run).replay(trajectory)
    if as_json:
        value = dataclasses.asdict(result)
        value = {"events": value.pop("num_events"), "commands": value.pop("num_commands"), **value}
        click.echo(json.dumps(value, indent=2))
    else:
        for line in result.story:
            click.echo(line)
        if result.truncated_journals:
            click.echo(result.truncated_journals)
        verdict = "the same commands"
        if result.difference:
            verdict = f"DIFFER: {result.difference}"
        elif result.missing_events:
            verdict = f"the same commands, but INCOMPLETE: {result.missing_events}"
        click.echo(f"{result.num_events} events, {result.num_commands} commands: {verdict}")
    if result.difference or result.missing_events:
        sys.exit(1)

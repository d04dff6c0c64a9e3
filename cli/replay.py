"""staleflow replay RUN"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command("replay")
@click.argument("run", type=click.Path())
@click.option("--story", "trajectory", type=int, help="Tell this trajectory's life, event by event.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str, trajectory: int | None, as_json: bool) -> None:
    """Feed a run's recorded events to a fresh coordinator: it must answer with exactly the recorded commands."""
    from pipeline.config.deciding import make_coordinator
    from pipeline.coordination import journal
    from pipeline.runtime.resumption import parts
    from pipeline.runtime.run_folder import load_job
    from stores.errors import ConfigError
    from stores.trajectory import TrajectoryId

    folder = Path(run)
    if not (folder / "events.jsonl").is_file():
        raise ConfigError(f"{run}: no recorded events here; `staleflow store ls` lists the runs there are")
    story: list[str] = []
    result = journal.Replay(num_events=0, num_commands=0, difference="")
    for config, events in parts(folder):
        coordinator = make_coordinator(load_job(folder, file=config.name))
        result += journal.replay(coordinator, journal.read(events))
        if trajectory is not None:
            story += coordinator.story(TrajectoryId(trajectory))
    if as_json:
        value = {"events": result.num_events, "commands": result.num_commands, "difference": result.difference}
        click.echo(json.dumps({**value, "story": story}, indent=2))
    else:
        for line in story:
            click.echo(line)
        verdict = f"DIFFER: {result.difference}" if result.difference else "the same commands"
        click.echo(f"{result.num_events} events, {result.num_commands} commands: {verdict}")
    if result.difference:
        sys.exit(1)

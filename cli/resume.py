"""staleflow resume RUN"""

from __future__ import annotations

from pathlib import Path

import click

from cli.run import carry_out


@click.command("resume")
@click.argument("run", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Where and how long: cluster, steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens.")
def command(run: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Go on with a run that was stopped, killed, or is to train further, from its newest resume point."""
    from pipeline import resumption

    carry_out(resumption.load(Path(run), overrides), as_json=as_json, verbose=verbose, resume=True)

"""staleflow config explain CONFIG"""

from __future__ import annotations

import dataclasses
import json

import click


@click.group("config")
def command() -> None:
    """What a job file means."""


@command.command("explain")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(config_path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Every value, its meaning and limits, and the derived numbers."""
    from pipeline.config import loading, schema

    rows = schema.explain(loading.load(config_path, overrides))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) for r in rows], indent=2))
        return
    width = max(len(r.key) for r in rows)
    for row in rows:
        mark = "=" if row.limits == "derived" else ("*" if row.value != row.default else " ")
        limits = f" [{row.limits}]" if row.limits and row.limits != "derived" else ""
        click.echo(f"{mark} {row.key:<{width}}  {row.value!s:<24} {row.doc}{limits}")
    click.echo("\n* set by the file, = derived")

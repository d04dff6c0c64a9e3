"""staleflow config explain CONFIG, staleflow config schema"""

from __future__ import annotations

import dataclasses
import json

import click


@click.group("config")
def command() -> None:
    """Explain a job file, or print the schema of job files."""


@command.command("explain")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(config_path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value with its meaning and limits, and the derived numbers."""
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


@command.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job files. Editors check and complete a file whose first line is `#:schema PATH`."""
    from pipeline.config.json_schema import json_schema
    from pipeline.config.schema import RunConfig

    click.echo(json.dumps(json_schema(RunConfig), indent=2))

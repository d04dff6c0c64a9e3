"""staleflow config explain CONFIG, staleflow config schema"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from staleflow.cli.job import check_and_print

if TYPE_CHECKING:
    from staleflow.pipeline.config.knob_tree import ExplainedValue


@click.group("config")
def command() -> None:
    """Explain a job file, or print the schema of job files."""


@command.command("explain")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--gpus", default="", metavar="GPUS", help="Print the memory plan on GPUs such as 8xH100-80 instead.")
@click.option("--check/--no-check", default=True, help="Also check the files, model, data and reward it names.")
def explain(config_path: str, overrides: tuple[str, ...], as_json: bool, gpus: str, check: bool) -> None:
    """Print every value with its meaning and limits, and the derived numbers; then check what the job names, as `run`
    does before it starts anything. With --gpus, print what a rank of the trainer and an instance need of a GPU, and
    where they would be placed; exit code 2 if they do not fit."""
    from staleflow.pipeline.config import loading, preflight, user_files
    from staleflow.pipeline.config.schema import explain_config

    if gpus and as_json:
        raise click.UsageError("--gpus prints a table; it cannot be combined with --json")
    config = loading.load(config_path, overrides)
    if gpus:
        from staleflow.pipeline.config.size_plan import explain_plan
        from staleflow.pipeline.placement.devices import parse_fleet

        text, fits = explain_plan(config, parse_fleet(gpus))
        click.echo(text)
        if not fits:
            sys.exit(2)
        return
    print_values(explain_config(config), as_json=as_json)
    if check:
        preflight.check_names(config)
        if check_and_print(user_files.with_absolute_paths(config)) and config.has_texts:
            click.echo("checked: the files, model, data and reward that it names can be used", err=True)


def print_values(rows: Sequence[ExplainedValue], *, as_json: bool) -> None:
    """Print explained values as a table, or as JSON."""
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) for r in rows], indent=2, default=str))  # dates of TOML
        return
    width = max(len(r.key) for r in rows)
    for row in rows:
        mark = "=" if row.limits == "derived" else ("*" if row.value != row.default else " ")
        limits = f" [{row.limits}]" if row.limits and row.limits != "derived" else ""
        click.echo(f"{mark} {row.key:<{width}}  {row.value!s:<24} {row.doc}{limits}")
    click.echo("\n* differs from the default, = derived")


@command.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job files. Editors check and complete a file whose first line is `#:schema PATH`."""
    from staleflow.pipeline.config.knob_tree import json_schema
    from staleflow.pipeline.config.schema import RunConfig

    click.echo(json.dumps(json_schema(RunConfig), indent=2))

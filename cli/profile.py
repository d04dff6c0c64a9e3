"""staleflow profile CONFIG|RUN"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.output import claim_folder

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.profiling.measure import Profile


@click.command("profile")
@click.argument("source", metavar="CONFIG|RUN", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--out", type=click.Path(), help="The file to write; profiles/NAME.json by default.")
@click.option(
    "--steps", type=click.IntRange(4), default=40, show_default=True, help="Decode steps a batch is timed for."
)
@click.option("--max-running", type=click.IntRange(1), help="Largest batch; rollout.engine.max_running by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
def command(
    source: str, overrides: tuple[str, ...], out: str | None, steps: int, max_running: int | None, as_json: bool
) -> None:
    """Fit the cost model that routing and simulate go by.

    CONFIG: measure the job's engine, alone on this machine. RUN: the folder of a finished run; take what it measured
    while engine, trainer and all the rest shared their machines, with the latencies of everything but decoding.
    """
    from pipeline.config import loading
    from pipeline.profiling import measure as profiling

    if Path(source).is_dir():
        profile = profiling.profile_run(Path(source))
        path = claimed(out, Path(source).resolve().name)
    else:
        config = loading.load(source, overrides)
        path = claimed(out, config.name)
        profile = measured(config, steps, max_running, quiet=as_json)
    profiling.write_profile(path, profile)
    if as_json:
        click.echo(json.dumps({**profile.as_dict(), "path": str(path)}, indent=2))
    else:
        say(profile, path)


def claimed(out: str | None, name: str) -> Path:
    """Where the profile goes."""
    path = Path(out or f"profiles/{name}.json")
    claim_folder(path.parent, "--out")
    return path


def measured(config: RunConfig, steps: int, max_running: int | None, *, quiet: bool) -> Profile:
    """Build the job's engine in this process and time it."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from pipeline.config import actor_settings
    from pipeline.config.model_facts import inspect_model
    from pipeline.profiling import measure as profiling
    from stores.trajectory import InstanceId

    facts = inspect_model(config)
    rollout = config.rollout
    longest = min(rollout.engine.kv_tokens, facts.context) - steps - 16
    most = min(max_running or rollout.engine.max_running, rollout.engine.max_running)
    # No id ends a response here: a batch must stay whole while it is timed.
    engine = actor_settings.engine_settings(config, 0, ()).build(InstanceId("profile"), config.cluster.threads)
    try:
        grid = profiling.make_grid(most, max(8, min(longest, 4 * rollout.max_new_tokens)), steps)
        progress = (lambda _: None) if quiet else (lambda what: click.echo(f"  {what}", err=True))
        fit, points = profiling.profile_engine(engine, grid, rollout.engine.kv_tokens, progress)
    finally:
        engine.close()
    return profiling.Profile(source=rollout.engine.name, fit=fit, hardware=profiling.hardware(), points=tuple(points))


def say(profile: Profile, path: Path) -> None:
    """The numbers, how far to trust them, and how to use them."""
    stored, fit = profile.as_dict(), profile.fit
    for name, value in {**stored["coefficients"], **stored["latencies"]}.items():
        click.echo(f"  {name:8} {value:.4g} s")
    click.echo(
        f"{fit.num_points} steps timed, {fit.running[0]} to {fit.running[1]} running, up to {fit.kv_tokens[1]:,.0f} KV "
        f"tokens; on steps kept from the fit it is off by {fit.error_median:.1%} (median), {fit.error_p90:.1%} (90 %)"
    )
    click.echo(f'{path}: use it with --set profile="{path}"')

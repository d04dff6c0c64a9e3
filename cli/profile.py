"""staleflow profile CONFIG"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command("profile")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--out", type=click.Path(), help="The file to write; profiles/NAME.json by default.")
@click.option(
    "--steps", type=click.IntRange(4), default=40, show_default=True, help="Decode steps a batch is timed for."
)
@click.option("--max-running", type=click.IntRange(1), help="Largest batch; rollout.engine.max_running by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
def command(
    config_path: str, overrides: tuple[str, ...], out: str | None, steps: int, max_running: int | None, as_json: bool
) -> None:
    """Measure the job's engine on this machine and fit the cost model that routing and simulate go by."""
    import os

    from pipeline import config as configuration

    config = configuration.load(config_path, overrides)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from pipeline import build, profiling
    from pipeline.model_files import inspect_model
    from stores.trajectory import InstanceId

    facts = inspect_model(config)
    rollout = config.rollout
    longest = min(rollout.engine.kv_tokens, facts.context) - steps - 16
    most = min(max_running or rollout.engine.max_running, rollout.engine.max_running)
    # No id ends a response here: a batch must stay whole while it is timed.
    engine = build.engine_settings(config, 0, ()).build(InstanceId("profile"), config.cluster.threads)
    try:
        grid = profiling.make_grid(most, max(8, min(longest, 4 * rollout.max_new_tokens)), steps)
        say = (lambda _: None) if as_json else (lambda what: click.echo(f"  {what}", err=True))
        fit, points = profiling.profile_engine(engine, grid, rollout.engine.kv_tokens, say)
    finally:
        engine.close()
    path = Path(out or f"profiles/{config.name}.json")
    profiling.write_profile(path, fit, points, rollout.engine.name)
    if as_json:
        click.echo(json.dumps(asdict(fit) | {"path": str(path)}, indent=2))
        return
    for name, value in asdict(fit.model).items():
        click.echo(f"  {name:8} {value:.4g} s")
    click.echo(
        f"{fit.num_points} steps timed, {fit.running[0]} to {fit.running[1]} running, up to {fit.kv_tokens[1]:,.0f} KV "
        f"tokens; on steps kept from the fit it is off by {fit.error_median:.1%} (median), {fit.error_p90:.1%} (90 %)"
    )
    click.echo(f'{path}: use it with --set rollout.cost.profile="{path}"')

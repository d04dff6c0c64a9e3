"""staleflow profile CONFIG|RUN"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from staleflow.pipeline.profiling.engine_profile import Profile


@click.command("profile")
@click.argument("source", metavar="CONFIG|RUN", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--out", type=click.Path(), help="Output file; profiles/NAME.json by default.")
@click.option("--steps", type=click.IntRange(4), default=40, show_default=True, help="Decode steps timed per batch.")
@click.option("--max-running", type=click.IntRange(1), help="Largest batch; rollout.engine.max_running by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
def command(
    source: str, overrides: tuple[str, ...], out: str | None, steps: int, max_running: int | None, as_json: bool
) -> None:
    """Fit the cost model that strategies and simulations use.

    CONFIG: measure the job's engine alone on this machine. RUN: folder of a finished run; use what it measured under
    real load, including the latencies of everything but decoding; written to profiles/NAME-run.json.
    """
    from staleflow.pipeline.config import loading
    from staleflow.pipeline.processes import local_cluster
    from staleflow.pipeline.profiling import engine_profile as profiling
    from staleflow.pipeline.recovery.run_folder import require_run

    if Path(source).is_dir():
        require_run(Path(source))
        profile = profiling.profile_run(Path(source))
        path = output_path(out, f"{Path(source).resolve().name}-run")
    else:
        config = loading.load(source, overrides)
        path = output_path(out, config.name)
        local_cluster.set_process_environment(config.cluster.threads)
        from staleflow.pipeline.profiling.engine_measurement import measure_engine

        progress = (lambda _: None) if as_json else (lambda line: click.echo(f"  {line}", err=True))
        profile = measure_engine(config, steps, max_running, progress)
    profiling.write_profile(path, profile)
    if as_json:
        click.echo(json.dumps({**profile.as_dict(), "path": str(path)}, indent=2))
    else:
        print_profile(profile, path)


def output_path(out: str | None, name: str) -> Path:
    """Path of the profile; its folder is created. Raises ConfigError."""
    from staleflow.stores.files import claim_folder

    path = Path(out or f"profiles/{name}.json")
    claim_folder(path.parent, "--out")
    return path


def print_profile(profile: Profile, path: Path) -> None:
    """Print the coefficients, their errors and how to use them."""
    from staleflow.pipeline.profiling.fit import fit_verify_share

    stored, fit = profile.as_dict(), profile.fit
    coefficients = stored["coefficients"]
    verified = coefficients.pop("verify_share")
    for name, value in {**coefficients, **stored["latencies"]}.items():
        click.echo(f"  {name:8} {value:.4g} s")
    if profile.drafted:
        steps, max_drafted = len(profile.drafted), max(point.drafted for point in profile.drafted)
        _, error = fit_verify_share(fit.model, profile.drafted)
        click.echo(
            f"  verifying a drafted token costs {verified:.4g} of k3 ({steps} batches, up to {max_drafted:.1f} drafts; "
            f"median error of their steps {error:.1%})"
        )
    if (acceptance := stored["acceptance_rate"]) is not None:
        click.echo(f"  acceptance {acceptance:.3g} of drafted tokens, as if each request drafted all that it might")
    click.echo(
        f"{fit.num_points} steps timed, {fit.running[0]} to {fit.running[1]} running, up to {fit.kv_tokens[1]:,.0f} KV "
        f"tokens; on steps left out of the fit the error is {fit.error_median:.1%} (median), {fit.error_p90:.1%} (90 %)"
    )
    click.echo(f'{path}: use it with --set profile="{path}"')

"""staleflow profile RUN"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from staleflow.pipeline.profiling.run_profile import Profile


@click.command("profile")
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--out", type=click.Path(), help="Output file; profiles/NAME-run.json by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str, out: str | None, as_json: bool) -> None:
    """Fit the cost model that strategies and simulations use to a finished run, with the latencies of everything but
    decoding. RUN: its folder; some ten steps are enough."""
    from staleflow.pipeline.profiling.run_profile import profile_run, write_profile
    from staleflow.pipeline.recovery.run_folder import require_run
    from staleflow.stores.files import require_writable_folder

    require_run(Path(run))
    path = Path(out or f"profiles/{Path(run).resolve().name}-run.json")
    require_writable_folder(path.parent, "--out")
    profile = profile_run(Path(run))
    write_profile(path, profile)
    if as_json:
        click.echo(json.dumps({**profile.as_dict(), "path": str(path)}, indent=2))
    else:
        print_profile(profile, path)


def print_profile(profile: Profile, path: Path) -> None:
    """Print the coefficients, their errors and how to use them."""
    stored, fit = profile.as_dict(), profile.fit
    coefficients = stored["coefficients"]
    coefficients.pop("verify_share")
    for name, value in {**coefficients, **stored["latencies"]}.items():
        click.echo(f"  {name:8} {value:.4g} s")
    if (acceptance := stored["acceptance_rate"]) is not None:
        click.echo(f"  acceptance {acceptance:.3g} of drafted tokens, as if each request drafted all that it might")
    click.echo(
        f"{fit.num_points} steps timed, {fit.running[0]} to {fit.running[1]} running, up to {fit.kv_tokens[1]:,.0f} KV "
        f"tokens; on steps left out of the fit the error is {fit.error_median:.1%} (median), {fit.error_p90:.1%} (90 %)"
    )
    click.echo(f'{path}: use it with --set profile="{path}"')

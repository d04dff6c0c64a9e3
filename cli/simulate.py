"""staleflow simulate | plan | profile"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli.stored import print_table

if TYPE_CHECKING:
    from staleflow.pipeline.api.job_loading import Job
    from staleflow.pipeline.profiling.run_profile import Profile
    from staleflow.pipeline.simulator.analysis import SimulationStats


@click.command("simulate")
@click.argument("config_path", metavar="[CONFIG]", type=click.Path(), default="")
@click.option(
    "--from",
    "run",
    default="",
    metavar="RUN",
    help="In place of CONFIG: a stored run's job, with its responses and measured times.",
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option(
    "--sweep", "sweeps", metavar="KEY=V1,V2", multiple=True, help="One row per value; several sweeps: all combinations."
)
@click.option(
    "--baselines",
    is_flag=True,
    help="Add a row for each other system's admission rule, at the same staleness bound.",
)
@click.option("--explain", is_flag=True, help="Show where the time goes, compared with the lower bound on step time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no table.")
def simulate(
    config_path: str,
    run: str,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    baselines: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Run a job in virtual time: how long it would take, without using a GPU.

    With --from, vary a stored run: responses are those it stored, decode steps and latencies those it measured, as in
    `simulate --from RUN --set staleness.eta=2`.
    """
    from rich.progress import track

    from staleflow.pipeline.api import simulating
    from staleflow.pipeline.api.job_loading import load_job
    from staleflow.pipeline.recovery.run_folder import load_job as load_stored_job
    from staleflow.stores.errors import ConfigError

    if bool(config_path) == bool(run):
        raise ConfigError("give a job file or --from RUN")
    values_by_key = parse_sweeps(sweeps, overrides)
    load: Callable[[tuple[str, ...]], Job] = partial(load_job, config_path)
    note = ""
    if run:
        recorded_overrides, note = simulating.recorded_overrides(Path(run))
        load, overrides = partial(load_stored_job, Path(run)), (*recorded_overrides, *overrides)
    variants = simulating.make_variants(load, overrides, values_by_key, baselines)
    is_quiet, simulations = as_json or len(variants) == 1, simulating.simulate_variants(variants)
    results = list(track(simulations, "simulating", len(variants), transient=True, disable=is_quiet))
    if not as_json and (note := note or simulating.describe_assumptions(variants[0].job)):
        click.echo(note, err=True)  # printed last, so that an error is one line
    if as_json:
        click.echo(json.dumps([result.as_dict() for result in results], indent=2))
        return
    print_results([(result.label, result.stats) for result in results])
    if explain:
        for result in results:
            click.echo(f"\n{result.label}")
            click.echo("\n".join(f"  {line}" for line in result.explanation()))


def parse_sweeps(sweeps: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, list[str]]:
    """Parse the values to sweep, by key. Raises ConfigError, also if a key is swept twice, or swept and set, since one
    of the values would be ignored."""
    from staleflow.stores.errors import ConfigError

    values_by_key: dict[str, list[str]] = {}
    options = {override.partition("=")[0]: f"--set {override}" for override in overrides}
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not key or not equals or not values:
            raise ConfigError(f"--sweep {sweep}: expected key=value1,value2, such as staleness.eta=0,1,2,3")
        if key in options:
            raise ConfigError(f"--sweep {sweep}: {options[key]} gives {key} too; name each key once")
        options[key] = f"--sweep {sweep}"
        values_by_key[key] = values.split(",")
    return values_by_key


def print_results(results: list[tuple[str, SimulationStats]]) -> None:
    """Print a table with a row for each variant; ratios are to the first."""
    figures = ["tokens/s", "ratio", "s/step", "of roofline", "trainer idle", "rollout idle"]
    columns = ["", *figures, "staleness 0, 1, ...", "dropped", "recomputed"]
    cells = []
    baseline_tokens_per_s = results[0][1].steady_tokens_per_s
    for label, stats in results:
        total = sum(stats.staleness.values()) or 1
        shares = [stats.staleness.get(k, 0) / total for k in range(max(stats.staleness, default=0) + 1)]
        histogram = " ".join(f"{s:.0%}" for s in shares[:8]) + (" ..." if len(shares) > 8 else "")
        row = (
            label,
            f"{stats.steady_tokens_per_s:,.0f}",
            f"{stats.steady_tokens_per_s / baseline_tokens_per_s:.2f}",
            f"{stats.step_s:.1f}",
            f"{stats.share_of_step_time_bound:.0%}",
            f"{stats.trainer_idle_share:.0%}",
            f"{stats.rollout_idle_share:.0%}",
            histogram + ("" if stats.bound_kept else "  (bound not kept)"),
            ", ".join(f"{n} {reason}" for reason, n in stats.dropped.items()) or "-",
            f"{stats.reprefilled_tokens / 1e6:.1f} M",
        )
        cells.append(row)
    print_table(columns, cells, left=(0, 7, 8))


@click.command("plan")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--from", "run", default="", metavar="RUN", help="Use the measured times of this finished run.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(config_path: str, run: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Forecast a run from the times of its profile or of a similar run: seconds per step, tokens per second, lag, total
    time and tokens, each with a 90 % interval. The run compares them with what it measures."""
    from staleflow.pipeline.api import planning
    from staleflow.pipeline.recovery.run_folder import CODEC

    forecast = planning.plan(config_path, measured_in=Path(run) if run else None, overrides=overrides)
    click.echo(json.dumps(CODEC.encode(forecast), indent=2) if as_json else "\n".join(forecast.lines))


@click.command("profile")
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--out", type=click.Path(), help="Output file; profiles/NAME-run.json by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(run: str, out: str | None, as_json: bool) -> None:
    """Fit the cost model that strategies and simulations use to a finished run, with the latencies of everything but
    decoding. RUN: its folder; some ten steps are enough."""
    from staleflow.pipeline.profiling.run_profile import profile_run, write_profile
    from staleflow.pipeline.recovery.run_folder import require_run
    from staleflow.stores.files import require_writable_folder

    require_run(Path(run))
    path = Path(out or f"profiles/{Path(run).resolve().name}-run.json")
    require_writable_folder(path.parent)
    profile = profile_run(Path(run))
    write_profile(path, profile)
    if as_json:
        click.echo(json.dumps({**profile.as_dict(), "path": str(path)}, indent=2))
    else:
        print_profile(profile, path)


def print_profile(profile: Profile, path: Path) -> None:
    """Print the coefficients, the error of the step times that they give, and how to use them."""
    stored, fit = profile.as_dict(), profile.fit
    coefficients = stored["coefficients"]
    coefficients.pop("verify_share")
    for name, value in {**coefficients, **stored["latencies"]}.items():
        click.echo(f"  {name:8} {value:.4g}" + ("" if name.startswith("straggler") else " s"))
    if (acceptance := stored["acceptance_rate"]) is not None:
        click.echo(f"  acceptance {acceptance:.3g} of drafted tokens, as if each request drafted all that it might")
    click.echo(
        f"{fit.num_points} steps timed, {fit.running_range[0]} to {fit.running_range[1]} running, up to "
        f"{fit.kv_tokens_range[1]:,.0f} KV tokens; on steps left out of the fit the error is {fit.error_median:.1%} "
        f"(median), {fit.error_p90:.1%} (90 %)"
    )
    click.echo(f'{path}: use it with --set profile="{path}"')

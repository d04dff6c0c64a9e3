"""staleflow simulate CONFIG"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from staleflow.pipeline.config.schema import RunConfig
    from staleflow.pipeline.simulator.analysis import Measures
    from staleflow.pipeline.simulator.trace import Trace

BASELINES = (
    ("synchronous", ("staleness.admission=synchronous", "rollout.synchronization=greedy")),
    ("one step ahead", ("staleness.admission=one_step", "rollout.synchronization=greedy")),
    ("credits (ROLL Flash)", ("staleness.admission={{name='credits', alpha={eta}}}", "rollout.synchronization=greedy")),
    ("backlog (AReaL)", ("staleness.admission=backlog", "rollout.synchronization=greedy")),
)
PICTURE_STEPS = 12
"""Most steps in a picture; with more, pulls would be too thin to see."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the job. overrides: `key=value`."""

    label: str
    overrides: tuple[str, ...]


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
@click.option("--baselines", is_flag=True, help="Add a row for each other system's admission rule, at the same bound.")
@click.option("--explain", is_flag=True, help="Show where the time goes, compared with the lower bound on step time.")
@click.option("--out", type=click.Path(), help="Write simulate.json and a picture per row into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no table.")
def command(
    config_path: str,
    run: str,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    baselines: bool,
    explain: bool,
    out: str | None,
    as_json: bool,
) -> None:
    """Run a job in virtual time: how long it would take, without using a GPU.

    With --from, vary a stored run: responses are those it stored, decode steps and latencies those it measured, as in
    `simulate --from RUN --set staleness.eta=2`.
    """
    from staleflow.pipeline.config import loading
    from staleflow.pipeline.recovery.run_folder import load_job
    from staleflow.pipeline.simulator.analysis import explanation
    from staleflow.stores.errors import ConfigError
    from staleflow.stores.files import claim_folder

    if bool(config_path) == bool(run):
        raise ConfigError("give a job file or --from RUN")
    asked = overrides
    if run:
        overrides = (*recorded_overrides(Path(run), quiet=as_json), *overrides)

    def job_with(more: tuple[str, ...]) -> RunConfig:
        changed = (*overrides, *more)
        return load_job(Path(run), changed) if run else loading.load(config_path, changed)

    rows = sweep_variants(sweeps, asked)
    job = job_with(())
    if baselines:
        eta = job.staleness.eta
        rows += [Variant(label, tuple(change.format(eta=eta) for change in changes)) for label, changes in BASELINES]
    jobs = [(row, job_with(row.overrides)) for row in rows]
    if out is not None:
        claim_folder(Path(out), "--out")
    results = simulate_all(jobs, quiet=as_json)
    if not run and not as_json and (line := assumptions(job, config_path)):
        click.echo(line, err=True)
    if out is not None:
        write_results(Path(out), jobs, results)
    if as_json:
        click.echo(json.dumps([as_dict(r, m) for (r, _), (m, _) in zip(jobs, results, strict=True)], indent=2))
        return
    print_table([(row.label, m) for (row, _), (m, _) in zip(jobs, results, strict=True)])
    if explain:
        for (row, config), (measures, _) in zip(jobs, results, strict=True):
            click.echo(f"\n{row.label}")
            click.echo("\n".join(f"  {line}" for line in explanation(config, measures)))
    if out is not None:
        click.echo(f"\n{out}: simulate.json and {len(jobs)} pictures")


def assumptions(config: RunConfig, path: str) -> str:
    """One line on the numbers that the job leaves at their defaults, which are those of another model and machine, and
    on how to measure them; empty if there are none."""
    from staleflow.pipeline.config.emulation import SimulationConfig, WorkloadConfig
    from staleflow.pipeline.config.schema import CostConfig

    cost, default = config.rollout.cost, CostConfig()
    assumed = []
    if all(getattr(cost, key) == getattr(default, key) for key in ("k1", "k2", "k3", "k4", "b", "prefill")):
        assumed.append("decode steps of a 7B model (rollout.cost)")
    for key in ("train_s", "pull_s", "reward_s"):
        value = getattr(config.simulation, key)
        if value == getattr(SimulationConfig(), key):
            assumed.append(f"simulation.{key} = {value:g}")
    if config.workload == WorkloadConfig():
        assumed.append(f"responses of {config.workload.median:g} tokens in the median (workload)")
    if not assumed:
        return ""
    measure = f"staleflow profile {path} measures decode steps; a run measures all: then staleflow simulate --from RUN"
    profile = Path(f"profiles/{config.name}.json")
    if (config.run_dir / "summary.json").is_file():
        measure = f"this job has run, with all of them measured: staleflow simulate --from {config.run_dir}"
    elif profile.is_file():
        measure = f"there is a profile of this job: --set profile={profile}"
    return f"assumed, not measured: {', '.join(assumed)}; {measure}"


def recorded_overrides(run: Path, *, quiet: bool) -> tuple[str, ...]:
    """A stored run's responses and measured times, as overrides of its job file."""
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.jobs.what_if import as_recorded
    from staleflow.pipeline.profiling.diagnosis import versions_behind
    from staleflow.pipeline.profiling.engine_profile import profile_run
    from staleflow.pipeline.recovery.run_folder import load_job
    from staleflow.pipeline.simulator.analysis import steady_tokens_per_s
    from staleflow.stores.errors import ConfigError
    from staleflow.stores.metrics import tokens_per_s

    stored = open_run(run)
    steps = [record.metrics for record in stored.steps()]
    try:
        profile = profile_run(run)
    except ConfigError as error:
        click.echo(f"{error}; using the job's [rollout.cost] and [simulation]", err=True)
        return "workload.kind=recorded", f"workload.run={json.dumps(str(run))}"
    if not quiet:
        summary = json.loads((run / "summary.json").read_text())
        histogram = summary["staleness_histogram"]
        shares = " ".join(f"{n / max(1, sum(histogram.values())):.0%}" for n in histogram.values())
        scale = load_job(run).rollout.engine.time_scale  # an emulated run may be faster than its cost model
        wall_s = summary["seconds"]["wall_s"] * scale
        eta = versions_behind(load_job(run))
        click.echo(
            f"the run itself: {steady_tokens_per_s(steps, eta) / scale:,.0f} tokens/s, "
            f"{tokens_per_s(steps) / scale:,.0f} with warm-up and end, {wall_s:.1f} s for "
            f"{summary['steps']} steps, staleness {', '.join(histogram)}: {shares}"
        )
    return as_recorded(run, profile)


def sweep_variants(sweeps: tuple[str, ...], overrides: tuple[str, ...] = ()) -> list[Variant]:
    """Variants that the sweeps ask for; without sweeps, only the unchanged job. Raises ConfigError, also if a key is
    swept twice, or set too: one of the values would count for nothing."""
    from staleflow.stores.errors import ConfigError

    axes: list[list[str]] = []
    given = {override.partition("=")[0]: f"--set {override}" for override in overrides}
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not key or not equals or not values:
            raise ConfigError(f"--sweep {sweep}: expected key=value1,value2, such as staleness.eta=0,1,2,3")
        if key in given:
            raise ConfigError(f"--sweep {sweep}: {given[key]} gives {key} too; name each key once")
        given[key] = f"--sweep {sweep}"
        axes.append([f"{key}={value}" for value in values.split(",")])
    if not axes:
        return [Variant("the job", ())]
    return [Variant(" ".join(map(_short, chosen)), chosen) for chosen in itertools.product(*axes)]


def _short(override: str) -> str:
    """`key=value` without the table names of the key."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def simulate_one(config: RunConfig) -> tuple[Measures, Trace]:
    """Simulate one variant. Picklable, to run in a worker process."""
    from staleflow.pipeline.config import actor_settings
    from staleflow.pipeline.simulator.analysis import measure
    from staleflow.pipeline.simulator.simulated_run import SimulatedRun

    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    return measure(config, trace), trace


def simulate_all(jobs: list[tuple[Variant, RunConfig]], *, quiet: bool) -> list[tuple[Measures, Trace]]:
    """Simulate all variants, one process per core, with a progress bar. Raises ActorLost."""
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    from staleflow.stores.errors import ActorLost

    if len(jobs) == 1:
        return [simulate_one(jobs[0][1])]
    from rich.progress import track

    # Not forked: a store opened here has threads, whose locks would stay locked forever in a fork.
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        done = pool.map(simulate_one, [config for _, config in jobs])
        try:
            return list(track(done, description="simulating", total=len(jobs), transient=True, disable=quiet))
        except BrokenProcessPool as error:
            raise ActorLost(
                "a simulation process was killed, perhaps for its memory; sweep fewer values or simulate fewer steps"
            ) from error


def write_results(folder: Path, jobs: list[tuple[Variant, RunConfig]], results: list[tuple[Measures, Trace]]) -> None:
    """Write simulate.json and a picture per row. Raises StoreError if the folder cannot be written."""
    from staleflow.pipeline.simulator.plots import draw_run
    from staleflow.stores.files import replace_file, replace_text

    elsewhere = "choose another folder with --out"
    rows = [as_dict(row, m) for (row, _), (m, _) in zip(jobs, results, strict=True)]
    replace_text(folder / "simulate.json", json.dumps(rows, indent=2) + "\n", elsewhere)
    for number, ((row, config), (measures, trace)) in enumerate(zip(jobs, results, strict=True)):
        speed = f"{measures.steady_tokens_per_s:,.0f} tokens/s, {measures.of_bound:.0%} of the bound"
        title = f"{config.name}, {row.label}: {speed}"
        draw = functools.partial(draw_run, trace, title, span_s=PICTURE_STEPS * measures.step_s)
        replace_file(folder / f"row-{number:02d}.png", draw, elsewhere)


def as_dict(row: Variant, measures: Measures) -> dict[str, Any]:
    return {
        "row": row.label,
        "overrides": list(row.overrides),
        **asdict(measures),
        "bound_s": measures.bound.step_s,
        "of_bound": measures.of_bound,
        "diagnosis": None if measures.diagnosis is None else measures.diagnosis.as_dict(),
    }


def print_table(rows: list[tuple[str, Measures]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "tokens/s", "ratio", "s/step", "of bound", "trainer idle", "rollout idle", "staleness 0, 1, ..."):
        table.add_column(name, justify="left" if not name or name.startswith("stale") else "right")
    table.add_column("dropped")
    table.add_column("prefilled again", justify="right")
    first = rows[0][1].steady_tokens_per_s
    for label, m in rows:
        total = sum(m.staleness.values()) or 1
        shares = [m.staleness.get(k, 0) / total for k in range(max(m.staleness, default=0) + 1)]
        histogram = " ".join(f"{s:.0%}" for s in shares[:8]) + (" ..." if len(shares) > 8 else "")
        reasons = {r.partition(":")[2]: n for r, n in m.ended.items() if r != "consumed" and "run_ended" not in r}
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items())) or "-"
        table.add_row(
            label,
            f"{m.steady_tokens_per_s:,.0f}",
            f"{m.steady_tokens_per_s / first:.2f}",
            f"{m.step_s:.1f}",
            f"{m.of_bound:.0%}",
            f"{m.trainer_idle:.0%}",
            f"{m.rollout_idle:.0%}",
            histogram + ("" if m.bound_kept else "  (bound not kept)"),
            dropped,
            f"{m.reprefilled_tokens / 1e6:.1f} M",
        )
    console = Console()
    (console if console.is_terminal else Console(width=180)).print(table)

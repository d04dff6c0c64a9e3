"""Forecasts against runs: ten jobs, each planned from a short run with another seed, most of them of another shape.

    python -m benchmarks.forecasts               some twenty minutes; docs/results.md has the last rows

Eight jobs are emulated: real processes wait for what a cost model gives. Two sample from the demo's model and train it.
A forecast holds for the load at which its times were measured: on a machine that others use, give the benchmark a
higher priority.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import staleflow

EMULATED = "examples/dryrun.toml"
EMULATED_BASE = (
    "steps=10", "training.checkpoint_every=0", "simulation.train_s=0.5", "simulation.train_s_per_token=5e-5",
    "rollout.cost.k2=0.0", "rollout.cost.k4=0.01", "rollout.max_new_tokens=600", "workload.median=120",
)  # fmt: skip
SAMPLED = "examples/demo.toml"
SAMPLED_BASE = (
    "steps=16", "rollout.instances=1", "task.eval_prompts=0", "training.checkpoint_every=0", "cluster.dashboard=false",
    "batch.groups_per_step=8",
)  # fmt: skip
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "another seed": (EMULATED, (), ()),
    "eta 0 to 2": (EMULATED, ("staleness.eta=0",), ("staleness.eta=2",)),
    "groups of 8 to 16": (EMULATED, (), ("batch.group_size=16",)),
    "4 to 2 instances": (EMULATED, (), ("rollout.instances=2",)),
    "responses of 120 to 200 tokens": (EMULATED, (), ("workload.median=200",)),
    "rewards of 2 s, eta 2 to 1": (
        EMULATED,
        ("simulation.reward_s=2.0",),
        ("simulation.reward_s=2.0", "staleness.eta=1"),
    ),
    "redundancy of 4 groups, 2 members": (EMULATED, (), ("batch.extra_groups=4", "batch.extra_members=2")),
    "pulls that interrupt, eta 2 to 3": (EMULATED, (), ("rollout.on_pull=interrupt", "staleness.eta=3")),
    "demo's model, another seed": (SAMPLED, (), ()),
    "demo's model, groups of 8 to 12": (SAMPLED, (), ("batch.group_size=12",)),
}
"""File, changes of the measured run, and changes of the run that is forecast, by name."""
SHORT_STEPS = 8
"""Steps of the measured run."""


def compare(folder: Path, number: int, quick: bool, seed: int) -> staleflow.ForecastComparison:
    """Run the short job of a case, plan the other, run it, and compare."""
    file, short, changes = list(CASES.values())[number]
    base = EMULATED_BASE if file == EMULATED else SAMPLED_BASE
    common = (f"runs_dir={folder}", "deadlines.start_s=900", *base)
    steps = 4 if quick else SHORT_STEPS
    measured = staleflow.run(
        file,
        overrides=(*common, f"name=short-{number}", f"steps={steps}", f"seed={seed + 100}", *short),
        progress=False,
    )
    overrides = (*common, f"name=case-{number}", f"seed={seed}", *changes, *(("steps=6",) if quick else ()))
    staleflow.plan(file, measured_in=measured.run, overrides=overrides)
    run = staleflow.run(file, overrides=overrides, progress=False).run
    result = run.compare_with_forecast()
    assert result is not None and result.measured
    return result


def row(name: str, result: staleflow.ForecastComparison) -> list[Any]:
    cells: list[Any] = [name]
    for quantity, predicted in result.forecast.ranges.items():
        mark = "" if result.is_inside(quantity) else " (outside)"
        cells.append(f"{result.measured[quantity]:,.4g}: {predicted}{mark}")
    return [*cells, f"{result.bottleneck}: {result.forecast.bottleneck}"]


def errors(results: list[staleflow.ForecastComparison], quantity: str) -> list[float]:
    """|forecast / measured - 1| of each result; of lags of 0, whether they were forecast."""
    pairs = [(r.forecast.ranges[quantity].expected, r.measured[quantity]) for r in results]
    return [abs(expected / value - 1) if value else float(expected > 0) for expected, value in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases of a few steps: whether it works")
    parser.add_argument("--folder", type=Path, default=Path("runs/forecasts"))
    parser.add_argument("--seed", type=int, default=0, help="of the runs that are forecast")
    parser.add_argument("--cases", type=int, nargs="*", default=[])
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    numbers = args.cases or ([0, 8] if args.quick else list(range(len(CASES))))
    names, results = list(CASES), []
    for number in numbers:
        results.append(compare(args.folder, number, args.quick, args.seed + number))
        print(f"| {' | '.join(row(names[number], results[-1]))} |  load {os.getloadavg()[0]:.0f}", flush=True)
    for quantity in results[0].forecast.ranges:
        inside = sum(result.is_inside(quantity) for result in results)
        relative_errors = errors(results, quantity)
        print(f"{quantity}: median error {statistics.median(relative_errors):.1%}, largest {max(relative_errors):.1%}; "
              f"{inside} of {len(results)} inside")  # fmt: skip
    right = sum(result.bottleneck == result.forecast.bottleneck for result in results)
    print(f"bottleneck: {right} of {len(results)} right")


if __name__ == "__main__":
    main()

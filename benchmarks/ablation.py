"""The gain of each strategy when the tail is long: examples/longtail.toml (7B fit, 4 instances, B 256).

    python benchmarks/ablation.py --out docs/ablation.md

Means of three seeds. First `deadline` against `throughput_optimal` by bound, each at its best over a small sweep of its
setting and of the pull rule; then one strategy added at a time.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean

from pipeline.config import actor_settings, loading
from pipeline.simulator.body import SimulatedRun
from pipeline.simulator.measure import Measures, measure

JOB = "examples/longtail.toml"
SEEDS = (1, 2, 3)
PULLS = ("greedy", "hypothesis")
MUS = (0.05, 0.1, 0.2, 0.3)
SLACKS = (1.0, 1.5, 2.0, 3.0)
SYNCHRONOUS = ("staleness.eta=0", "staleness.admission=synchronous", "rollout.routing=least_requests")
STEPS = {
    "synchronous": SYNCHRONOUS,
    "reservations, bound 3": ("rollout.routing=least_requests", "rollout.synchronization=greedy"),
    "+ throughput_optimal, mu 0.1": ("rollout.routing=throughput_optimal", "rollout.synchronization=greedy"),
    "+ hypothesis pulls": ("rollout.routing=throughput_optimal", "rollout.synchronization=hypothesis"),
    "+ deadline, slack 2": ("rollout.routing=deadline", "rollout.pace_slack=2", "rollout.synchronization=hypothesis"),
    "+ migration": ("rollout.routing=deadline", "rollout.pace_slack=2", "rollout.synchronization=hypothesis",
                    "rollout.migration=largest_gain"),
    "deadline, cache kept over pulls": ("rollout.on_pull=keep", "rollout.synchronization=greedy"),
    "+ migration ": ("rollout.on_pull=keep", "rollout.synchronization=greedy", "rollout.migration=largest_gain"),
    "+ redundancy, 2 groups of 34": ("rollout.on_pull=keep", "rollout.synchronization=greedy", "batch.extra_groups=2"),
    "+ truncated stragglers": ("rollout.on_pull=keep", "rollout.synchronization=greedy", "batch.stragglers=truncate",
                               "batch.straggler_patience=0.2"),
}  # fmt: skip


def run(overrides: tuple[str, ...]) -> Measures:
    config = loading.load(JOB, overrides)
    return measure(config, SimulatedRun(config, actor_settings.make_workload(config)).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one seed, bound 1, few steps, one value a knob")
    args = parser.parse_args()
    seeds_run, bounds, mus, slacks, few = SEEDS, (1, 2, 3), MUS, SLACKS, ()
    if args.quick:
        seeds_run, bounds, mus, slacks, few = SEEDS[:1], (1,), MUS[:1], SLACKS[:1], ("steps=4",)
    with ProcessPoolExecutor(os.cpu_count()) as pool:

        def seeds(overrides: tuple[str, ...]) -> list[Measures]:
            return list(pool.map(run, [(*overrides, *few, f"seed={s}") for s in seeds_run]))

        def rate(results: list[Measures]) -> float:
            return mean(m.tokens_per_s for m in results)

        base = rate(seeds(SYNCHRONOUS))
        lines = [f"synchronous: {base:,.0f} tokens/s.", ""]
        head = "| bound | on pull | throughput_optimal | deadline | gain of deadline |"
        lines += [head, "|---|---|---|---|---|"]
        for eta, on_pull in itertools.product(bounds, ("interrupt", "keep")):
            common = (f"staleness.eta={eta}", f"rollout.on_pull={on_pull}")
            tops = []
            for routing, knob, values in (("throughput_optimal", "mu", mus), ("deadline", "pace_slack", slacks)):
                tried = {
                    (value, pull): (
                        *common,
                        f"rollout.routing={routing}",
                        f"rollout.{knob}={value}",
                        f"rollout.synchronization={pull}",
                    )
                    for value, pull in itertools.product(values, PULLS)
                }  # fmt: skip
                rates = {key: rate(seeds(overrides)) for key, overrides in tried.items()}
                best = max(rates, key=rates.__getitem__)
                tops.append((rates[best], f"{knob} {best[0]:g}, {best[1]}"))
            cells = [f"{r / base:.2f} ({how})" for r, how in tops]
            lines.append(f"| {eta} | {on_pull} | {' | '.join(cells)} | {tops[1][0] / tops[0][0] - 1:+.1%} |")
            print(lines[-1], flush=True)
        lines += [
            "",
            "| | tokens/s, ratio | of the bound | prefilled again, per token sampled | dropped |",
            "|---|---|---|---|---|",
        ]
        for name, overrides in STEPS.items():
            results = seeds(overrides)
            again = mean(m.reprefilled_tokens / m.sampled_tokens for m in results)
            dropped = mean(m.dropped / (m.dropped + m.ended["consumed"]) for m in results)
            lines.append(
                f"| {name.strip()} | {rate(results) / base:.2f} | "
                f"{mean(m.of_bound for m in results):.0%} | {again:.2f} | "
                f"{dropped:.1%} of trajectories |"
            )
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(["# What each strategy gains", "", (__doc__ or "").strip(), "", *lines]) + "\n")


if __name__ == "__main__":
    main()

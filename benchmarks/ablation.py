"""The gain of each strategy when the tail is long: examples/longtail.toml (7B fit, 4 instances, B 256).

    python benchmarks/ablation.py --out docs/ablation.md

Means of three seeds, 36 steps. First the routing rules by bound, each at its best over the pull rules and a small sweep
of its setting, `deadline` without any; then one strategy added at a time.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.simulator.analysis import Measures, measure
from staleflow.pipeline.simulator.simulated_run import SimulatedRun

JOB = "examples/longtail.toml"
FEWEST = ("steps=36",)
"""Steps of a run; 24 of them are measured at bound 3."""
SEEDS = (1, 2, 3)
PULLS = ("greedy", "hypothesis")
ROUTINGS = {
    "least_requests": ((),),
    "throughput_optimal": tuple((f"rollout.routing.mu={mu}",) for mu in (0.05, 0.1, 0.2)),
    "deadline": ((),),
}
"""Routing rules, each with the settings that are tried."""
SYNCHRONOUS = ("staleness.eta=0", "staleness.admission=synchronous", "rollout.routing=least_requests")
LEAST, GREEDY, HYPOTHESIS, KEEP = (
    "rollout.routing=least_requests",
    "rollout.synchronization=greedy",
    "rollout.synchronization=hypothesis",
    "rollout.on_pull=keep",
)
STEPS = {
    "synchronous": SYNCHRONOUS,
    "reservations, bound 3": (LEAST, GREEDY),
    "+ deadline": (GREEDY,),
    "+ hypothesis pulls": (HYPOTHESIS,),
    "+ migration": (HYPOTHESIS, "rollout.migration=largest_gain"),
    "deadline, cache kept over pulls": (KEEP, GREEDY),
    "+ migration ": (KEEP, GREEDY, "rollout.migration=largest_gain"),
    "+ redundancy, 2 groups of 34": (KEEP, GREEDY, "batch.extra_groups=2"),
    "+ stragglers cut, 1 % at most": (KEEP, GREEDY, "batch.stragglers=truncate", "batch.stragglers.patience=0.1",
                                      "batch.stragglers.share=0.01"),
    "+ stragglers cut, 10 % at most": (KEEP, GREEDY, "batch.stragglers=truncate", "batch.stragglers.patience=0.1",
                                       "batch.stragglers.share=0.1"),
}  # fmt: skip


def run(overrides: tuple[str, ...]) -> Measures:
    config = loading.load(JOB, overrides)
    return measure(config, SimulatedRun(config, actor_settings.make_workload(config)).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one seed, bound 1, few steps")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    seeds_run: tuple[int, ...] = tuple(args.seeds)
    bounds: tuple[int, ...] = (1, 2, 3)
    few = FEWEST
    if args.quick:
        seeds_run, bounds, few = SEEDS[:1], (1,), ("steps=4",)
    with ProcessPoolExecutor(args.processes) as pool:

        def seeds(overrides: tuple[str, ...]) -> list[Measures]:
            return list(pool.map(run, [(*overrides, *few, f"seed={s}") for s in seeds_run]))

        def rate(results: list[Measures]) -> float:
            return mean(m.steady_tokens_per_s for m in results)

        base = rate(seeds(SYNCHRONOUS))
        lines = [f"synchronous: {base:,.0f} tokens/s.", ""]
        lines += [f"| bound | on pull | {' | '.join(ROUTINGS)} |", "|---" * 5 + "|"]
        for eta, on_pull in itertools.product(bounds, ("interrupt", "keep")):
            cells = []
            for routing, settings in ROUTINGS.items():
                rates = {
                    (setting, pull): rate(
                        seeds(
                            (
                                f"staleness.eta={eta}",
                                f"rollout.on_pull={on_pull}",
                                f"rollout.routing={routing}",
                                f"rollout.synchronization={pull}",
                                *setting,
                            )
                        )
                    )
                    for setting, pull in itertools.product(settings, PULLS)
                }
                best = max(rates, key=rates.__getitem__)
                how = ", ".join([s.removeprefix("rollout.").replace("=", " ") for s in best[0]] + [best[1]])
                cells.append(f"{rates[best] / base:.2f} ({how})")
            lines.append(f"| {eta} | {on_pull} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        lines += [
            "",
            "| | tokens/s, ratio | of the bound | prefilled again, per token sampled | dropped | cut |",
            "|---|---|---|---|---|---|",
        ]
        for name, overrides in STEPS.items():
            results = seeds(overrides)
            again = mean(m.reprefilled_tokens / m.sampled_tokens for m in results)
            dropped = mean(m.dropped / (m.dropped + m.ended["consumed"]) for m in results)
            cut = "cut" in name
            ended = mean(m.commands.get("Interrupt", 0) / m.ended["consumed"] for m in results) if cut else 0.0
            lines.append(
                f"| {name.strip()} | {rate(results) / base:.2f} | "
                f"{mean(m.of_bound for m in results):.0%} | {again:.2f} | "
                f"{dropped:.1%} | {ended:.2%} |"
            )
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(["# What each strategy gains", "", (__doc__ or "").strip(), "", *lines]) + "\n")


if __name__ == "__main__":
    main()

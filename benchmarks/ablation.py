"""What each strategy gains when the tail is long: examples/longtail.toml (7B fit, 4 instances, 32 groups of 8 a step).

    python -m benchmarks.ablation --out docs

writes ablation.json, of which benchmarks/simulated.py makes a section of its page. Means of seeds, 36 steps.
One strategy is added at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.routing_rules import ROUTING_RULES
from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.simulator.analysis import SimulationStats, compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun

JOB = "examples/longtail.toml"
STEPS = ("steps=36",)
"""Steps of a run; 24 of them are measured at bound 3."""
SEEDS = (1, 2, 3)
SYNCHRONOUS = (
    "staleness.eta=0",
    "staleness.admission=synchronous",
    f"rollout.routing={ROUTING_RULES['least_requests']}",
    "cluster.layout=turns",
    "rollout.instances=5",
    "simulation.train_s=4",
)
"""Rollout and training on the same five GPUs, in turns: faster than on four and one. A step that takes one GPU 20 s
takes them 4 s."""
LEAST_REQUESTS, GREEDY, STAGGERED, KEEP, MIGRATION = (
    f"rollout.routing={ROUTING_RULES['least_requests']}",
    "rollout.synchronization=greedy",
    "rollout.synchronization=staggered",
    "rollout.on_pull=keep",
    "rollout.migration=largest_gain",
)
TRUNCATE = ("batch.stragglers=truncate", "batch.stragglers.patience=0.1")
CASES = {
    "`synchronous`, in turns on all GPUs, `least_requests`": SYNCHRONOUS,
    "`least_requests`, `greedy`, `interrupt`": (LEAST_REQUESTS, GREEDY),
    "`deadline`, `greedy`, `interrupt`": (GREEDY,),
    "`deadline`, `staggered`, `interrupt`": (STAGGERED,),
    "`deadline`, `staggered`, `interrupt`, `largest_gain`": (STAGGERED, MIGRATION),
    "`deadline`, `keep`": (KEEP,),
    "`deadline`, `keep`, `largest_gain`": (KEEP, MIGRATION),
    "`deadline`, `keep`, `extra_groups` 2": (KEEP, "batch.extra_groups=2"),
    "`deadline`, `keep`, truncated, `share` .01": (KEEP, *TRUNCATE, "batch.stragglers.share=0.01"),
    "`deadline`, `keep`, truncated, `share` .1": (KEEP, *TRUNCATE, "batch.stragglers.share=0.1"),
}
"""Settings by their name on the page. The staleness bound is the job's, 3, but where rollout is synchronous."""
SECTION = """\
## A long tail

examples/longtail.toml: 7B, 4 instances, 32 groups of 8, lognormal lengths, 36 steps, mean of seeds: {seeds}, as a
ratio to synchronous on the same GPUs ({synchronous:,.0f} tokens/s). `python -m benchmarks.ablation --out docs` writes
ablation.json.

| `eta` 3 unless synchronous | ratio | of the roofline | recomputed, per sampled token |
|---|---|---|---|"""
LAST_ROW = "The last row trains on unfinished responses, so it is not comparable with the others."


def stored(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder; none if it has none."""
    path = folder / "ablation.json"
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return results


def section(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the page about these results."""
    base = next(r for r in results if r["part"] == "synchronous")
    seeds = ", ".join(map(str, base["seeds"]))
    lines = [SECTION.format(synchronous=base["tokens_per_s"], seeds=seeds)]
    for r in results:
        if r["part"] == "strategies":
            shares = [(r["discarded"], f"{r['discarded']:.1%} discarded"), (r["truncated"], f"{r['truncated']:.2%}")]
            settings = ", ".join([r["settings"], *(text for share, text in shares if share)])
            lines.append(f"| {settings} | {r['ratio']:.2f} | {r['of_roofline']:.0%} | {r['reprefilled']:.2f} |")
    return [
        *lines,
        "",
        LAST_ROW,
        "",
        "![Four instances at bound 3: they pull in turns, fill with new work, then drain](longtail.png)",
    ]


def run(overrides: tuple[str, ...]) -> SimulationStats:
    config = loading.load(JOB, overrides)
    return compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    seeds = SEEDS[:1] if args.quick else args.seeds
    steps = ("steps=4",) if args.quick else STEPS
    with ProcessPoolExecutor(args.processes) as pool:

        def measured(overrides: tuple[str, ...]) -> list[SimulationStats]:
            return list(pool.map(run, [(*overrides, *steps, f"seed={seed}") for seed in seeds]))

        base = mean(m.steady_tokens_per_s for m in measured(SYNCHRONOUS))
        results: list[dict[str, Any]] = [{"part": "synchronous", "tokens_per_s": base, "seeds": seeds}]
        results += [_strategy(name, measured(overrides), base) for name, overrides in CASES.items()]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ablation.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in results) + "\n]\n")
    print("\n".join(section(results)))


def _strategy(name: str, runs: list[SimulationStats], base: float) -> dict[str, Any]:
    truncated = [
        m.command_counts.get("Interrupt", 0) / m.ending_counts["consumed"] for m in runs if "truncated" in name
    ]
    return {
        "part": "strategies", "settings": name, "ratio": mean(m.steady_tokens_per_s for m in runs) / base,
        "of_roofline": mean(m.share_of_step_time_bound for m in runs),
        "reprefilled": mean(m.reprefilled_tokens / m.sampled_tokens for m in runs),
        "discarded": mean((dropped := sum(m.dropped.values())) / (dropped + m.ending_counts["consumed"]) for m in runs),
        "truncated": mean(truncated or [0.0]),
    }  # fmt: skip


if __name__ == "__main__":
    main()

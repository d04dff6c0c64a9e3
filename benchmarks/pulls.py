"""Staggered pulls against pulling every version, where a pull interrupts what runs: tokens/s in virtual time.

    python -m benchmarks.pulls --out docs

writes pulls.json and prints the table of docs/strategies.md. Jobs are those of benchmarks/simulated.py, with
`on_pull = "interrupt"`, and a fourth workload with a heavier tail. The period of `staggered` was chosen on 7B, 14B and
32B, lognormal and bimodal lengths, four instances, seeds 1 and 2; all else was run afterwards. --resume keeps the rows
that pulls.json has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.simulated import MODELS, UNTUNED, WORKLOADS, Row, job
from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun

STEPS = 30
LENGTHS = (*WORKLOADS, *UNTUNED)
RULES = {
    "greedy": ("rollout.on_pull=interrupt", "rollout.synchronization=greedy"),
    "staggered": ("rollout.on_pull=interrupt", "rollout.synchronization=staggered"),
    "keep": ("rollout.on_pull=keep",),
}
PULLING = ("greedy", "staggered")
CHOSEN_ON = (("7B", "14B", "32B"), ("lognormal", "bimodal"), 4, (1, 2))
"""Models, workloads, instances and seeds that the period was chosen on."""
Case = tuple[int, str, str, int, int, str]
"""Instances, model, workload, eta, seed, rule."""


def cases() -> Iterator[Case]:
    yield from itertools.product((4,), MODELS, LENGTHS, (3,), (1,), RULES)
    yield from itertools.product((4,), ("7B", "30B-A3B"), LENGTHS, (4,), (1,), RULES)
    yield from itertools.product((16,), ("7B", "30B-A3B"), ("lognormal", "power_law"), (3,), (1,), PULLING)
    yield from itertools.product((64,), ("7B",), ("lognormal",), (3,), (1,), PULLING)


def run(case: Case, steps: int) -> dict[str, Any]:
    size, model, workload, eta, seed, rule = case
    config = job(model, workload, size, Row(rule, "", eta, RULES[rule]), steps, seed)
    measures = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run())
    return {
        "instances": size, "model": model, "workload": workload, "eta": eta, "seed": seed, "rule": rule,
        "tokens_per_s": measures.steady_tokens_per_s,
        "reprefilled": measures.reprefilled_tokens / measures.sampled_tokens,
        "lag": sum(lag * n for lag, n in measures.staleness.items()) / sum(measures.staleness.values()),
    }  # fmt: skip


def case_of(result: dict[str, Any]) -> Case:
    return tuple(result[key] for key in ("instances", "model", "workload", "eta", "seed", "rule"))


def table(results: list[dict[str, Any]]) -> list[str]:
    """A line for each number of instances and bound, and for what the period was chosen on and what it was not.

    Rates are relative to `greedy`. Tokens recomputed per sampled token and mean lag are those of `greedy` and of
    `staggered`."""
    rates = {case_of(r): r["tokens_per_s"] for r in results}
    lines = ["| instances | `eta` | runs | `staggered` | recomputed | lag | `keep` |", "|---" * 7 + "|"]
    models, workloads, few, seeds = CHOSEN_ON
    groups: dict[tuple[int, int, str], list[Case]] = {}
    for case in rates:
        size, model, workload, eta, seed, rule = case
        chosen = model in models and workload in workloads and size == few and seed in seeds
        if rule == "greedy":
            groups.setdefault((size, eta, "chosen on" if chosen else "others"), []).append(case)
    for (size, eta, name), bases in sorted(groups.items()):
        cells = []
        for rule in ("staggered", "keep"):
            ratios = [rates[*base[:5], rule] / rates[base] for base in bases if (*base[:5], rule) in rates]
            cells.append(f"{statistics.mean(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})" if ratios else "")
        changes = [
            ", ".join(f"{_mean(results, key, bases, rule):.2f}" for rule in ("greedy", "staggered"))
            for key in ("reprefilled", "lag")
        ]
        lines.append(f"| {size} | {eta} | {len(bases)} {name} | {cells[0]} | {' | '.join(changes)} | {cells[1]} |")
    return lines


def _mean(results: list[dict[str, Any]], key: str, bases: list[Case], rule: str) -> float:
    """The mean of a figure over the runs of one rule in the same cases as `bases`."""
    values = {case_of(r): r[key] for r in results}
    return float(statistics.mean(values[*base[:5], rule] for base in bases if (*base[:5], rule) in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="three runs of few steps")
    parser.add_argument("--resume", action="store_true", help="keep the rows that pulls.json has already")
    parser.add_argument("--tables", action="store_true", help="print the table of the stored results, and run nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    path = args.out / "pulls.json"
    results: list[dict[str, Any]] = []
    if path.exists() and (args.resume or args.tables):
        results = json.loads(path.read_text())
    known = set(map(case_of, results))
    left = [] if args.tables else [case for case in cases() if case not in known]
    steps = 4 if args.quick else STEPS
    if args.quick:
        left = left[: len(RULES)]
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.processes) as pool:
        for done in as_completed([pool.submit(run, case, steps) for case in left]):
            results.append(done.result())
            results.sort(key=case_of)
            path.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()

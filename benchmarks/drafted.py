"""What drafts are worth where the tail is long, in virtual time: examples/longtail.toml (7B fit, 4 instances, B 256).

    python -m benchmarks.drafted
    python -m benchmarks.drafted --tables

36 steps, three seeds, the KV cache kept over weight updates. Drafts of up to 8 tokens, of which each is sampled with
the probability named if those before it were; the coordinator learns that, and decides for each instance how many it
drafts. Acceptance .79 keeps the 3.3 tokens a step with 4 drafted that the last responses of the demo's groups kept;
other work will have less. Each line has the tokens/s of the default (`deadline`,
pulls at once) and of plain reservation (`least_requests`), means and spread of seeds, and of the first the ratio to
the best synchronous run, which drafts in the same way or does not. With --tables the same of every model and workload
of docs/simulated.md on four instances, with acceptance .79.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import Any

from benchmarks import simulated
from benchmarks.ablation import GREEDY, KEEP, LEAST_REQUESTS, SYNCHRONOUS, run

STEPS = "steps=36"
SEEDS = (1, 2, 3)
ACCEPTANCES: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.79, 0.9)
LENGTH = 8
MEASURED = 0.79
"""The acceptance of the demo's last responses."""
BOUNDS: tuple[int, ...] = (1, 2, 3)


def rate(overrides: tuple[str, ...]) -> float:
    return run(overrides).steady_tokens_per_s


def drafting(acceptance: float) -> tuple[str, ...]:
    if not acceptance:
        return ()
    return (f"rollout.engine.speculation.num_speculative_tokens={LENGTH}", f"workload.acceptance_rate={acceptance}")


def shown(rates: list[float]) -> str:
    return f"{mean(rates):,.0f} ({min(rates):,.0f} - {max(rates):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--tables", action="store_true", help="every model and workload of docs/simulated.md")
    parser.add_argument("--quick", action="store_true", help="one seed, bound 1, few steps: whether it works")
    args = parser.parse_args()
    if args.tables:
        tables(args.seeds, args.processes, quick=args.quick)
        return
    acceptances, bounds, steps = ACCEPTANCES, BOUNDS, STEPS
    if args.quick:
        args.seeds, acceptances, bounds, steps = args.seeds[:1], (0.0, 0.7), BOUNDS[:1], "steps=4"
    strategies = {("synchronous", 0): SYNCHRONOUS} | {
        (name, bound): (*how, f"staleness.eta={bound}")
        for bound in bounds
        for name, how in (("default", (KEEP, GREEDY)), ("reservation", (KEEP, LEAST_REQUESTS, GREEDY)))
    }
    cells = list(itertools.product(strategies, acceptances))
    requests = [
        (*strategies[strategy], *drafting(acceptance), steps, f"seed={seed}")
        for strategy, acceptance in cells
        for seed in args.seeds
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        rates = pool.map(rate, requests)
        results = {cell: list(itertools.islice(rates, len(args.seeds))) for cell in cells}
    alone = ("synchronous", 0)
    print("| bound | acceptance | default | plain reservation | to synchronous, drafting too | not drafting |")
    print("|---|---|---|---|---|---|")
    for acceptance in acceptances:
        print(f"| 0, synchronous | {acceptance or 'no drafts'} | {shown(results[alone, acceptance])} | | | |")
    for bound, acceptance in itertools.product(bounds, acceptances):
        ours, theirs = results[("default", bound), acceptance], results[("reservation", bound), acceptance]
        same, plain = (mean(ours) / mean(results[alone, item]) for item in (acceptance, 0.0))
        text = f"{acceptance or 'no drafts'} | {shown(ours)} | {shown(theirs)} | {same:.2f} | {plain:.2f}"
        print(f"| {bound} | {text} |", flush=True)


def tables(seeds: Sequence[int], processes: int, *, quick: bool) -> None:
    """Of each model and workload, by bound: the default with drafts over a synchronous run without, over one that
    drafts too, and over plain reservation that drafts too."""
    steps, bounds = (4, BOUNDS[:1]) if quick else (simulated.STEPS, BOUNDS)
    models = list(simulated.MODELS)[:1] if quick else list(simulated.MODELS)
    drafts = drafting(MEASURED)
    sides = {("alone", 0): SYNCHRONOUS, ("alone, drafting", 0): (*SYNCHRONOUS, *drafts)}
    for bound in bounds:
        sides |= {("default", bound): drafts, ("reservation", bound): (LEAST_REQUESTS, *drafts)}
    head = [f"bound {bound}: {what}" for bound in bounds for what in ("without drafts", "drafting too", "reservation")]
    print("| model | workload | " + " | ".join(head) + " |")
    print("|---" * (2 + len(head)) + "|")
    with ProcessPoolExecutor(processes) as pool:
        requests = [
            (model, workload, simulated.Row("", "", bound, overrides), steps, seed)
            for model in models
            for workload in simulated.WORKLOADS
            for (_, bound), overrides in sides.items()
            for seed in seeds
        ]
        rates = pool.map(rate_of_row, requests)
        for model, workload in itertools.product(models, simulated.WORKLOADS):
            results = {side: mean(itertools.islice(rates, len(seeds))) for side in sides}
            cells = []
            for bound in bounds:
                ours = results["default", bound]
                others = (results["alone", 0], results["alone, drafting", 0], results["reservation", bound])
                cells += [f"{ours / other:.2f}" for other in others[:2]] + [f"{ours / others[2]:.3f}"]
            print(f"| {model} | {workload} | " + " | ".join(cells) + " |", flush=True)


def rate_of_row(asked: tuple[Any, ...]) -> float:
    model, workload, row, steps, seed = asked
    return float(simulated.run_row(model, workload, 4, row, steps, seed)["steady_tokens_per_s"])


if __name__ == "__main__":
    main()

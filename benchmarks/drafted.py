"""What drafts are worth where the tail is long, in virtual time: examples/longtail.toml (7B fit, 4 instances, B 256).

    python -m benchmarks.drafted

36 steps, three seeds. Drafts of 4 tokens, of which each is sampled with the probability named if those before it were:
.79 keeps the 3.3 tokens a step that `benchmarks.drafts` found for the last responses of the demo's groups; other work
will have less. Each line has the tokens/s of the file's own settings and of plain reservation (`least_requests`), at
the best of MOST, the requests up to which an instance drafts, and the first as a ratio to the best synchronous run,
which drafts too, at its own best, or does not.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from statistics import mean

from benchmarks.ablation import GREEDY, LEAST, SYNCHRONOUS, run

STEPS = "steps=36"
SEEDS = (1, 2, 3)
ACCEPTANCES: tuple[float, ...] = (0.0, 0.5, 0.7, 0.79)
MOST = (16, 64, 256)
LENGTH = 4
BOUNDS: tuple[int, ...] = (1, 2, 3)


def rate(overrides: tuple[str, ...]) -> float:
    return run(overrides).steady_tokens_per_s


def drafting(acceptance: float, most: int) -> tuple[str, ...]:
    if not acceptance:
        return ()
    asked = "rollout.engine.speculation"
    return (f"{asked}.length={LENGTH}", f"{asked}.most_running={most}", f"workload.acceptance={acceptance}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="one seed, bound 1, few steps: whether it works")
    args = parser.parse_args()
    acceptances, bounds, steps = ACCEPTANCES, BOUNDS, STEPS
    if args.quick:
        args.seeds, acceptances, bounds, steps = args.seeds[:1], (0.0, 0.7), BOUNDS[:1], "steps=4"
    strategies = {("synchronous", 0): SYNCHRONOUS} | {
        (name, bound): (*how, f"staleness.eta={bound}")
        for bound in bounds
        for name, how in (("default", ()), ("reservation", (LEAST, GREEDY)))
    }
    cells = [
        (strategy, acceptance, most)
        for strategy, acceptance in itertools.product(strategies, acceptances)
        for most in (MOST if acceptance else MOST[:1])
    ]
    asked = [
        (*strategies[strategy], *drafting(acceptance, most), steps, f"seed={seed}")
        for strategy, acceptance, most in cells
        for seed in args.seeds
    ]
    best: dict[tuple[tuple[str, int], float], tuple[float, int]] = {}
    with ProcessPoolExecutor(args.processes) as pool:
        rates = pool.map(rate, asked)
        for strategy, acceptance, most in cells:
            found = mean(itertools.islice(rates, len(args.seeds)))
            best[strategy, acceptance] = max(best.get((strategy, acceptance), (0.0, 0)), (found, most))
    plain = best[("synchronous", 0), 0.0][0]
    print("| bound | acceptance | drafts up to | as the file says | reservation | to synchronous drafting | not |")
    print("|---|---|---|---|---|---|---|")
    for bound, acceptance in itertools.product(bounds, acceptances):
        ours, most = best[("default", bound), acceptance]
        theirs = best[("reservation", bound), acceptance][0]
        same = best[("synchronous", 0), acceptance][0]
        shown = (f"{acceptance:g}", f"{most}") if acceptance else ("none", "")
        print(
            f"| {bound} | {' | '.join(shown)} | {ours:,.0f} | {theirs:,.0f} | {ours / same:.2f} | {ours / plain:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

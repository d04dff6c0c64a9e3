"""What the staleness bound buys: reward over time at bounds of 0 to 8, and the lag that really occurred.

    python -m benchmarks.time_to_quality --out docs

Runs the demo's job (--job for another) at each bound with three seeds on the same workers, one run after the other on
an otherwise idle machine: seconds are wall-clock. Bound 0 is synchronous, rollout and training in turns. Runs stay in
runs/, and one that is there is not run again, so that it can be done in parts. Writes time_to_quality.json, .md, .png.

The plateau is the mean reward of batches over the last quarter of the synchronous steps, all seeds. A run is there once
the mean of its last WINDOW batches is no more than --delta below.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import learning
from staleflow.pipeline.config import loading
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate

BOUNDS = (0, 1, 2, 4, 8)
SEEDS = (11, 12, 13)
WINDOW = 10
"""Batches over which reward is averaged: of 256 responses each in the demo's job."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("examples/demo.toml"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--delta", type=float, default=0.02, help="reward below the plateau that counts as there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="two bounds, one seed, two steps: whether it works")
    args = parser.parse_args()
    prefix = "quality"
    if args.quick:
        args.bounds, args.seeds, prefix = args.bounds[:2], args.seeds[:1], "quality-quick"
        args.set += ["steps=2", "task.eval_prompts=8", "batch.groups_per_step=4"]
    args.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:  # seed by seed: what is there of a part is a comparison
        for bound in args.bounds:
            name = f"{prefix}-{bound}-{seed}"
            overrides = (f"staleness.eta={bound}", f"seed={seed}", *args.set)
            if not bound:
                overrides += ("staleness.admission=synchronous",)
            learning.summary_of_run(args.job, name, overrides)
            config = loading.load(args.job, (f"name={name}", *overrides))
            runs.append({"bound": bound, "seed": seed, **figures(VersionedStore.open(config.run_dir / "store"))})
            (args.out / "time_to_quality.json").write_text(json.dumps(runs, indent=1) + "\n")
    lines = table(runs, args.delta)
    (args.out / "time_to_quality.md").write_text("\n".join([*head(args.job, args.set), *lines]) + "\n")
    draw(runs, args.out / "time_to_quality.png")
    print("\n".join(lines))


def figures(store: VersionedStore) -> dict[str, Any]:
    """The reward of a run's batches over time, and the lag of what it trained on."""
    steps = [record.metrics for record in store.commits() if record.kind == "step"]
    return {
        "elapsed_s": [m["elapsed_s"] for m in steps],
        "reward": [m["reward"] for m in steps],
        "tokens_per_s": sum(m["response_tokens"] for m in steps) / steps[-1]["elapsed_s"],
        **lags(store.displayed_columns()),
    }


def lags(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shares of the responses trained on by lag. inter: versions from the newest token to the step that trains it;
    intra: from the oldest token to the newest; lag: the mean of their sum."""
    trained = columns["fate"] == Fate.CONSUMED.value
    inter = (columns["step"] - columns["v_max"])[trained]
    intra = (columns["v_max"] - columns["v_min"])[trained]
    return {"lag": float((inter + intra).mean()), "inter": shares(inter), "intra": shares(intra)}


def shares(values: np.ndarray) -> list[float]:
    """The share of each value 0, 1, 2, ..."""
    return (np.bincount(values) / len(values)).round(4).tolist()  # type: ignore[no-any-return]  # untyped by numpy


def smooth(reward: list[float]) -> list[float]:
    """The mean of the last WINDOW batches at each step, of fewer at the beginning."""
    return [statistics.mean(reward[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(reward))]


def plateau(runs: list[dict[str, Any]]) -> float:
    """The reward that synchronous runs end with; of the smallest bound, if none is synchronous."""
    least = min(run["bound"] for run in runs)
    reward: float = statistics.mean(
        reward for run in runs if run["bound"] == least for reward in run["reward"][-max(1, len(run["reward"]) // 4) :]
    )
    return reward


def first_within(run: dict[str, Any], level: float) -> float | None:
    """Seconds until the smoothed reward is at a level for the first time; None if it never is."""
    reached = zip(run["elapsed_s"], smooth(run["reward"]), strict=True)
    full = WINDOW if len(run["reward"]) >= WINDOW else 1
    return next((at_s for i, (at_s, mean) in enumerate(reached, 1) if i >= full and mean >= level), None)


def table(runs: list[dict[str, Any]], delta: float) -> list[str]:
    """A row for each bound, means over seeds."""
    level = plateau(runs)
    lines = [
        f"Plateau of the synchronous runs: {level:.3f}.",
        "",
        f"| bound | seeds | tokens/s | lag, mean | inter | intra | within {delta:g} of plateau after | last reward |",
        "|---" * 8 + "|",
    ]
    for bound in sorted({run["bound"] for run in runs}):
        own = [run for run in runs if run["bound"] == bound]
        times = [first_within(run, level - delta) for run in own]
        reached = [at_s for at_s in times if at_s is not None]
        when = f"{statistics.mean(reached):,.0f} s" if reached else "never"
        if reached and len(reached) < len(own):
            when += f" ({len(reached)} of {len(own)})"
        rate, lag = (statistics.mean(run[name] for run in own) for name in ("tokens_per_s", "lag"))
        last = statistics.mean(smooth(run["reward"])[-1] for run in own)
        lines.append(
            f"| {bound} | {len(own)} | {rate:,.0f} | {lag:.2f} | {_mean_lag(own, 'inter'):.2f} | "
            f"{_mean_lag(own, 'intra'):.2f} | {when} | {last:.3f} |"
        )
    return lines


def _mean_lag(runs: list[dict[str, Any]], kind: str) -> float:
    lag: float = statistics.mean(sum(lag * share for lag, share in enumerate(run[kind])) for run in runs)
    return lag


def head(job: Path, settings: list[str]) -> list[str]:
    changed = [setting for setting in settings if not setting.startswith("runs_dir=")]
    settled = f" with `{', '.join(changed)}`" if changed else ""
    return [
        "# Time to quality by staleness bound",
        "",
        f"`{job}`{settled}:",
        "each bound with the same workers and seeds, one run after the other (`python -m benchmarks.time_to_quality`).",
        "Bound 0 is synchronous. Lag is what occurred, in versions: *inter* from a response's newest token to the step",
        "that trains it, *intra* from its oldest token to its newest; the bound holds for their sum. Rewards are of",
        f"training batches, means of the last {WINDOW}.",
        "",
    ]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward over time, one line for each bound and seed, and the shares of lags by bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    bounds = sorted({run["bound"] for run in runs})
    for number, bound in enumerate(bounds):
        color = matplotlib.colormaps["viridis"](number / max(1, len(bounds) - 1))
        own = [run for run in runs if run["bound"] == bound]
        for run in own:
            first = run is own[0]
            left.plot(run["elapsed_s"], smooth(run["reward"]), color=color, label=f"bound {bound}" if first else None)
        for kind, style in (("inter", "-"), ("intra", ":")):
            most = max(len(run[kind]) for run in own)
            mean = [statistics.mean(run[kind][i] if i < len(run[kind]) else 0.0 for run in own) for i in range(most)]
            right.plot(range(most), mean, style, marker="o", markersize=3, color=color, label=f"{kind}, bound {bound}")
    left.axhline(plateau(runs), color="black", linewidth=0.8)
    left.set_xlabel("seconds")
    left.set_ylabel(f"reward, mean of {WINDOW} batches")
    right.set_xlabel("lag, versions")
    right.set_ylabel("share of responses trained on")
    left.legend(fontsize=7)
    right.legend(fontsize=6)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

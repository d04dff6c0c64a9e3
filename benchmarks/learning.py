"""Does asynchrony cost reward, and does the engine matter? The demo's job, synchronous and at eta 1 and 3, or with
each engine (--by engine), three seeds each, evaluated on held-out prompts before and after. Prints a Markdown table;
the runs stay in runs/ and each is audited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")

from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore

SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "eta": {
        "synchronous": ("staleness.admission=synchronous", "staleness.eta=0"),
        "eta 1": ("staleness.eta=1",),
        "eta 3": ("staleness.eta=3",),
    },
    "engine": {
        "transformers": (),
        "vllm": ("rollout.engine.name=vllm",),
        "vllm, cache kept": ("rollout.engine.name=vllm", "rollout.on_pull=keep"),
    },
}


def summary_of_run(job: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Run a job, audit its store, and return its summary. A run whose summary exists is not run again."""
    config = loading.load(job, (f"name={name}", "cluster.dashboard=false", *overrides))
    if not (config.run_dir / "summary.json").exists():
        end = asyncio.run(execute(config, RunListener()))
        if end.stop_reason:  # a run takes a signal as its own; the table has no use for half a run
            raise SystemExit(f"{config.run_dir} was stopped ({end.stop_reason}); remove it and start again")
    findings = audit(VersionedStore.open(config.run_dir / "store")).findings
    assert not findings, findings
    summary: dict[str, Any] = json.loads((config.run_dir / "summary.json").read_text())
    return summary


def mean_and_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, default=Path("examples/demo.toml"))
    parser.add_argument("--by", choices=SETTINGS, default="eta")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: whether it works")
    args = parser.parse_args()
    prefix = "learning"
    if args.quick:
        args.seeds, prefix = args.seeds[:1], "learning-quick"
        args.set += ["steps=2", "task.eval_prompts=8", "batch.groups_per_step=4"]
    print("| | before, sampled | after, sampled | after, greedy | mean staleness | seconds | audit |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for label, overrides in SETTINGS[args.by].items():
        results = [
            summary_of_run(args.job, f"{prefix}-{label.replace(' ', '-')}-{s}", (f"seed={s}", *overrides, *args.set))
            for s in args.seeds
        ]
        before = [r["evaluations"][0]["sampled"] for r in results]
        sampled = [r["evaluations"][-1]["sampled"] for r in results]
        greedy = [r["evaluations"][-1]["greedy"] for r in results]
        counts = [{int(k): n for k, n in r["staleness_histogram"].items()} for r in results]
        stale = [sum(k * n for k, n in c.items()) / sum(c.values()) for c in counts]
        seconds = [r["seconds"]["wall_s"] for r in results]
        print(
            f"| {label} | {statistics.mean(before):.3f} | {mean_and_spread(sampled)} | {mean_and_spread(greedy)} | "
            f"{statistics.mean(stale):.2f} | {statistics.mean(seconds):.0f} | clean |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""The simulator against the real system, and the system's own overhead, on this machine's embedded cluster.

    python benchmarks/reality.py emulated      the demo's shape: real actors, emulated engine, against simulate
    python benchmarks/reality.py overhead      8 instances, 2,000 trajectories: what the system costs, and where
    python benchmarks/reality.py short         the same with the demo's 30-token responses, where messages weigh most
    python benchmarks/reality.py transformers  the demo's job and engine, after `staleflow profile`, against simulate

Real and simulated runs are compared by seconds for the same steps, consumed tokens, staleness and commands.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

from staleflow.cli.simulate import profile
from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.profiling.latencies import LatencyTracker
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.pipeline.simulator.analysis import SimulationStats, Trace, compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun

DEMO = "examples/demo.toml"
EMULATED = (
    # The demo's shape; its decode steps on one CPU core, rounded; responses as long as the trained model's.
    "rollout.engine.name=emulated", "steps=40", "training.checkpoint_every=0", "cluster.dashboard=false",
    "rollout.cost.k1=2e-7", "rollout.cost.k2=0.0", "rollout.cost.b=0.003", "rollout.cost.k3=0.00012",
    "rollout.cost.k4=0.0", "rollout.cost.prefill=0.00003", "workload.median=30", "workload.sigma=0.3",
    "workload.prompt_tokens=20", "simulation.train_s=1.0", "simulation.pull_s=0.02", "simulation.reward_s=0.02",
    "simulation.report_s=0.5",
)  # fmt: skip
OVERHEAD = (
    "name=overhead", "rollout.engine.name=emulated", "cluster.dashboard=false", "steps=16", "batch.groups_per_step=16",
    "batch.group_size=8", "staleness.eta=2", "rollout.instances=8", "rollout.max_new_tokens=2000",
    "rollout.on_pull=keep", "rollout.engine.max_running=64",
    "rollout.engine.kv_tokens=1000000", "workload.median=300", "workload.sigma=0.8", "workload.prompt_tokens=200",
    "simulation.train_s=3.0", "simulation.pull_s=0.1", "simulation.reward_s=0.0", "simulation.report_s=0.5",
)  # fmt: skip


SHORT = (*EMULATED, "simulation.reward_s=0.0")
"""Nothing is slow but what the emulated engine and trainer wait for themselves: decoding, loading weights, a step."""


def real(config: RunConfig) -> dict[str, Any]:
    shutil.rmtree(config.run_dir, ignore_errors=True)
    return asyncio.run(execute(config, RunListener())).summary


def simulated(config: RunConfig) -> tuple[SimulationStats, Trace]:
    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    return compute_stats(config, trace), trace


def compare(summary: dict[str, Any], m: SimulationStats, trace: Trace) -> None:
    """A table of both runs."""
    tokens = sum(s.tokens for s in trace.steps)
    real_s, simulated_s = summary["seconds"]["wall_s"], trace.steps[-1].finished_s
    rates = summary["tokens_per_s"], m.tokens_per_s
    print(f"{'':28}{'real':>14}{'simulated':>14}")
    print(f"{'seconds':28}{real_s:14.2f}{simulated_s:14.2f}")
    print(f"{'consumed tokens':28}{summary['response_tokens']:14,}{tokens:14,}")
    print(f"{'tokens per second':28}{rates[0]:14,.0f}{rates[1]:14,.0f}   {rates[1] / rates[0] - 1:+.1%}")
    print(f"{'staleness':28}{summary['staleness_histogram']!s:>14}  {m.staleness}")
    for name in sorted({*summary["commands"], *m.command_counts}):
        print(f"{name:28}{summary['commands'].get(name, 0):14,}{m.command_counts.get(name, 0):14,}")


def with_latencies(config: RunConfig, measured: dict[str, Any]) -> RunConfig:
    return dataclasses.replace(config, simulation=dataclasses.replace(config.simulation, **measured))


def emulated(quick: bool) -> None:
    """Latencies of this machine from a short run with one seed; a longer run with another seed is then foretold."""
    short = loading.load(DEMO, ("name=reality-latencies", *EMULATED, f"steps={2 if quick else 12}", "seed=1"))
    real(short)
    tracker = LatencyTracker()
    for entry in journal.JournalReader(short.run_dir / "events.jsonl"):
        tracker.observe(entry.now, entry.event, entry.commands)
    measured = tracker.means
    print("measured in a shorter run with another seed:", {k: round(v, 4) for k, v in measured.items()})
    config = loading.load(DEMO, ("name=reality-emulated", *EMULATED, *(("steps=3",) if quick else ())))
    foretold = simulated(with_latencies(config, measured))
    summary = real(config)
    compare(summary, *foretold)
    print("cost model, measured over predicted:", summary["cost_model"]["measured_over_predicted"])


def overhead(quick: bool) -> None:
    config = loading.load(DEMO, (*OVERHEAD, *(("steps=2", "rollout.instances=2") if quick else ())))
    costs(config)


def short(quick: bool) -> None:
    config = loading.load(DEMO, ("name=short", *SHORT, *(("steps=2",) if quick else ())))
    at_once = dataclasses.replace(config, simulation=dataclasses.replace(config.simulation, pull_s=0.0))
    wall_s = costs(config)
    ideal_s = simulated(at_once)[1].steps[-1].finished_s
    share = wall_s / ideal_s - 1
    print(f"{share:.2%} of {ideal_s:.2f} s, if an engine loaded weights at once; the job has it take a while")


def costs(config: RunConfig) -> float:
    """Print what the system adds to the seconds of a job, and where; returns the seconds of the real run."""
    m, trace = simulated(config)
    before_s = time.process_time()
    summary = real(config)
    cpu_s = time.process_time() - before_s
    compare(summary, m, trace)
    ideal_s, seconds = trace.steps[-1].finished_s, summary["seconds"]
    wall_s: float = seconds["wall_s"]
    print(f"\noverhead: {wall_s / ideal_s - 1:.2%} of the ideal (simulated) {ideal_s:.2f} s")
    parts = {
        "deciding, all events": seconds["decide_s"],
        "instances wait though work is routed (commands, payloads)": seconds["rollout_idle_with_work_s"],
        "trainer waits though a batch is ready (batch transfer)": seconds["trainer_overhead_s"],
        "publishing weights": seconds["publish_s"],
        "commits, beside the run": seconds["commit_s"],
    }
    for what, part in parts.items():
        print(f"  {part:7.2f} s  {part / wall_s:6.2%}  {what}")
    num_sampled = summary["commands"]["Score"]
    print(
        f"driver and scheduler, start and end included: {cpu_s:.2f} CPU-s, {cpu_s / num_sampled * 1e3:.2f} ms a "
        f"trajectory; while it trains: {seconds['driver_cpu_s'] / num_sampled * 1e3:.2f} ms"
    )
    return wall_s


def transformers(quick: bool) -> None:
    """The demo's job with one instance, foretold from `staleflow profile` of a short run with another seed, in which
    trainer, server and engine shared cores."""
    overrides = (f"steps={3 if quick else 40}", "rollout.instances=1", "task.eval_prompts=0", "cluster.dashboard=false")
    config = loading.load(DEMO, ("name=reality-transformers", *overrides))
    path = Path("runs/reality-profile.json")
    short = loading.load(DEMO, ("name=reality-short", *overrides, f"steps={3 if quick else 20}", "seed=1"))
    real(short)
    profile.main([str(short.run_dir), "--out", str(path)], standalone_mode=False)
    measured = json.loads(path.read_text())["latencies"]
    summary = real(config)
    emulated = ("rollout.engine.name=emulated", f"profile={path}", "simulation.report_s=0.5")
    lengths = ("workload.kind=recorded", f"workload.run={config.run_dir}")
    job = loading.load(DEMO, ("name=reality-transformers", *overrides, *emulated, *lengths))
    compare(summary, *simulated(with_latencies(job, measured)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("emulated", "overhead", "short", "transformers"))
    parser.add_argument("--quick", action="store_true", help="few steps: whether it works")
    args = parser.parse_args()
    {"emulated": emulated, "overhead": overhead, "short": short, "transformers": transformers}[args.what](args.quick)


if __name__ == "__main__":
    main()

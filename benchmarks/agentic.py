"""Episodes of many turns in virtual time, in the settings that ROLL Flash (arXiv 2510.11345) gives, with the
coordinator that runs on clusters.

    python -m benchmarks.agentic --out docs

writes agentic.json, agentic.md and agentic.png. What the paper does not give is assumed, and named in the page. --quick
does a little of it: whether it works.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.routing_rules import ROUTING_RULES
from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.simulator.analysis import Trace, compute_stats
from staleflow.pipeline.simulator.baselines import Credits, with_admission
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.emulation.batch_simulator import SimulatedBatch

UNLIMITED: dict[str, Any] = {
    "hosts": 16, "concurrency": 4096, "step_timeout_s": 1e6, "episode_timeout_s": 1e7, "max_turns": 1000,
}  # fmt: skip
AGENT: dict[str, Any] = {
    "task": {"multi_turn": "yes"},
    "batch": {"groups_per_step": 32, "group_size": 8},
    "staleness": {"admission": "synchronous", "eta": 0},
    "rollout": {
        "instances": 8, "max_new_tokens": 30_000, "routing": ROUTING_RULES["least_requests"], "on_pull": "keep",
        "engine": {"name": "emulated", "max_running": 128, "kv_tokens": 500_000},
    },
    "environment": UNLIMITED,
    "deadlines": {"stuck_s": 1e7},
    "workload": {
        "kind": "agentic", "prompt_tokens": 500, "median": 2000.0, "sigma": 0.3, "turns": 20.0, "fixed_turns": True,
        "tool_s": 10.0, "tool_latency": "normal", "tool_spread": 10.0, "tool_tokens": 100,
    },
    "simulation": {"train_s": 0.001, "reward_s": 0.0, "pull_s": 0.0, "report_s": 5.0},
}  # fmt: skip
"""A 7B model on eight instances; each response is about 2,000 tokens in 20 turns."""


def job(*tables: dict[str, Any], base: dict[str, Any] | None = None) -> RunConfig:
    """The base with tables laid over it, key by key."""
    tree: dict[str, Any] = {}
    for layer in (AGENT if base is None else base, *tables):
        for name, value in layer.items():
            tree[name] = _over(tree.get(name, {}), value) if isinstance(value, dict) else value
    return loading.from_tree(tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        merged[name] = _over(merged.get(name, {}), value) if isinstance(value, dict) else value
    return merged


def simulated(config: RunConfig) -> Trace:
    return SimulatedRun(config, actor_settings.make_workload(config)).run()


def rollout_s(config: RunConfig) -> float:
    """Mean seconds from one batch's training to the next batch, of synchronous steps."""
    trace = simulated(config)
    begins = [0.0, *(step.finished_s for step in trace.steps)]
    return sum(step.ready_s - begin for step, begin in zip(trace.steps, begins, strict=False)) / len(trace.steps)


# -- what environments cost a rollout -----------------------------------------------------------------------------


def lock_step(turns: int, groups: int, steps: int) -> dict[str, Any]:
    """Environments in lock step against environments that each go on when they can; latency N(10, 10)."""
    tables = {
        "steps": steps,
        "batch": {"groups_per_step": groups},
        "workload": {"turns": turns, "median": 100.0 * turns},
    }
    locked, free = (rollout_s(job(tables, {"simulation": {"lock_step": value}})) for value in (True, False))
    return {
        "part": "lock_step", "turns": turns, "trajectories": groups * 8, "locked_s": locked, "free_s": free,
        "ratio": locked / free,
    }  # fmt: skip


REDUNDANT = ((32, 8), (36, 8), (32, 9), (36, 9), (36, 12))
FAILING: dict[str, dict[str, Any]] = {
    "no failures": {},
    "a step in 1,000 hangs": {"simulation": {"hung_step_share": 0.001}, "environment": {"step_timeout_s": 200.0}},
    "a step in 200 hangs": {"simulation": {"hung_step_share": 0.005}, "environment": {"step_timeout_s": 200.0}},
}
"""A step that is never answered is given up after 200 s, and its episode begins again."""


def redundancy(failing: str, groups: int, members: int, steps: int) -> dict[str, Any]:
    """More groups and members started than the 32 x 8 that are trained; latency N(10, 5), four turns."""
    tables = {
        "steps": steps,
        "batch": {"extra_groups": groups - 32, "extra_members": members - 8},
        "workload": {"turns": 4.0, "median": 400.0, "tool_spread": 5.0},
    }
    config = job(tables, FAILING[failing])
    trace = simulated(config)
    begins = [0.0, *(step.finished_s for step in trace.steps)]
    seconds = [step.ready_s - begin for step, begin in zip(trace.steps, begins, strict=False)]
    return {
        "part": "redundancy", "failing": failing, "groups": groups, "members": members,
        "seconds": sum(seconds) / len(seconds), "most_s": max(seconds), "acts": trace.command_counts["StepEnvironment"],
        "dismissed": trace.command_counts.get("CloseEnvironment", 0), "ended": trace.ending_counts,
    }  # fmt: skip


# -- asynchronous training ----------------------------------------------------------------------------------------

JOBS: dict[str, dict[str, Any]] = {
    "ALFWorld-like": {
        "batch": {"groups_per_step": 16, "group_size": 8},
        "workload": {
            "turns": 25.0, "fixed_turns": False, "median": 2500.0, "sigma": 0.8, "tool_s": 2.0,
            "tool_latency": "lognormal", "tool_spread": 1.0, "tool_tokens": 100,
        },
    },
    "SWE-like": {
        "batch": {"groups_per_step": 8, "group_size": 8},
        "workload": {
            "turns": 30.0, "fixed_turns": False, "median": 6000.0, "sigma": 0.6, "tool_s": 5.0, "reset_s": 30.0,
            "tool_latency": "lognormal", "tool_spread": 1.0, "tool_tokens": 400,
        },
    },
}  # fmt: skip
RULES = {"credits, alpha 0.5": Credits(alpha=0.5), "credits, alpha 2": Credits(alpha=2.0)}
"""Admission rules of other systems, which no job can name."""
ROLLOUT_SHARE = 0.7
"""Share of a synchronous step that is rollout: the paper says more than 70 %."""
BEST_SYNCHRONOUS = "synchronous, in turns"
SYSTEMS: dict[str, dict[str, Any]] = {
    "synchronous, lock step": {"simulation": {"lock_step": True}},
    "synchronous": {},
    BEST_SYNCHRONOUS: {"rollout": {"instances": 16}, "cluster": {"layout": "turns"}},
    "bound 1": {"staleness": {"admission": "staleflow", "eta": 1}},
    "bound 2": {"staleness": {"admission": "staleflow", "eta": 2}},
    "bound 2, redundant": {
        "staleness": {"admission": "staleflow", "eta": 2}, "batch": {"extra_groups": 2, "extra_members": 1},
    },
    "credits, alpha 0.5": {"staleness": {"eta": 1}},
    "credits, alpha 2": {"staleness": {"eta": 2}},
}  # fmt: skip


SMALL = {"batch": {"groups_per_step": 4}}
"""Laid over a job by --quick."""


def training_s(name: str) -> float:
    """Seconds of a training step by which rollout takes its share of a synchronous step."""
    return rollout_s(job(JOBS[name], {"steps": 4})) * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE


def asynchronous(name: str, system: str, train_s: float, steps: int, *, quick: bool) -> dict[str, Any]:
    """A job under one system, with pulls of 2 s."""
    on_all_gpus = system == BEST_SYNCHRONOUS
    tables = {"steps": steps, "simulation": {"train_s": train_s / 2 if on_all_gpus else train_s, "pull_s": 2.0}}
    config = job(JOBS[name], tables, SYSTEMS[system], SMALL if quick else {})
    if rule := RULES.get(system):
        config = with_admission(config, rule)
    m = compute_stats(config, simulated(config))
    dropped = {key: n for key, n in m.ending_counts.items() if key != "consumed" and not key.endswith("run_ended")}
    return {
        "part": "asynchronous", "job": name, "system": system, "step_s": m.step_s, "train_s": train_s,
        "bound_kept": m.bound_kept, "staleness": {str(k): n for k, n in m.staleness.items()},
        "consumed": m.ending_counts["consumed"], "dropped": dropped, "trainer_idle": m.trainer_idle_share,
    }  # fmt: skip


# -- prefix reuse -------------------------------------------------------------------------------------------------


def prefix(routing: str, kv_tokens: int, steps: int, *, affinity: bool, quick: bool) -> dict[str, Any]:
    """A ten-turn job under bound 1, with and without affinity."""
    tables = {
        "steps": steps,
        "batch": {"groups_per_step": 32, "group_size": 8},
        "staleness": {"admission": "staleflow", "eta": 1},
        "rollout": {"routing": ROUTING_RULES[routing], "cache_affinity": affinity, "engine": {"kv_tokens": kv_tokens}},
        "workload": {"turns": 10.0, "median": 4000.0, "tool_s": 5.0, "tool_spread": 2.0, "tool_tokens": 300},
        "simulation": {"train_s": 40.0, "pull_s": 2.0},
    }
    config = job(tables, SMALL if quick else {})
    trace = simulated(config)
    m = compute_stats(config, trace)
    new = sum(instance.work.new_prefill_tokens for instance in trace.instances)
    context = new + m.cached_tokens + m.reprefilled_tokens
    return {
        "part": "prefix", "routing": routing, "kv_tokens": kv_tokens, "affinity": affinity, "step_s": m.step_s,
        "prefilled": (context - m.cached_tokens) / context, "cached": m.cached_tokens / (context - new),
        "prefill_share": m.prefill_share, "most_kept": m.max_kept_tokens,
    }  # fmt: skip


# -- single turns: queue scheduling, prompt replication -----------------------------------------------------------

RLVR: dict[str, Any] = {
    "batch": {"groups_per_step": 8, "group_size": 8},
    "staleness": {"admission": "synchronous", "eta": 0},
    "rollout": {
        "instances": 8, "max_new_tokens": 8192, "routing": ROUTING_RULES["least_requests"], "on_pull": "keep",
        "engine": {"name": "emulated", "max_running": 16, "kv_tokens": 500_000},
    },
    "workload": {"median": 1500.0, "sigma": 0.8, "signal_share": 0.5},
    "simulation": {"train_s": 0.001, "reward_s": 1.0, "pull_s": 0.0, "report_s": 1.0},
}  # fmt: skip
"""Responses of at most 8,192 tokens; half of the groups have a signal."""


def batch_scheduled_s(seed: int, extra: int) -> float:
    """Seconds until 8 groups with a signal are there if a batch of 8 + extra is sampled, all of it scored, what has no
    signal dropped, and a batch of as many as are missing, + extra, drawn after it."""
    seconds, kept, number = 0.0, 0, 0
    while kept < 8:
        groups = 8 - kept + extra
        config = job({"seed": 1000 * seed + number, "steps": 1, "batch": {"groups_per_step": groups}}, base=RLVR)
        workload = actor_settings.make_workload(config)
        kept += sum(len({workload.reward(g, m) for m in range(8)}) > 1 for g in range(groups))
        seconds += simulated(config).steps[0].ready_s
        number += 1
    return seconds


def queue_scheduling(extra: int, runs: int) -> dict[str, Any]:
    """8 groups of 8 with filtering, sampled in batches or as a queue."""
    queued = [
        rollout_s(
            job({"seed": seed, "steps": 1, "batch": {"filtering": "no_signal", "extra_groups": extra}}, base=RLVR)
        )
        for seed in range(runs)
    ]
    batches = [batch_scheduled_s(seed, extra) for seed in range(runs)]
    return {
        "part": "queue", "extra": extra, "batch_s": sum(batches) / runs, "queue_s": sum(queued) / runs,
    }  # fmt: skip


def replication(groups: int, members: int, runs: int) -> dict[str, Any]:
    """Members of a group sampled side by side on one instance, or placed apart."""
    tables = {"batch": {"groups_per_step": groups, "group_size": members}, "workload": {"group_correlation": 0.7}}
    together, apart = [], []
    for seed in range(runs):
        config = job(tables, {"seed": seed, "steps": 1}, base=RLVR)
        apart.append(rollout_s(config))
        together.append(_together_s(config))
    return {
        "part": "replication", "groups": groups, "members": members, "together_s": sum(together) / runs,
        "apart_s": sum(apart) / runs,
    }  # fmt: skip


def _together_s(config: RunConfig) -> float:
    """Seconds until all responses of a batch have ended if each group goes, as one request, to the next instance."""
    engine, workload = config.rollout.engine, actor_settings.make_workload(config)
    instances = [
        SimulatedBatch(config.rollout.cost, kv_capacity=engine.kv_tokens, max_running=engine.max_running)
        for _ in range(config.rollout.instances)
    ]
    for group in range(config.batch.groups_per_step):
        for member in range(config.batch.group_size):
            instances[group % len(instances)].submit(
                0.0, group * config.batch.group_size + member, 1, 512, 0, workload.turns(group, member)
            )
    return max(f.at_s for instance in instances for f in instance.advance(1e9)) + config.simulation.reward_s


Call = partial[dict[str, Any]]

# -- the page -----------------------------------------------------------------------------------------------------


def work(*, quick: bool) -> list[Call]:
    """Everything that is simulated, as calls."""
    steps = 1 if quick else 4
    calls: list[Call] = []
    for turns, groups in [(4, 4)] if quick else [(11, 32), (21, 32), (21, 64), (21, 128), (31, 64), (41, 32)]:
        calls.append(partial(lock_step, turns, groups, steps))
    for kind in list(FAILING)[1:2] if quick else FAILING:
        for groups, members in REDUNDANT[::3] if quick else REDUNDANT:
            calls.append(partial(redundancy, kind, groups, members, 1 if quick else 12))
    for routing in ["random"] if quick else ["random", "least_requests", "throughput_optimal"]:
        for kv_tokens in [40_000] if quick else [40_000, 500_000]:
            for affinity in (True, False):
                calls.append(partial(prefix, routing, kv_tokens, 2 if quick else 8, affinity=affinity, quick=quick))
    for extra in [0] if quick else [0, 16]:
        calls.append(partial(queue_scheduling, extra, 1 if quick else 12))
    for groups, members in [(4, 4)] if quick else [(32, 16), (64, 16), (16, 64)]:
        calls.append(partial(replication, groups, members, 1 if quick else 6))
    for name in list(JOBS)[:1] if quick else JOBS:
        train_s = 60.0 if quick else training_s(name)
        for system in [BEST_SYNCHRONOUS, "bound 1"] if quick else SYSTEMS:
            calls.append(partial(asynchronous, name, system, train_s, 2 if quick else 10, quick=quick))
    return calls


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(r) + " |" for r in rows), ""]


def page(results: list[dict[str, Any]]) -> str:
    """The page of all results, as Markdown."""

    def of(part: str) -> list[dict[str, Any]]:
        return [r for r in results if r["part"] == part]

    lines = [HEAD, LOCK_STEP]
    lines += table(
        ["turns, trajectories", "lock step, s", "each on its own, s", "ratio"],
        [
            [f"{r['turns']}, {r['trajectories']}", f"{r['locked_s']:.0f}", f"{r['free_s']:.0f}", f"{r['ratio']:.2f}"]
            for r in of("lock_step")
        ],
    )
    lines += [REDUNDANCY, *table(["seconds a batch", *(f"{g} x {m}" for g, m in REDUNDANT)], _redundancy(of))]
    names = list(dict.fromkeys(r["job"] for r in of("asynchronous")))
    head = [cell for name in names for cell in (f"{name}: s a step (ratio)", "discarded")]
    lines += [ASYNCHRONOUS, *table(["system", *head], _asynchronous(of("asynchronous"), names))]
    lines += [PREFIX]
    lines += table(
        ["engine", "KV tokens", "cached with affinity", "without", "s a step with", "without"],
        _affinity([r for r in of("prefix") if r["routing"] == "least_requests"] + of("prefix_real")),
    )
    return "\n".join(lines).rstrip() + "\n"


def _redundancy(of: Callable[[str], list[dict[str, Any]]]) -> list[list[str]]:
    rows = []
    for kind in FAILING:
        seconds = {(r["groups"], r["members"]): r["seconds"] for r in of("redundancy") if r["failing"] == kind}
        cells = [
            f"{seconds[shape]:.0f} ({seconds[32, 8] / seconds[shape]:.1f})" if shape in seconds else ""
            for shape in REDUNDANT
        ]
        rows += [[kind, *cells]] if seconds else []
    return rows


def _asynchronous(results: list[dict[str, Any]], names: list[str]) -> list[list[str]]:
    runs = {(r["job"], r["system"]): r for r in results}
    rows = []
    for system in dict.fromkeys(r["system"] for r in results):
        cells = []
        for name in names:
            r, base = runs[name, system], runs[name, BEST_SYNCHRONOUS]
            dropped = sum(r["dropped"].values())
            cells += [f"{r['step_s']:.0f} ({base['step_s'] / r['step_s']:.2f})"]
            cells += [f"{dropped / (r['consumed'] + dropped):.1%}"]
        rows.append([system, *cells])
    return rows


def _affinity(results: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each engine and cache, with affinity and without."""
    pairs: dict[tuple[str, int], dict[bool, dict[str, Any]]] = {}
    for r in results:
        name = f"`{r.get('engine', 'emulated')}`"
        pairs.setdefault((name, r["kv_tokens"]), {})[r["affinity"]] = r
    rows = []
    for (name, kv_tokens), pair in pairs.items():
        sides = [pair.get(affinity, {}) for affinity in (True, False)]
        cached = [f"{r['cached']:.1%}" if r else "" for r in sides]
        seconds = [f"{r['step_s']:.0f}" if "step_s" in r else "" for r in sides]
        rows.append([name, f"{kv_tokens:,}", *cached, *seconds])
    return rows


HEAD = """\
# Agents in virtual time

ROLL Flash's experiments (arXiv 2510.11345), simulated with the coordinator of real runs: `python -m
benchmarks.agentic --out docs` (agentic.json). The paper gives no numbers of turns or tokens and no engine. Assumed
here: a 7B model on eight instances, prompts of 500 tokens, 100 tokens a turn and an observation, `on_pull = "keep"`,
routing to the fewest requests (`least_requests`). Ratios depend on these.

![Seconds a batch and steps per second](agentic.png)
"""
LOCK_STEP = """\
## Environments that do not wait for each other

Latency N(10, 10) s. In lock step no environment takes its next turn before all of the batch have replied. The paper:
892 to 362 s, 2.46 times.
"""
REDUNDANCY = """\
## Redundant environments

Latency N(10, 5) s, four turns, 32 x 8 trained; what is surplus is aborted. The paper: 243 s for 32 x 8, 45 s for 36 x
9 (5.4 times), 46 s for 36 x 12, without saying how often environments hang; here a step that hangs is given up after
200 s. In brackets: times as fast as 32 x 8 of the same row.
"""
ASYNCHRONOUS = f"""\
## Asynchronous training

Training takes {1 - ROLLOUT_SHARE:.0%} of a synchronous step, on eight GPUs of its own. ALFWorld-like: 16 x 8, 25 turns,
latency 2 s (median, lognormal). SWE-like: 8 x 8, 30 turns, 5 s, 30 s to reset. Redundant: two groups and one member
more. `credits` is ROLL Flash's rule. The bound held in all runs. Ratios are to synchronous training in turns on all 16
GPUs, without lock step. The paper: 2.72 on ALFWorld (2.27 without redundancy), 1.81 on SWE (1.68).
"""
PREFIX = """\
## Cached contexts

Share of the context computed before that a turn finds cached, bound 1, with and without `rollout.cache_affinity`; a
pull drops what is cached. Simulated (`emulated`): ten turns, 32 x 8. Real engines on CPUs
(`python -m benchmarks.prefix`): a tiny model, two instances, 8 x 4.
"""


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of the three comparisons with the paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    locked = [r for r in results if r["part"] == "lock_step"]
    names = [f"{r['turns']} turns\n{r['trajectories']}" for r in locked]
    for shift, key, label in ((-0.2, "locked_s", "lock step"), (0.2, "free_s", "each on its own")):
        left.bar([i + shift for i in range(len(locked))], [r[key] for r in locked], 0.38, label=label)
    left.set_xticks(range(len(names)), names, fontsize=7)
    left.set(title="latency N(10, 10)", ylabel="seconds a batch")
    left.legend(fontsize=7)
    for number, kind in enumerate(FAILING):
        own = [r for r in results if r["part"] == "redundancy" and r["failing"] == kind]
        middle.bar([i + 0.27 * (number - 1) for i in range(len(own))], [r["seconds"] for r in own], 0.25, label=kind)
        if own:
            middle.set_xticks(range(len(own)), [f"{r['groups']} x {r['members']}" for r in own], fontsize=7)
    middle.set(title="latency N(10, 5), 32 x 8 trained", ylabel="seconds a batch")
    middle.legend(fontsize=7)
    for number, name in enumerate(JOBS):
        own = [r for r in results if r["part"] == "asynchronous" and r["job"] == name]
        base = next((r["step_s"] for r in own if r["system"] == BEST_SYNCHRONOUS), 0.0)
        places = [i + 0.4 * (number - 0.5) for i in range(len(own))]
        right.barh(places, [base / r["step_s"] for r in own], 0.38, label=name)
        if own:
            right.set_yticks(range(len(own)), [r["system"] for r in own], fontsize=6)
    right.invert_yaxis()
    right.axvline(1, color="black", linewidth=0.8)
    right.set(title="steps per second, in turns = 1")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="one setting of each part, few steps")
    parser.add_argument("--part", default="", help="one part only; other results are kept")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "agentic.json"
    begin = time.perf_counter()
    calls = [call for call in work(quick=args.quick) if args.part in ("", call.func.__name__)]
    if args.quick:  # a process takes longer to start
        results = [call() for call in calls]
    else:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            results = [future.result() for future in [pool.submit(call) for call in calls]]
    if path.exists():  # keep what was not done, that of real engines (benchmarks/prefix.py) too
        replaced = {r["part"] for r in results}
        results += [r for r in json.loads(path.read_text()) if r["part"] not in replaced]
    path.write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "agentic.md").write_text(page(results))
    draw(results, args.out / "agentic.png")
    print(page(results))
    print(f"{len(calls)} simulations, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()

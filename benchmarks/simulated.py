"""Every strategy against every baseline in virtual time: published cost models, three workloads, two sizes.

    python benchmarks/simulated.py --out docs

writes simulated.json, simulated.md and two pictures. No baseline is weakened: where a rule has a knob it gets a small
sweep and its best value counts, and every system keeps the KV cache over a weight update (rollout.on_pull = "keep").
staleflow's row is one fixed setting for all models and workloads. --quick does a little of it: whether it works.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import actor_settings, deciding, fields, loading
from pipeline.config.schema import RunConfig
from pipeline.simulator.body import SimulatedRun
from pipeline.simulator.measure import measure

MODELS = {
    # Decode-step fits published with StaleFlow (PSRL, Apache-2.0; seconds). prefill: k3, see
    # tasks/engines/cost_model.py. kv_tokens: a 96 GB GPU's memory (two for the 32B model) at 90 %, less bfloat16
    # weights, over the model's KV bytes a token.
    "7B": {"k1": 3.35e-08, "k2": 0.0064, "b": 0.0027, "k3": 0.0001231, "k4": 0.0028, "kv_tokens": 1_240_000},
    "14B": {"k1": 1.165e-07, "k2": 0.012303, "b": 0.0049075, "k3": 0.0002441, "k4": 0.0019663689, "kv_tokens": 290_000},
    "32B": {"k1": 6.3e-08, "k2": 0.0250194, "b": 0.0183826, "k3": 0.0002446, "k4": 2e-10, "kv_tokens": 410_000},
    "30B-A3B": {"k1": 7.28e-08, "k2": 0.0115108, "b": 0.0097899, "k3": 0.0001249, "k4": 0.0008671926,
                "kv_tokens": 250_000},
}  # fmt: skip
WORKLOADS: dict[str, dict[str, Any]] = {
    "lognormal": {"kind": "lognormal", "median": 2000.0, "sigma": 1.0},
    "bimodal": {"kind": "bimodal", "median": 1000.0, "long_share": 0.15, "long_ratio": 15.0},
    "agentic": {"kind": "agentic", "median": 2000.0, "sigma": 1.0, "turns": 5.0, "tool_s": 5.0, "tool_tokens": 200},
}
GROUPS_AN_INSTANCE = 8
"""Groups of 8 a step for each instance: 64 trajectories."""
STEPS = 18
"""Of which eight are measured at a bound of 3: two cycles of the longest."""
TRAINER_SHARE = 0.8
"""Training takes the physical minimum of the rollout over this: provisioned so that rollout may run at 80 % of it."""
OURS = ("rollout.routing=deadline", "rollout.synchronization=greedy")
CUT = ("batch.stragglers=truncate", "batch.straggler_patience=0.1")
"""Once the trainer has waited a tenth of a step for its last groups, unfinished responses are scored as they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """system: whose rule. knob: the value of what is swept for it, for people."""

    system: str
    knob: str
    eta: int
    overrides: tuple[str, ...]
    keeps_bound: bool = True


def rows_of(size: int) -> list[Row]:
    """All rows at 16 instances; at 128 the ones that were best at 16, and the plain ones."""
    least, greedy, status = (
        "rollout.routing=least_requests",
        "rollout.synchronization=greedy",
        "rollout.synchronization=status",
    )
    sync = ("staleness.admission=synchronous", least, greedy)
    rows = [
        Row("synchronous", "", 0, sync),
        Row("synchronous, colocated", "", 0, (*sync, "simulation.colocated=true")),
        *(
            Row("one_step", rule.rpartition("=")[2], 1, ("staleness.admission=one_step", least, rule))
            for rule in (greedy, status)
        ),
    ]
    alphas = (0.5, 1.0, 2.0, 3.0) if size == 16 else (3.0,)
    for alpha in alphas:
        extra = ("staleness.admission=credits", f"staleness.alpha={alpha}", least, greedy)
        rows.append(Row("credits", f"alpha {alpha:g}", max(1, int(-(-alpha // 1))), extra))
    for eta in (1, 2, 3) if size == 16 else (3,):
        rows.append(Row("backlog", "", eta, ("staleness.admission=backlog", least, greedy), keeps_bound=False))
        routings = [
            ("random", "rollout.routing=random"),
            ("round_robin", "rollout.routing=round_robin"),
            ("least_requests", least),
        ]  # fmt: skip
        for name, routing in routings if size == 16 else []:
            rows.append(Row("reservations, " + name, "", eta, (routing, greedy)))
        for mu in (0.1, 0.2, 0.3) if size == 16 else (0.2,):
            extra = ("rollout.routing=throughput_optimal", f"rollout.mu={mu}", greedy)
            rows.append(Row("reservations, throughput_optimal", f"mu {mu:g}", eta, extra))
        rows.append(Row("staleflow", "", eta, OURS))
        if eta == 3:
            rows.append(Row("staleflow, stragglers cut", "", eta, (*OURS, *CUT)))
        if eta == 3 and size == 16:
            for name in ("status", "hypothesis"):
                extra = ("rollout.routing=deadline", f"rollout.synchronization={name}")
                rows.append(Row(f"staleflow, {name} pulls", "", eta, extra))
    return rows


def job(model: str, workload: str, size: int, row: Row, steps: int) -> RunConfig:
    """The simulated job of one row."""
    fit = dict(MODELS[model])
    kv_tokens = int(fit.pop("kv_tokens"))
    gpus = 2 if model == "32B" else 1
    tree: dict[str, Any] = {
        "name": f"{model}-{workload}-{size}",
        "steps": steps,
        "seed": 1,
        "batch": {"groups_per_step": GROUPS_AN_INSTANCE * size, "group_size": 8},
        "staleness": {"eta": row.eta},
        "rollout": {
            "instances": size,
            "max_new_tokens": 16_000,
            "on_pull": "keep",
            "engine": {"name": "emulated", "max_running": 256, "kv_tokens": kv_tokens},
            "cost": {**fit, "prefill": fit["k3"]},
        },
        "workload": WORKLOADS[workload],
        "simulation": {"report_s": 5.0, "pull_s": 2.0, "gpus_per_instance": gpus, "trainer_gpus": size * gpus},
    }
    for override in row.overrides:
        fields.apply_override(tree, override)
    tree["simulation"]["train_s"] = least_work_s(loading.from_tree(tree)) / TRAINER_SHARE
    return loading.from_tree(tree)


def least_work_s(config: RunConfig) -> float:
    """Seconds that decoding and prefilling an average batch takes all (rollout) instances at their best rate."""
    cost, workload, members = deciding.cost_model(config), actor_settings.make_workload(config), config.members_started
    tokens = context = prefilled = count = 0.0
    for group in range(256):
        for member in range(members):
            held = workload.prompt_tokens(group)
            prefilled += held
            for turn in workload.turns(group, member):
                context += held * turn.tokens + turn.tokens * (turn.tokens - 1) / 2
                tokens += turn.tokens
                prefilled += turn.tool_tokens
                held += turn.tokens + turn.tool_tokens
            count += 1
    engine = config.rollout.engine
    running = max(1, int(min(engine.max_running, engine.kv_tokens / (context / tokens))))
    seconds = cost.k1 * context + cost.compute_s(running) / running * tokens + cost.prefill * prefilled
    return seconds / count * config.trajectories_per_step / config.rollout.instances


def run_row(model: str, workload: str, size: int, row: Row, steps: int) -> dict[str, Any]:
    begin = time.perf_counter()
    config = job(model, workload, size, row, steps)
    trace = SimulatedRun(config, actor_settings.make_workload(config)).run()
    m = measure(config, trace)
    total = sum(m.staleness.values())
    return {
        "model": model, "workload": workload, "instances": size, "system": row.system, "knob": row.knob, "eta": row.eta,
        "keeps_bound": row.keeps_bound, "bound_kept": m.bound_kept, "step_s": m.step_s,
        "steady_tokens_per_s": m.steady_tokens_per_s,
        "train_s": m.bound.train_s, "work_s": m.bound.work_s, "longest_s": m.bound.longest_s, "of_bound": m.of_bound,
        "trainer_idle": m.trainer_idle, "rollout_idle": m.rollout_idle, "prefill_share": m.prefill_share,
        "staleness": {str(k): v / total for k, v in m.staleness.items()}, "ended": m.ended,
        "wasted_share": m.wasted_tokens / max(1, m.sampled_tokens), "preemptions": m.preemptions,
        "commands": m.commands, "simulated_in_s": time.perf_counter() - begin,
    }  # fmt: skip


def best(results: list[dict[str, Any]], system: str) -> dict[str, Any]:
    """The row of this system's best value."""
    return max((r for r in results if r["system"] == system), key=lambda r: r["steady_tokens_per_s"])


SETTING = f"""\
Setting: {GROUPS_AN_INSTANCE} groups of 8 per step for each instance, prompts of 512 tokens, responses cut at 16,000, at
most 256 running per instance, the KV cache kept over weight updates. Training takes the rollout's physical minimum over
{TRAINER_SHARE:g}, on as many GPUs as rollout has; colocated, both use all of these GPUs in turn. Numbers are tokens
trained on per second, as a ratio to the synchronous column, where rollout and training take turns on GPUs of their
own. In brackets: the setting that was best for the rule. `credits` drops work that is too old, mostly long responses;
`backlog` (AReaL) trains on it; staleflow waits for it, or, under "stragglers cut", ends the last unfinished responses
of a step with the tokens they have once the trainer has waited a tenth of a step for them.
"""
SHOWN = {
    "synchronous, colocated": "colocated",
    "one_step": "one_step",
    "credits": "credits",
    "backlog": "backlog (no bound)",
    "reservations, throughput_optimal": "throughput_optimal",
}
ROUTINGS = ("random", "round_robin", "least_requests", "throughput_optimal")


def tables(results: list[dict[str, Any]]) -> str:
    """Markdown: each size's systems at their best up to a bound of 3, then what the bound and the routing bring."""
    lines = ["# Simulated: every strategy against every baseline", "", SETTING]
    for size in sorted({r["instances"] for r in results}):
        lines += [f"## {size} instances", "", *systems_table([r for r in results if r["instances"] == size]), ""]
    lines += ["## Gain of the bound and of routing", "", "16 instances, ratio to synchronous.", ""]
    lines += ["| model | workload | bound | " + " | ".join(ROUTINGS) + " | deadline |", "|---" * 8 + "|"]
    for own, model, workload in combinations([r for r in results if r["instances"] == 16]):
        base = best(own, "synchronous")["steady_tokens_per_s"]
        for eta in (1, 2, 3):
            at = [r for r in own if r["eta"] == eta]
            tops = [best(at, f"reservations, {name}")["steady_tokens_per_s"] for name in ROUTINGS]
            tops.append(best(at, "staleflow")["steady_tokens_per_s"])
            lines.append(f"| {model} | {workload} | {eta} | " + " | ".join(f"{t / base:.2f}" for t in tops) + " |")
    return "\n".join(lines) + "\n"


def systems_table(results: list[dict[str, Any]]) -> list[str]:
    head = [
        "model",
        "workload",
        "synchronous, tokens/s",
        *SHOWN.values(),
        "**staleflow**",
        "of the bound",
        "**stragglers cut**",
        "responses cut",
        "dropped by credits",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    ratios, over_colocated, shares, cuts, ahead, cut_ahead = [], [], [], [], 0, 0
    for own, model, workload in combinations(results):
        base, colocated = (
            best(own, system)["steady_tokens_per_s"] for system in ("synchronous", "synchronous, colocated")
        )
        ours = best([r for r in own if r["eta"] == 3], "staleflow")
        ratios.append(ours["steady_tokens_per_s"] / base)
        over_colocated.append(ours["steady_tokens_per_s"] / colocated)
        shares.append(ours["of_bound"])
        rivals = [best(own, s) for s in ("synchronous", "synchronous, colocated", "one_step", "credits")]
        cut = best(own, "staleflow, stragglers cut")
        cuts.append(cut["steady_tokens_per_s"] / base)
        ahead += all(ours["steady_tokens_per_s"] > r["steady_tokens_per_s"] for r in rivals)
        cut_ahead += all(cut["steady_tokens_per_s"] > r["steady_tokens_per_s"] for r in rivals)
        cells = []
        for system in SHOWN:
            top = best(own, system)
            knob = top["knob"] or (f"eta {top['eta']}" if top["eta"] else "")
            cells.append(f"{top['steady_tokens_per_s'] / base:.2f}" + (f" ({knob})" if knob else ""))
        credits = best(own, "credits")
        dropped = sum(n for reason, n in credits["ended"].items() if "too_stale" in reason or "surplus" in reason)
        cut_share = cut["commands"].get("Interrupt", 0) / cut["ended"]["consumed"]
        dropped_share = dropped / (dropped + credits["ended"]["consumed"])
        lines.append(
            f"| {model} | {workload} | {base:,.0f} | {' | '.join(cells)} | **{ratios[-1]:.2f}** | "
            f"{ours['of_bound']:.0%} | **{cuts[-1]:.2f}** | {cut_share:.1%} | {dropped_share:.0%} |"
        )
    count = len(ratios)
    lines += [
        "",
        f"staleflow, bound 3: {sum(ratios) / count:.2f} times synchronous on average, {max(ratios):.2f} at most, "
        f"{min(ratios):.2f} at least; {sum(over_colocated) / count:.2f} times colocated on average, "
        f"{max(over_colocated):.2f} at most; {sum(shares) / count:.0%} of the physical bound on average. Ahead of "
        f"every baseline that keeps the bound on {ahead} of {count} lines. With stragglers cut {sum(cuts) / count:.2f} "
        f"times synchronous on average, and ahead on {cut_ahead}.",
    ]
    return lines


def combinations(results: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], str, str]]:
    """The rows of each model and workload."""
    for model, workload in sorted({(r["model"], r["workload"]) for r in results}):
        yield [r for r in results if (r["model"], r["workload"]) == (model, workload)], model, workload


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Bars: each system's best, ratio to synchronous, a panel a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    colors = ("#d9d9d9", "#969696", "#fdae6b", "#fdd0a2", "#9ecae1", "#08519c")
    labels = {**SHOWN, "staleflow": "staleflow"}
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = dict(zip(WORKLOADS, figure.subplots(1, len(WORKLOADS), sharey=True), strict=True))
    models = sorted({r["model"] for r in results})
    for own, model, workload in combinations([r for r in results if r["instances"] == 16]):
        base = best(own, "synchronous")["steady_tokens_per_s"]
        for i, (system, label) in enumerate(labels.items()):
            height = best(own, system)["steady_tokens_per_s"] / base
            where = models.index(model) + (i - 2.5) * 0.14
            panels[workload].bar(where, height, 0.13, color=colors[i], label=label if model == models[0] else None)
    for workload, axes in panels.items():
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(models)), models)
        axes.set_title(workload)
    first = panels[next(iter(WORKLOADS))]
    first.set_ylabel("tokens/s, synchronous = 1")
    first.legend(fontsize=7)
    figure.suptitle("16 instances, each system at its best value up to a bound of 3", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="one model and workload, four instances, few steps")
    parser.add_argument("--resume", action="store_true", help="keep the rows that simulated.json has already")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 128])
    args = parser.parse_args()
    models = ["7B"] if args.quick else list(MODELS)
    sizes = [4] if args.quick else args.sizes
    workloads, steps = (list(WORKLOADS)[:1], 4) if args.quick else (list(WORKLOADS), STEPS)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "simulated.json"
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() and args.resume else []
    known = {key_of(r) for r in results}
    work = [
        (model, workload, size, row, steps)
        for size in sizes for model in models for workload in workloads for row in rows_of(size)
        if (size, model, workload, row.system, row.knob, row.eta) not in known
    ]  # fmt: skip
    begin = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, done in enumerate(as_completed([pool.submit(run_row, *w) for w in work]), 1):
            results.append(done.result())
            if number % 10 == 0 or number == len(work):
                path.write_text(json.dumps(sorted(results, key=key_of), indent=1) + "\n")
                print(f"{number} of {len(work)} rows, {time.perf_counter() - begin:.0f} s", flush=True)
    (args.out / "simulated.md").write_text(tables(results))
    draw(results, args.out / "simulated.png")
    print(tables(results))


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("instances", "model", "workload", "system", "knob", "eta"))


if __name__ == "__main__":
    main()

"""Every strategy against every baseline in virtual time: published cost models, three workloads, two sizes, means over
seeds.

    python -m benchmarks.simulated --out docs

writes simulated.json, simulated.png and, with the results of benchmarks/ablation.py, simulated.md. No baseline is
weakened: where a rule has a knob it gets a small sweep and its best value counts, and every system keeps the KV cache
over a weight update (rollout.on_pull = "keep"). The rows of staleflow have the same settings for all models and
workloads. The sweeps are run with the first seed, and the best of each with all. --resume keeps the rows that
simulated.json has; rows are run seed by seed, the short table first. --quick does a little of it: whether it works.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ablation
from benchmarks.admission_rules import OverProvision, PipelineDepth, WindowedFifo
from benchmarks.routing_rules import ROUTING_RULES
from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.baselines import (
    Backlog,
    Credits,
    OneStep,
    with_admission,
)
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.pipeline.strategies.admission import Admission
from staleflow.tasks.emulation.cost_model import Numbers

MODELS = {
    # Decode-step fits published with StaleFlow (PSRL, Apache-2.0; seconds). prefill: k3, see
    # tasks/emulation/cost_model.py. kv_tokens: a 96 GB GPU's memory (two for the 32B model) at 90 %, less bfloat16
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
UNTUNED: dict[str, dict[str, Any]] = {"power_law": {"kind": "power_law", "median": 800.0, "exponent": 1.2}}
"""Workloads that no rule was chosen on."""
GROUPS_AN_INSTANCE = 8
"""Groups of 8 a step for each instance: 64 trajectories."""
STEPS = 36
"""Of which 24 are measured at a bound of 3: six cycles of the longest. With 12, most of it is the pipeline filling."""
SEEDS = (1, 2, 3)
SIZES = (4, 16)
SWEPT = (4,)
"""Sizes at which knobs are swept, and their best values run with all seeds; above, these values run with one seed."""
TRAINER_SHARE = 0.8
"""Training takes the physical minimum of the rollout over this: provisioned so that rollout may run at 80 % of it."""
CUT = ("batch.stragglers=truncate", "batch.stragglers.patience=0.1", "batch.stragglers.share=0.02")
"""Once the trainer has waited a tenth of a step for its last responses, and these are no more than 2 %, they are scored
as they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """system: whose rule. knob: the value of what is swept for it, for people."""

    system: str
    knob: str
    eta: int
    overrides: tuple[str, ...]
    rule: Admission | None = None
    """Another system's admission rule."""

    @property
    def keeps_bound(self) -> bool:
        return self.rule is None or self.rule.keeps_bound


LEAST_REQUESTS = f"rollout.routing={ROUTING_RULES['least_requests']}"
CUTTING = "staleflow, stragglers cut"
AUTHORS = "reservations, throughput_optimal"
"""StaleFlow as its authors route."""
LARGE = 64
"""Instances of a few more runs of `deadline` and of the authors' rule."""


def short_rows() -> list[Row]:
    """What the default is measured against on every line: plain reservations, the best synchronous run, and ROLL's."""
    sync = ("staleness.admission=synchronous", LEAST_REQUESTS)
    return [
        Row("synchronous", "", 0, sync),
        *(Row("reservations, least_requests", "", eta, (LEAST_REQUESTS,)) for eta in (0, 1, 2, 3)),
        *(Row("staleflow", "", eta, ()) for eta in (0, 1, 2, 3)),
        Row("credits", "alpha 3", 3, (LEAST_REQUESTS,), Credits(alpha=3.0)),
        Row(CUTTING, "", 3, CUT),
    ]


def long_rows(swept: bool) -> list[Row]:
    """The other baselines, each over a small sweep of its knob, and the other routing rules under reservations."""
    rows = [
        Row("synchronous", "deadline", 0, ("staleness.admission=synchronous",)),
        Row(
            "synchronous", "redundancy", 0, ("staleness.admission=synchronous", LEAST_REQUESTS, "batch.extra_groups=1")
        ),
        Row(
            "synchronous, in turns", "", 0, ("staleness.admission=synchronous", LEAST_REQUESTS, "cluster.layout=turns")
        ),
        Row("one_step", "", 1, (LEAST_REQUESTS,), OneStep()),
    ]
    for alpha in (0.5, 1.0, 2.0) if swept else ():
        rows.append(
            Row("credits", f"alpha {alpha:g}", max(1, int(-(-alpha // 1))), (LEAST_REQUESTS,), Credits(alpha=alpha))
        )
    for depth in (1.0, 2.0, 3.0, 4.0) if swept else (3.0, 4.0):
        rows.append(Row("pipeline_depth", f"depth {depth:g}", 3, (LEAST_REQUESTS,), PipelineDepth(depth=depth)))
    for ahead, share in ((0, 1.0), (1, 0.3), (1, 1.0), (2, 0.3)) if swept else ((1, 1.0), (2, 0.3)):
        window = WindowedFifo(ahead=ahead, window_share=share)
        rows.append(Row("windowed_fifo", f"S {ahead}, {share:g}", 3, (LEAST_REQUESTS,), window))
    for excess in (0.5, 1.0, 2.0) if swept else (2.0,):
        rows.append(
            Row("over_provision", f"{1 + excess:g} batches", 3, (LEAST_REQUESTS,), OverProvision(excess=excess))
        )
    for eta in (1, 2, 3) if swept else (3,):
        rows.append(Row("backlog", f"eta {eta}", eta, (LEAST_REQUESTS,), Backlog(eta=eta)))
    for eta in (1, 2, 3) if swept else ():
        rows.append(Row("reservations, random", "", eta, (f"rollout.routing={ROUTING_RULES['random']}",)))
    for eta in (1, 2, 3) if swept else ():
        rows += [authors(mu, eta) for mu in (0.1, 0.2, 0.3)]
    rows += [] if swept else [authors(0.1, 3)]
    rows += [Row("interrupt", "", eta, ("rollout.on_pull=interrupt",)) for eta in (1, 2, 3) if swept]
    return rows


def authors(mu: float, eta: int) -> Row:
    """A row of StaleFlow's rule."""
    extra = (f"rollout.routing={ROUTING_RULES['throughput_optimal']}", f"rollout.routing.mu={mu}")
    return Row(AUTHORS, f"mu {mu:g}", eta, extra)


def job(model: str, workload: str, size: int, row: Row, steps: int, seed: int = 1) -> RunConfig:
    """The simulated job of one row."""
    fit = dict(MODELS[model])
    kv_tokens = int(fit.pop("kv_tokens"))
    tree: dict[str, Any] = {
        "name": f"{model}-{workload}-{size}",
        "steps": steps,
        "seed": seed,
        "batch": {"groups_per_step": GROUPS_AN_INSTANCE * size, "group_size": 8},
        "staleness": {"eta": row.eta},
        "rollout": {
            "instances": size,
            "max_new_tokens": 16_000,
            "on_pull": "keep",
            "engine": {"name": "emulated", "max_running": 256, "kv_tokens": kv_tokens},
            "cost": {**fit, "prefill": fit["k3"]},
        },
        "workload": (WORKLOADS | UNTUNED)[workload],
        "simulation": {"report_s": 10.0, "pull_s": 2.0},
    }
    for override in row.overrides:
        knob_tree.apply_override(tree, override)
    tree["simulation"]["train_s"] = least_work_s(loading.from_tree(tree)) / TRAINER_SHARE
    config = loading.from_tree(tree)
    if config.shares_gpus:  # both have the GPUs of both
        tree["rollout"]["instances"] *= 2
        tree["simulation"]["train_s"] /= 2
        config = loading.from_tree(tree)
    return config if row.rule is None else with_admission(config, row.rule)


def responses_of(config: RunConfig, num_groups: int) -> Numbers:
    """The first responses of a job, of shape [groups, members, 4]: sampled tokens, context tokens summed over these,
    prefilled tokens, and seconds of tools."""
    workload, members = actor_settings.make_workload(config), config.members_started_per_group
    responses = np.zeros((num_groups, members, 4))
    for group, member in np.ndindex(num_groups, members):
        length = prefilled = workload.prompt_tokens(group)
        tokens = context = tool_s = 0.0
        for turn in workload.turns(group, member):
            context += length * turn.tokens + turn.tokens * (turn.tokens - 1) / 2
            tokens += turn.tokens
            tool_s += turn.tool_s
            prefilled += turn.tool_tokens
            length += turn.tokens + turn.tool_tokens
        responses[group, member] = tokens, context, prefilled, tool_s
    return responses


def least_work_s(config: RunConfig) -> float:
    """Seconds that decoding and prefilling an average batch takes all (rollout) instances at their best rate."""
    cost, engine = config.rollout.cost, config.rollout.engine
    tokens, context, prefilled, _ = responses_of(config, 256).mean((0, 1))
    running = max(1, int(min(engine.max_running, engine.kv_tokens / (context / tokens))))
    seconds = cost.k1 * context + cost.compute_s(running) / running * tokens + cost.prefill * prefilled
    return float(seconds) * config.trajectories_per_step / config.rollout.instances


def fluid_step_s(config: RunConfig, responses: Numbers | None = None) -> float:
    """Seconds of a step in the fluid limit: every instance always runs an equal share, and the trainer waits for the
    longest response of each step, which has eta + 1 steps without the training of the last.

    Args:
        config: The job.
        responses: Those of all its steps, as `responses_of` returns them; None: the job's.
    """
    if responses is None:
        responses = responses_of(config, config.steps * config.batch.groups_per_step)
    cost, train_s, intervals = config.rollout.cost, config.simulation.train_s, config.staleness.eta + 1
    per_instance = config.trajectories_per_step / config.rollout.instances
    tokens, context, prefilled, _ = responses.mean((0, 1)) * per_instance
    by_step = responses.reshape(config.steps, -1, 4)

    def lacks_time(step_s: float) -> bool:
        decode_s = step_s - config.simulation.pull_s - cost.k1 * context - cost.prefill * prefilled
        num_decode_steps = min(decode_s / (cost.k2 + cost.k4), (decode_s - cost.k3 * tokens) / (cost.b + cost.k4))
        if num_decode_steps <= 0:
            return True
        longest_s = (by_step[..., 0] * (step_s / num_decode_steps) + by_step[..., 3]).max(1).mean()
        return bool(longest_s > intervals * step_s - train_s)

    low_s, high_s = train_s, 16 * train_s
    while lacks_time(low_s) and high_s - low_s > 1e-3 * train_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if lacks_time(middle_s) else (low_s, middle_s)
    return low_s


def run_row(model: str, workload: str, size: int, row: Row, steps: int, seed: int) -> dict[str, Any]:
    gc.disable()  # a run makes millions of objects and no circles; one collection after it is enough
    begin_s = time.process_time()
    config = job(model, workload, size, row, steps, seed)
    m = compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run())
    gc.collect()
    total = sum(m.staleness.values())
    return {
        "model": model, "workload": workload, "instances": size, "system": row.system, "knob": row.knob, "eta": row.eta,
        "seed": seed, "keeps_bound": row.keeps_bound, "bound_kept": m.bound_kept, "step_s": m.step_s,
        "steady_tokens_per_s": m.steady_tokens_per_s,
        "train_s": m.step_time_bound.train_s, "work_s": m.step_time_bound.work_s,
        "longest_s": m.step_time_bound.longest_s,
        "of_bound": m.share_of_step_time_bound,
        **({"fluid_s": fluid_step_s(config)} if (row.system, row.eta) == ("staleflow", 3) else {}),
        "trainer_idle": m.trainer_idle_share, "rollout_idle": m.rollout_idle_share,
        "staleness": {str(k): v / total for k, v in m.staleness.items()}, "ended": m.ending_counts,
        "wasted_share": m.wasted_tokens / max(1, m.sampled_tokens), "preemptions": m.preemptions,
        "commands": m.command_counts, "cpu_s": time.process_time() - begin_s,
    }  # fmt: skip


BySeed = dict[int, float]
"""Tokens/s by seed."""
Rates = dict[tuple[str, str, int], BySeed]
"""By (system, knob, eta)."""


def rates_of(results: list[dict[str, Any]]) -> Rates:
    """The rates of one model, workload and size."""
    collected: Rates = {}
    for r in results:
        collected.setdefault((r["system"], r["knob"], r["eta"]), {})[r["seed"]] = r["steady_tokens_per_s"]
    return collected


def best(rates: Rates, system: str, eta: int | None = None) -> tuple[BySeed, str]:
    """A system's rates at its best setting, by the seed that all settings were run with; eta: at this bound only.
    ({}, "") if it was not run."""
    fits = {k: v for k, v in rates.items() if k[0] == system and eta in (None, k[2])}
    key = max(fits, key=lambda k: fits[k].get(SEEDS[0], 0.0), default=None)
    return (fits[key], key[1]) if key else ({}, "")


def best_synchronous(rates: Rates) -> BySeed:
    """The rates of the best synchronous run, by the seed that all settings were run with; empty if one was not run."""
    runs = [best(rates, system)[0] for system in SYNCHRONOUS]
    return max(runs, key=lambda by_seed: by_seed.get(SEEDS[0], 0.0)) if all(runs) else {}


def ratio(rates: BySeed, base: BySeed) -> float:
    """One rate over another, over the seeds that both were run with; 0 if there is none."""
    both = rates.keys() & base.keys()
    return sum(rates[s] for s in both) / sum(base[s] for s in both) if both else 0.0


HEAD = f"""\
# Simulated throughput

The coordinator of real runs on simulated instances, without a GPU (`python -m benchmarks.simulated --out docs`;
simulated.json has every run).

| | |
|---|---|
| models | 7B, 14B, 32B, 30B-A3B: decode-step times published with StaleFlow (arXiv 2601.12784; PACMMOD, 2026) |
| lengths | lognormal: median 2,000, sigma 1; bimodal: median 1,000, 15 % of them 15 times as long; agentic: lognormal \
in five turns, tools of 5 s |
| tokens | 512 a prompt, at most 16,000 a response |
| batch | {GROUPS_AN_INSTANCE} groups of 8 for each instance, {STEPS} steps |
| rollout | 4 or 16 instances of at most 256 running; `on_pull = "keep"`, the default, unless stated |
| training | on as many GPUs as rollout; a step takes the rollout's roofline / {TRAINER_SHARE:g} |
| seconds | 2 for a pull; instances report every 10 |

## Rules

Tokens/s trained on, as a ratio to the best synchronous run with as many GPUs (rollout and training on all of them in
turns, or on half of them each with `least_requests`, `deadline` or one redundant group): mean over 12 combinations of
model and lengths (least-most), three seeds or as stated. Each rule is at its best of the values tried (with 16
instances only the last one or two), with routing to the fewest requests unless named, `eta` 3 at most.
"""
SHOWN = {
    "synchronous, in turns": "in turns",
    "one_step": "one_step",
    "pipeline_depth": "pipeline_depth",
    "windowed_fifo": "windowed_fifo",
    "credits": "credits",
    "backlog": "backlog (no bound)",
    "over_provision": "over_provision (no bound)",
}
KEPT = ("synchronous, in turns", "one_step", "pipeline_depth", "windowed_fifo", "credits")
PLAIN = "reservations, least_requests"
SYNCHRONOUS = ("synchronous, in turns", "synchronous")
SETTINGS: tuple[tuple[str, int | None, str, str], ...] = (
    ("synchronous", None, "`synchronous`", ""),
    ("synchronous, in turns", None, "`synchronous`, in turns on all GPUs", ""),
    ("one_step", None, "`one_step`", ""),
    ("pipeline_depth", None, "`pipeline_depth`", "`depth` 1, 2, 3, 4"),
    ("windowed_fifo", None, "`windowed_fifo`", "`ahead`, `window_share`: 0, 1; 1, .3; 1, 1; 2, .3"),
    ("credits", None, "`credits`", "`alpha` .5, 1, 2, 3"),
    ("over_provision", None, "`over_provision`, keeps no bound", "`excess` .5, 1, 2"),
    ("backlog", None, "`backlog`, keeps no bound", "`eta` 1, 2, 3"),
    (PLAIN, 3, "`staleflow`", "`eta` 3"),
    (AUTHORS, 3, "`staleflow`, routing of StaleFlow's authors", "`eta` 3, `mu` .3, .2, .1"),
    *(("staleflow", eta, "the default: `staleflow`, `deadline`", f"`eta` {eta}") for eta in (1, 2, 3)),
    (CUTTING, None, "the same, stragglers truncated", "`eta` 3, `patience` .1, `share` .02"),
    ("interrupt", 3, 'the default with `on_pull = "interrupt"`', "`eta` 3"),
)
"""system, eta (None: its best), and what the page says: the rule and the values tried."""


def page(results: list[dict[str, Any]], long_tail: list[dict[str, Any]]) -> str:
    """The page of all results, as Markdown. long_tail: those of benchmarks/ablation.py."""
    results = [r for r in results if r["workload"] in WORKLOADS and r["instances"] != LARGE]
    sizes = sorted({r["instances"] for r in results})
    lines = [HEAD, f"| `admission` | tried | {' | '.join(f'{size} instances' for size in sizes)} |"]
    lines += ["|---" * (2 + len(sizes)) + "|"]
    for system, eta, rule, tried in SETTINGS:
        cells = [_cell([r for r in results if r["instances"] == size], system, eta) for size in sizes]
        if any(cells):
            lines.append(f"| {rule} | {tried} | {' | '.join(cells)} |")
    lines += ["", "`deadline` at `eta` 3 against the best other rule that keeps the bound, by more than 1 %:", ""]
    for size in sizes:
        lines += _margins([r for r in results if r["instances"] == size], size)
    lines += _details(results)
    lines += ["", "![Ratio to synchronous by model, lengths and rule](simulated.png)", ""]
    lines += ablation.section(long_tail) if long_tail else []
    return "\n".join(lines).rstrip() + "\n"


def _cell(results: list[dict[str, Any]], system: str, eta: int | None) -> str:
    """The mean ratio to synchronous over models and workloads, with the least, the most and the seeds."""
    ratios, seeds = [], set()
    for own, _, _ in combinations(results):
        rates = rates_of(own)
        rate, base = best(rates, system, eta)[0], best_synchronous(rates)
        if rate and base:
            ratios.append(ratio(rate, base))
            seeds.add(len(rate))
    if not ratios:
        return ""
    text = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    if seeds == {len(SEEDS)}:
        return text
    return text + (", one seed" if seeds == {1} else f", {min(seeds)}-{max(seeds)} seeds")


def _margins(results: list[dict[str, Any]], size: int) -> list[str]:
    """`staleflow` with `deadline` at bound 3 against the best other rule that keeps the bound, over the same seeds."""
    margins: list[tuple[float, str]] = []
    for own, model, workload in combinations(results):
        rates = rates_of(own)
        ours = best(rates, "staleflow", 3)[0]
        rivals = {system: ratio(ours, rate) for system in KEPT if (rate := best(rates, system)[0])}
        if ours and rivals:
            rival = min(rivals, key=rivals.__getitem__)
            margins.append((rivals[rival], f"`{rival}`, {model}, {workload}"))
    if not margins:
        return []
    values = [margin for margin, _ in margins]
    ahead, behind = sum(v > 1.01 for v in values), sum(v < 0.99 for v in values)
    level = len(values) - ahead - behind
    return [
        f"- {size} instances: ahead on {ahead} of {len(values)} combinations, level on {level}, behind on {behind}; "
        f"{min(margins)[0]:.3f} at least",
        f"  ({min(margins)[1]}).",
    ]


def _details(results: list[dict[str, Any]]) -> list[str]:
    """What routing gains, truncation truncates and `credits` discards, and the share of the roofline."""
    sizes = sorted({r["instances"] for r in results})
    parts = [own for size in sizes for own, _, _ in combinations([r for r in results if r["instances"] == size])]
    gains = [
        ratio(*pair)
        for rates in map(rates_of, parts)
        for eta in (0, 1, 2, 3)
        if all(pair := [best(rates, system, eta)[0] for system in ("staleflow", PLAIN)])
    ]
    lines = []
    if gains:
        lines += [
            "- `deadline` over `least_requests`, `eta` 0 to 3: on average",
            f"  {statistics.mean(gains):.3f} times ({min(gains):.3f} to {max(gains):.3f}).",
        ]
    shares = [r["commands"].get("Interrupt", 0) / r["ended"]["consumed"] for r in results if r["system"] == CUTTING]
    if shares:
        lines.append(f"- Truncation ends at most {max(shares):.1%} of the responses of a run.")
    stale = []
    for own in parts:
        runs = [r["ended"] for r in own if (r["system"], r["knob"]) == ("credits", "alpha 3")]
        discarded = sum(n for ended in runs for why, n in ended.items() if "too_stale" in why)
        if runs:
            stale.append(discarded / (discarded + sum(ended["consumed"] for ended in runs)))
    if stale:
        lines.append(f"- `credits` with `alpha` 3 discards {min(stale):.0%} to {max(stale):.0%} of its responses.")
    if reached := [r["of_bound"] for r in results if (r["system"], r["eta"]) == ("staleflow", 3)]:
        share = f"{statistics.mean(reached):.0%} ({min(reached):.0%} to {max(reached):.0%})"
        fluid = [r["fluid_s"] / r["step_s"] for r in results if (r["system"], r["eta"]) == ("staleflow", 3)]
        lines += [
            f"- `deadline` at `eta` 3 reaches {share} of the roofline of its job, and "
            f"{statistics.mean(fluid):.0%} ({min(fluid):.0%} to {max(fluid):.0%})",
            "  of its fluid limit: all instances always run equal shares, and steps wait for the longest response.",
        ]
    return lines


def combinations(results: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], str, str]]:
    """The rows of each model and workload."""
    for model, workload in sorted({(r["model"], r["workload"]) for r in results}):
        yield [r for r in results if (r["model"], r["workload"]) == (model, workload)], model, workload


COLORS = ("#d9d9d9", "#969696", "#c7e9c0", "#74c476", "#fdae6b", "#fdd0a2", "#fee6ce", "#08519c")


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Bars: each system's best, ratio to synchronous, a panel a workload, of the size with the most systems run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    systems_run = {(r["instances"], r["system"]) for r in results}
    size = max(SIZES, key=lambda size: (sum(size == one for one, _ in systems_run), size))
    results = [r for r in results if r["workload"] in WORKLOADS]
    labels = {name: shown for name, shown in {**SHOWN, "staleflow": "staleflow"}.items() if (size, name) in systems_run}
    colors = dict(zip([*SHOWN, "staleflow"], COLORS, strict=True))
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = dict(zip(WORKLOADS, figure.subplots(1, len(WORKLOADS), sharey=True), strict=True))
    models = sorted({r["model"] for r in results})
    for own, model, workload in combinations([r for r in results if r["instances"] == size]):
        rates = rates_of(own)
        base = best_synchronous(rates)
        for i, (system, label) in enumerate(labels.items()):
            where = models.index(model) + (i - (len(labels) - 1) / 2) * 0.11
            height = ratio(best(rates, system, 3 if system == "staleflow" else None)[0], base)
            panels[workload].bar(where, height, 0.1, color=colors[system], label=label if model == models[0] else None)
    for workload, axes in panels.items():
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(models)), models)
        axes.set_title(workload)
    first = panels[next(iter(WORKLOADS))]
    first.set_ylabel("tokens/s, best synchronous = 1")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"{size} instances, each system at its best value up to a bound of 3", fontsize=10)
    figure.savefig(path, dpi=110)


def work_of(
    sizes: Sequence[int], models: Sequence[str], workloads: Sequence[str], steps: int, seeds: Sequence[int]
) -> Iterator[tuple[str, str, int, Row, int, int]]:
    """All runs, the most telling first: the short table seed by seed, then the sweeps."""
    for size in sizes:
        for seed in seeds:
            for model, workload in itertools.product(models, workloads):
                for row in short_rows():
                    yield model, workload, size, row, steps, seed
    for size in sizes:
        for model, workload in itertools.product(models, workloads):
            for row in long_rows(size in SWEPT):
                yield model, workload, size, row, steps, seeds[0]


def bests_of(results: list[dict[str, Any]], seeds: Sequence[int], steps: int) -> Iterator[tuple[Any, ...]]:
    """The best of each sweep, with the seeds that are left."""
    for size in SWEPT:
        for own, model, workload in combinations([r for r in results if r["instances"] == size]):
            rates = rates_of([r for r in own if r["seed"] == seeds[0]])
            for system in ("synchronous", *SHOWN):
                found, knob = best(rates, system)
                rows = [*long_rows(swept=True), *short_rows()]
                row = next((r for r in rows if (r.system, r.knob) == (system, knob)), None)
                if found and row is not None:
                    yield from ((model, workload, size, row, steps, seed) for seed in seeds[1:])


def versus_authors(sizes: Sequence[int], models: Sequence[str], steps: int) -> Iterator[tuple[Any, ...]]:
    """Runs of `deadline` and of the authors' rule that the tables do not have: on other lengths, on more instances."""
    for model, workload, eta in itertools.product(models, UNTUNED, (1, 2, 3)):
        for row in (Row("staleflow", "", eta, ()), authors(0.1, eta)):
            yield model, workload, min(sizes), row, steps, SEEDS[0]
    for row in (Row("staleflow", "", 3, ()), authors(0.1, 3)):
        yield "7B", "lognormal", LARGE, row, steps, SEEDS[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="one model and workload, four instances, few steps")
    parser.add_argument("--resume", action="store_true", help="keep the rows that simulated.json has already")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--tables", action="store_true", help="write the page of the stored results, and run nothing")
    args = parser.parse_args()
    models = ["7B"] if args.quick else list(MODELS)
    sizes = [4] if args.quick else args.sizes
    workloads, steps = (list(WORKLOADS)[:1], 4) if args.quick else (list(WORKLOADS), STEPS)
    seeds = SEEDS[:1] if args.quick else SEEDS
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "simulated.json"
    results: list[dict[str, Any]] = []
    if path.exists() and (args.resume or args.tables):
        results = json.loads(path.read_text())
    begin_s = time.perf_counter()

    def run(work: Iterable[tuple[Any, ...]]) -> None:
        known = {key_of(r) for r in results}
        left = [w for w in work if (w[2], w[0], w[1], w[3].system, w[3].knob, w[3].eta, w[5]) not in known]
        with ProcessPoolExecutor(args.processes) as pool:
            for number, done in enumerate(as_completed([pool.submit(run_row, *w) for w in left]), 1):
                results.append(done.result())
                if number % 10 == 0 or number == len(left):
                    path.write_text(written(results))
                    print(f"{number} of {len(left)} rows, {time.perf_counter() - begin_s:.0f} s", flush=True)

    if not args.tables:
        run(work_of(sizes, models, workloads, steps, seeds))
        run(bests_of(results, seeds, steps))
        if not args.quick:
            run(versus_authors(sizes, models, steps))
    text = page(results, ablation.stored(args.out))
    (args.out / "simulated.md").write_text(text)
    draw(results, args.out / "simulated.png")
    print(text)


def written(results: list[dict[str, Any]]) -> str:
    """As JSON, one run a line."""
    return "[\n" + ",\n".join(json.dumps(result) for result in sorted(results, key=key_of)) + "\n]\n"


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("instances", "model", "workload", "system", "knob", "eta", "seed"))


if __name__ == "__main__":
    main()

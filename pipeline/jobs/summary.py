"""Summary of a run: summary.json and summary.png."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.starts import read, with_all_starts
from staleflow.pipeline.jobs.what_if import WhatIf, check_by_simulation
from staleflow.pipeline.profiling.diagnosis import Diagnosis
from staleflow.pipeline.runtime.evaluation_results import by_set, not_comparable
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.pipeline.runtime.training_alarms import least_average
from staleflow.stores.auditing.drop_bias import DropBias, bias_report
from staleflow.stores.auditing.weight_counts import WeightCounts, count_outcomes
from staleflow.stores.files import replace_file, replace_text
from staleflow.stores.metrics import STEP_METRICS, axis_title, tokens_per_s

REMEDY = "free space or move runs_dir; the run itself is stored"
STALENESS_LINES = {
    "staleness_mean": ("#08519c", 1.5),
    "staleness_max": ("#cb181d", 1),
    "staleness_in_flight": ("#807dba", 1),
    "staleness_in_queue": ("#fd8d3c", 1),
}
EVALUATION_COLOURS = (
    {"sampled": "#d94801", "greedy": "#238b45"},
    {"sampled": "#7a0177", "greedy": "#f768a1"},
    {"sampled": "#8c510a", "greedy": "#01665e"},
    {"sampled": "#525252", "greedy": "#969696"},
)
"""Colours of the evaluation sets in summary.png; further sets have the last pair."""
LENGTH_LINES = {"response_mean": ("#238b45", 1.5), "response_max": ("#a1d99b", 1)}
"""Metrics that summary.png draws in one plot, with the colour and width of each line."""


def write_report(config: RunConfig, outcomes: RunReport, run_dir: Path) -> dict[str, object]:
    """Write summary.json and, if there are steps, summary.png into the run folder; returns the summary."""
    summary = summarize(config, with_all_starts(outcomes, run_dir), run_dir)
    summary["starts"] = [{"version": start.version, "end": start.end} for start in read(run_dir)]
    if outcomes.diagnosis is not None:
        advice = check_by_simulation(run_dir, outcomes.profile, outcomes.diagnosis, config.rollout.instances)
        summary["diagnosis"] = diagnosis_entry(*advice)
    replace_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n", REMEDY)
    if outcomes.steps:
        replace_file(run_dir / "summary.png", lambda tmp_path: draw(config, outcomes, tmp_path), REMEDY)
    return summary


def summarize(config: RunConfig, outcomes: RunReport, run_dir: Path) -> dict[str, Any]:
    """Evaluations, steps, tokens, staleness histogram, seconds by phase, and dropped trajectories by reason of a
    run."""
    from staleflow.stores.trajectories.versioned import VersionedStore

    staleness: Counter[int] = Counter()
    bias: DropBias | None = None
    weights = WeightCounts()
    if (run_dir / "store").exists():  # missing if the run was stopped while its actors started
        store = VersionedStore.open(run_dir / "store")
        table = store.table()
        bias = bias_report(store)
        records = store.steps()
        weights = count_outcomes(records, {r.step + 1: r.weight_fingerprint for r in records if r.kind == "step"})
        staleness.update(int(s) for s in table["staleness"] if s >= 0)
    phases = outcomes.phases
    wall_s = max(phases.get("wall_s", 0.0), 1e-9)
    mismatch = [s for s in outcomes.steps if "mismatch_max" in s]
    clipped = [s["clip_share"] for s in outcomes.steps if "clip_share" in s]
    return {
        "name": config.name,
        "stopped": outcomes.stopped,
        "steps": len(outcomes.steps),
        "evaluations": [asdict(e) for e in outcomes.evaluations],
        "notes": outcomes.notes,
        "reward_first": outcomes.steps[0]["reward"] if outcomes.steps else None,
        "reward_last": outcomes.steps[-1]["reward"] if outcomes.steps else None,
        "trajectories_consumed": sum(staleness.values()),
        "response_tokens": int(sum(s["response_tokens"] for s in outcomes.steps)),
        "branches": int(sum(s.get("branches", 0.0) for s in outcomes.steps)),
        "tokens_per_s": tokens_per_s(outcomes.steps),
        "prefilled_tokens": int(sum(s.get("prefilled_tokens", 0.0) for s in outcomes.steps)),
        "cached_tokens": int(sum(s.get("cached_tokens", 0.0) for s in outcomes.steps)),
        "drafted_tokens": int(sum(s.get("drafted_tokens", 0.0) for s in outcomes.steps)),
        "accepted_tokens": int(sum(s.get("accepted_tokens", 0.0) for s in outcomes.steps)),
        "staleness_histogram": {str(k): staleness[k] for k in sorted(staleness)},
        "eta": config.staleness.eta,
        "ended": outcomes.snapshot.ended if outcomes.snapshot else {},
        "refusals": outcomes.snapshot.refusals if outcomes.snapshot else {},
        "seconds": {k: round(v, 3) for k, v in phases.items() if k.endswith("_s")},
        "overhead": {
            "trainer_waits_though_ready": phases.get("trainer_overhead_s", 0.0) / wall_s,
            "trainer_waits_for_resume_point": phases.get("trainer_waits_for_resume_point_s", 0.0) / wall_s,
            "rollout_idle_though_routable": phases.get("rollout_idle_with_work_s", 0.0) / wall_s,
        },
        "logprob_mismatch": {
            "mean": sum(s["mismatch_mean"] for s in mismatch) / len(mismatch) if mismatch else None,
            "max": max((s["mismatch_max"] for s in mismatch), default=None),
        },
        "training": {
            "ess_least": least_average([s["ess"] for s in outcomes.steps if "ess" in s]),
            "entropy_first": next((s["entropy"] for s in outcomes.steps if "entropy" in s), None),
            "entropy_last": next((s["entropy"] for s in reversed(outcomes.steps) if "entropy" in s), None),
            "clip_share_mean": sum(clipped) / len(clipped) if clipped else None,
            "updates_dropped": int(sum(s.get("updates_dropped", 0.0) for s in outcomes.steps)),
        },
        "tasks": [{**asdict(source), "line": source.line} for source in outcomes.sources],
        "commands": outcomes.commands,
        "cost_model": _cost_model(config, outcomes),
        "losses": outcomes.losses,
        "probe_drift": max((s["probe_drift"] for s in outcomes.steps), default=None),
        "weights": {**asdict(weights), "lines": weights.lines},
        "alarms": outcomes.alarms,
        "bias": bias.as_dict() if bias is not None else None,
    }


def _cost_model(config: RunConfig, outcomes: RunReport) -> dict[str, Any]:
    """Compare the measured time of decode steps with the prediction of the strategies' cost model.

    measured_over_predicted: the ratio of the two; None if too few steps were measured. drifted: whether the ratio
    differs from 1 by more than rollout.cost_tolerance.
    """
    ratio = outcomes.profile.fit.ratio_to(config.rollout.cost) if outcomes.profile else None
    drifted = ratio is not None and abs(ratio - 1) > config.rollout.cost_tolerance
    return {"measured_over_predicted": ratio, "drifted": drifted}


def diagnosis_entry(diagnosis: Diagnosis, expectation: WhatIf) -> dict[str, Any]:
    """The bottleneck of a run and the expected effect of a change, for summary.json. Its `line` has both as one line of
    text."""
    return {
        **diagnosis.as_dict(),
        "expected_ratio": expectation.ratio,
        "command": expectation.command,
        "line": f"{diagnosis.line}; {expectation.line}",
    }


def step_line(step: Mapping[str, float], num_steps: int, bottleneck: str = "") -> str:
    """Format a training step as one line. bottleneck: `Diagnosis.short`."""
    failed = f"  rewards failed {errors:.0f}" if (errors := step.get("reward_errors", 0.0)) else ""
    dropped = f"  updates dropped {count:.0f}" if (count := step.get("updates_dropped", 0.0)) else ""
    turns = f"turns {step['turns_mean']:.1f}  environment {step['tool_s']:.1f} s  " if step.get("given_tokens") else ""
    if turns and (branches := step.get("branches", 0.0)):
        turns += f"context forks {branches:.0f}  "
    if turns and (cached := step.get("cached_tokens", 0.0)):
        turns += f"prefix cache hits {cached / (cached + step['prefilled_tokens']):.0%}  "
    if drafted := step.get("drafted_tokens", 0.0):
        turns += f"draft acceptance {step['accepted_tokens'] / drafted:.0%}  "
    return (
        f"step {step['step']:.0f}/{num_steps}  reward {step['reward']:.3f}{failed}  "
        f"length {step['response_mean']:.1f}  {turns}"
        f"staleness {step['staleness_mean']:.2f} (max {step['staleness_max']:.0f})  loss {step['loss']:+.4f}  "
        f"grad {step['grad_norm']:.2f}{dropped}  train {step['train_s']:.2f} s  trainer wait {step['wait_s']:.2f} s  "
        f"elapsed {step['elapsed_s']:.1f} s" + (f"  {bottleneck}" if bottleneck else "")
    )


def draw(config: RunConfig, outcomes: RunReport, path: Path) -> None:
    """Plot reward, staleness, lengths and throughput over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = outcomes.steps
    x = [s["step"] for s in steps]
    figure = Figure(figsize=(11, 6.4))  # a constrained layout would draw everything twice
    place = {"left": 0.05, "right": 0.99, "bottom": 0.07, "top": 0.89, "wspace": 0.17, "hspace": 0.34}
    axes = figure.subplots(2, 2, gridspec_kw=place)
    title = f"{config.name}: eta {config.staleness.eta}, {config.staleness.admission.name}, {len(steps)} steps"
    figure.suptitle(title, fontsize=12)

    reward = axes[0][0]
    reward.plot(x, [s["reward"] for s in steps], color="#9ecae1", linewidth=1, label=STEP_METRICS["reward"].label)
    reward.plot(x, _smooth([s["reward"] for s in steps]), color="#08519c", linewidth=2, label="mean of last 10")
    colours = iter(EVALUATION_COLOURS)
    for name, same_set in by_set(outcomes.evaluations).items():
        colour = next(colours, EVALUATION_COLOURS[-1])
        for label, style in (("sampled", "o-"), ("greedy", "D--")):
            scored = [e for e in same_set if getattr(e, label) is not None]
            if scored:
                versions, means = [e.version for e in scored], [getattr(e, label) for e in scored]
                errors = [getattr(e, f"{label}_stderr") or 0.0 for e in scored]
                reward.errorbar(
                    versions, means, errors, fmt=style, color=colour[label], capsize=3, markersize=4, linewidth=1.2,
                    label=f"{name}, {label}",
                )  # fmt: skip
    title = "reward (held-out rewards cannot be compared)" if not_comparable(outcomes.evaluations) else "reward"
    reward.set(title=title, xlabel="step", ylim=(min(0.0, *(s["reward"] for s in steps)), None))
    reward.legend(fontsize=8, loc="lower right")

    stale = axes[0][1]
    for name, (color, width) in STALENESS_LINES.items():
        stale.plot(x, [s[name] for s in steps], color=color, linewidth=width, label=STEP_METRICS[name].label)
    stale.axhline(config.staleness.eta, color="#cb181d", linestyle="--", linewidth=1, label="eta")
    staleness_limit = max([config.staleness.eta, *(s["staleness_max"] for s in steps)])
    stale.set(title=axis_title("staleness", *STALENESS_LINES), xlabel="step", ylim=(-0.05, 1.5 * staleness_limit + 0.2))
    stale.legend(fontsize=7, loc="upper center", ncols=3)

    lengths = axes[1][0]
    for name, (color, width) in LENGTH_LINES.items():
        lengths.plot(x, [s[name] for s in steps], color=color, linewidth=width, label=STEP_METRICS[name].label)
    lengths.set(title=axis_title("response length", *LENGTH_LINES), xlabel="step", ylim=(0, None))
    lengths.legend(fontsize=8)

    speed = axes[1][1]
    rate = [s["tokens_per_s"] for s in steps]
    speed.plot(x, rate, color="#9ecae1", linewidth=1)
    speed.plot(x, _smooth(rate), color="#08519c", linewidth=2)
    speed.set(title=axis_title("throughput", "tokens_per_s"), xlabel="step", ylim=(0, None))
    for ax in figure.axes:
        ax.grid(alpha=0.25)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110, format="png")


def _smooth(values: list[float], span: int = 10) -> list[float]:
    return [sum(values[max(0, i - span + 1) : i + 1]) / min(i + 1, span) for i in range(len(values))]

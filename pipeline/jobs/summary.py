"""Summary of a run: summary.json and summary.png."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.forecasting import compare_forecast
from staleflow.pipeline.jobs.starts import read_start_records, sum_over_starts
from staleflow.pipeline.profiling.diagnosis import Diagnosis
from staleflow.pipeline.runtime.evaluation_results import explain_not_comparable, group_by_set
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.pipeline.runtime.step_records import lowest_average
from staleflow.stores.auditing.drop_bias import DropBias, drop_bias_of_store
from staleflow.stores.auditing.weight_counts import WeightCheckCounter, WeightCounts
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replace_text, replacing
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


def write_summary(config: RunConfig, report: RunReport, run_dir: Path) -> dict[str, object]:
    """Write summary.json and, if there are steps, summary.png into the run folder; returns the summary."""
    summary = summarize(config, sum_over_starts(report, run_dir), run_dir)
    summary["starts"] = [{"version": start.version, "end": start.end} for start in read_start_records(run_dir)]
    if report.diagnosis is not None:
        summary["diagnosis"] = make_diagnosis_entry(report.diagnosis, run_dir)
    cause = "" if report.diagnosis is None else report.diagnosis.cause.value
    try:
        if (comparison := compare_forecast(run_dir, report.steps, cause)) is not None:
            summary["forecast"] = comparison.as_dict()
    except StoreError as error:
        summary["forecast"] = {"lines": [str(error)]}
    replace_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n", REMEDY)
    if report.steps:
        with replacing(run_dir / "summary.png", REMEDY) as tmp_path:
            draw_summary(config, report, tmp_path)
    return summary


def summarize(config: RunConfig, report: RunReport, run_dir: Path) -> dict[str, Any]:
    """Evaluations, steps, tokens, staleness histogram, seconds by phase, and dropped trajectories by reason of a
    run."""
    from staleflow.stores.trajectories.versioned import VersionedStore

    staleness: Counter[int] = Counter()
    bias: DropBias | None = None
    weights = WeightCounts()
    if (run_dir / "store").exists():  # missing if the run was stopped while its actors started
        store = VersionedStore.open(run_dir / "store")
        table = store.stored_columns()
        bias = drop_bias_of_store(store)
        weights = WeightCheckCounter(store.commits()).counts()
        staleness.update(int(s) for s in table["staleness"] if s >= 0)
    phases = report.seconds_by_activity
    wall_s = max(phases.get("wall_s", 0.0), 1e-9)
    steps_with_mismatch = [s for s in report.steps if "mismatch_max" in s]
    clip_shares = [s["clip_share"] for s in report.steps if "clip_share" in s]
    return {
        "name": config.name,
        "stopped": report.stop_reason,
        "steps": len(report.steps),
        "evaluations": [e.to_json() for e in report.evaluations],
        "notes": report.notes,
        "reward_first": report.steps[0]["reward"] if report.steps else None,
        "reward_last": report.steps[-1]["reward"] if report.steps else None,
        "trajectories_consumed": sum(staleness.values()),
        "response_tokens": int(sum(s["response_tokens"] for s in report.steps)),
        "branches": int(sum(s.get("branches", 0.0) for s in report.steps)),
        "tokens_per_s": tokens_per_s(report.steps),
        "prefilled_tokens": int(sum(s.get("prefilled_tokens", 0.0) for s in report.steps)),
        "cached_tokens": int(sum(s.get("cached_tokens", 0.0) for s in report.steps)),
        "drafted_tokens": int(sum(s.get("drafted_tokens", 0.0) for s in report.steps)),
        "accepted_tokens": int(sum(s.get("accepted_tokens", 0.0) for s in report.steps)),
        "staleness_histogram": {str(k): staleness[k] for k in sorted(staleness)},
        "eta": config.staleness.eta,
        "ended": report.snapshot.ended if report.snapshot else {},
        "refusals": report.snapshot.refusals if report.snapshot else {},
        "seconds": {k: round(v, 3) for k, v in phases.items() if k.endswith("_s")},
        "overhead": {
            "trainer_waits_though_ready": phases.get("trainer_overhead_s", 0.0) / wall_s,
            "trainer_waits_for_resume_point": phases.get("trainer_waits_for_resume_point_s", 0.0) / wall_s,
            "rollout_idle_though_routable": phases.get("rollout_idle_with_work_s", 0.0) / wall_s,
        },
        "logprob_mismatch": {
            "mean": sum(s["mismatch_mean"] for s in steps_with_mismatch) / len(steps_with_mismatch)
            if steps_with_mismatch
            else None,
            "max": max((s["mismatch_max"] for s in steps_with_mismatch), default=None),
        },
        "training": {
            "ess_least": lowest_average([s["ess"] for s in report.steps if "ess" in s]),
            "entropy_first": next((s["entropy"] for s in report.steps if "entropy" in s), None),
            "entropy_last": next((s["entropy"] for s in reversed(report.steps) if "entropy" in s), None),
            "clip_share_mean": sum(clip_shares) / len(clip_shares) if clip_shares else None,
            "updates_dropped": int(sum(s.get("updates_dropped", 0.0) for s in report.steps)),
        },
        "tasks": [{**asdict(source), "line": source.line} for source in report.sources],
        "commands": report.command_counts,
        "cost_model": _compare_cost_model(config, report),
        "losses": report.lost_actors,
        "probe_drift": max((s["probe_drift"] for s in report.steps if "probe_drift" in s), default=None),
        "weights": {**asdict(weights), "lines": weights.lines},
        "alarms": report.alarms,
        "bias": bias.as_dict() if bias is not None else None,
    }


def _compare_cost_model(config: RunConfig, report: RunReport) -> dict[str, Any]:
    """Compare the measured time of decode steps with the prediction of the strategies' cost model.

    measured_over_predicted: the ratio of the two; None if too few steps were measured. drifted: whether the ratio
    differs from 1 by more than rollout.cost_tolerance.
    """
    ratio = report.cost_model_fit.ratio_to(config.rollout.cost) if report.cost_model_fit else None
    has_drifted = ratio is not None and abs(ratio - 1) > config.rollout.cost_tolerance
    return {"measured_over_predicted": ratio, "drifted": has_drifted}


def make_diagnosis_entry(diagnosis: Diagnosis, run_dir: Path) -> dict[str, Any]:
    """The bottleneck of a run for summary.json. Its `line` has the finding, the advice, and the command that simulates
    the advised change."""
    changes = (f"--set {key}={json.dumps(value)}" for key, value in diagnosis.change)
    command = " ".join(["staleflow simulate --from", str(run_dir), *changes]) if diagnosis.change else ""
    line = diagnosis.line + (f"; simulate it: {command}" if command else "")
    return {**diagnosis.as_dict(), "command": command, "line": line}


def format_step(step: Mapping[str, float], num_steps: int, bottleneck: str = "") -> str:
    """Format a training step as one line. bottleneck: `Diagnosis.short_line`."""
    failures = f"  rewards failed {errors:.0f}" if (errors := step.get("reward_errors", 0.0)) else ""
    dropped = f"  updates dropped {count:.0f}" if (count := step.get("updates_dropped", 0.0)) else ""
    details = (
        f"turns {step['turns_mean']:.1f}  environment {step['tool_s']:.1f} s  "
        if step.get("turns_max", 0.0) > 1
        else ""
    )
    if details and (branches := step.get("branches", 0.0)):
        details += f"context forks {branches:.0f}  "
    if details and (cached_tokens := step.get("cached_tokens", 0.0)):
        details += f"prefix cache hits {cached_tokens / (cached_tokens + step['prefilled_tokens']):.0%}  "
    if drafted_tokens := step.get("drafted_tokens", 0.0):
        details += f"draft acceptance {step['accepted_tokens'] / drafted_tokens:.0%}  "
    return (
        f"step {step['step']:.0f}/{num_steps}  reward {step['reward']:.3f}{failures}  "
        f"length {step['response_mean']:.1f}  {details}"
        f"staleness {step['staleness_mean']:.2f} (max {step['staleness_max']:.0f})  loss {step['loss']:+.4f}  "
        f"grad {step['grad_norm']:.2f}{dropped}  train {step['train_s']:.2f} s  trainer wait {step['wait_s']:.2f} s  "
        f"elapsed {step['elapsed_s']:.1f} s" + (f"  {bottleneck}" if bottleneck else "")
    )


def draw_summary(config: RunConfig, report: RunReport, path: Path) -> None:
    """Plot reward, staleness, lengths and throughput over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = report.steps
    x = [s["step"] for s in steps]
    figure = Figure(figsize=(11, 6.4))  # a constrained layout would draw everything twice
    margins = {"left": 0.05, "right": 0.99, "bottom": 0.07, "top": 0.89, "wspace": 0.17, "hspace": 0.34}
    axes = figure.subplots(2, 2, gridspec_kw=margins)
    title = f"{config.name}: eta {config.staleness.eta}, {config.staleness.admission.name}, {len(steps)} steps"
    figure.suptitle(title, fontsize=12)

    reward_axis = axes[0][0]
    reward_axis.plot(x, [s["reward"] for s in steps], color="#9ecae1", linewidth=1, label=STEP_METRICS["reward"].label)
    reward_axis.plot(x, _smooth([s["reward"] for s in steps]), color="#08519c", linewidth=2, label="mean of last 10")
    colours = iter(EVALUATION_COLOURS)
    for name, set_evaluations in group_by_set(report.evaluations).items():
        colour = next(colours, EVALUATION_COLOURS[-1])
        for label, style in (("sampled", "o-"), ("greedy", "D--")):
            evaluations = [e for e in set_evaluations if getattr(e, label) is not None]
            if evaluations:
                versions, means = [e.version for e in evaluations], [getattr(e, label) for e in evaluations]
                errors = [getattr(e, f"{label}_stderr") or 0.0 for e in evaluations]
                reward_axis.errorbar(
                    versions, means, errors, fmt=style, color=colour[label], capsize=3, markersize=4, linewidth=1.2,
                    label=f"{name}, {label}",
                )  # fmt: skip
    title = "reward (held-out rewards cannot be compared)" if explain_not_comparable(report.evaluations) else "reward"
    reward_axis.set(title=title, xlabel="step", ylim=(min(0.0, *(s["reward"] for s in steps)), None))
    reward_axis.legend(fontsize=8, loc="lower right")

    staleness_axis = axes[0][1]
    for name, (color, width) in STALENESS_LINES.items():
        staleness_axis.plot(x, [s[name] for s in steps], color=color, linewidth=width, label=STEP_METRICS[name].label)
    staleness_axis.axhline(config.staleness.eta, color="#cb181d", linestyle="--", linewidth=1, label="eta")
    staleness_limit = max([config.staleness.eta, *(s["staleness_max"] for s in steps)])
    staleness_axis.set(
        title=axis_title("staleness", *STALENESS_LINES), xlabel="step", ylim=(-0.05, 1.5 * staleness_limit + 0.2)
    )
    staleness_axis.legend(fontsize=7, loc="upper center", ncols=3)

    length_axis = axes[1][0]
    for name, (color, width) in LENGTH_LINES.items():
        length_axis.plot(x, [s[name] for s in steps], color=color, linewidth=width, label=STEP_METRICS[name].label)
    length_axis.set(title=axis_title("response length", *LENGTH_LINES), xlabel="step", ylim=(0, None))
    length_axis.legend(fontsize=8)

    throughput_axis = axes[1][1]
    throughput = [s["tokens_per_s"] for s in steps]
    throughput_axis.plot(x, throughput, color="#9ecae1", linewidth=1)
    throughput_axis.plot(x, _smooth(throughput), color="#08519c", linewidth=2)
    throughput_axis.set(title=axis_title("throughput", "tokens_per_s"), xlabel="step", ylim=(0, None))
    for ax in figure.axes:
        ax.grid(alpha=0.25)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110, format="png")


def _smooth(values: list[float]) -> list[float]:
    """Means over the latest 10 values."""
    return [sum(values[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(values))]

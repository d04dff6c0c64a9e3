"""What a run leaves for people: summary.json and summary.png."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.runtime.evaluation import not_comparable
from pipeline.runtime.outcomes import Outcomes


def write_report(config: RunConfig, outcomes: Outcomes, run_dir: Path) -> dict[str, object]:
    """Write both files into the run's folder; returns the summary."""
    summary = summarize(config, outcomes, run_dir)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if outcomes.steps:
        draw(config, outcomes, run_dir / "summary.png")
    return summary


def summarize(config: RunConfig, outcomes: Outcomes, run_dir: Path) -> dict[str, Any]:
    """Evaluation before and after, steps, tokens, staleness histogram, seconds by phase, drops by reason."""
    from stores.versioned import VersionedStore

    staleness: Counter[int] = Counter()
    if (run_dir / "store").is_dir():  # not there if the run was stopped while its actors started
        table = VersionedStore.open(run_dir / "store").table()
        staleness.update(int(s) for s in table["staleness"] if s >= 0)
    phases = outcomes.phases
    wall_s = max(phases.get("wall_s", 0.0), 1e-9)
    mismatch = [s for s in outcomes.steps if s["mismatch_max"] > 0]
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
        "tokens_per_s": sum(s["response_tokens"] for s in outcomes.steps) / wall_s,
        "staleness_histogram": {str(k): staleness[k] for k in sorted(staleness)},
        "staleness_bound": config.bound,
        "ended": outcomes.snapshot.ended if outcomes.snapshot else {},
        "refusals": outcomes.snapshot.refusals if outcomes.snapshot else {},
        "seconds": {k: round(v, 3) for k, v in phases.items() if k.endswith("_s")},
        "overhead": {
            "trainer_waits_though_ready": phases.get("trainer_overhead_s", 0.0) / wall_s,
            "rollout_idle_though_routable": phases.get("rollout_idle_with_work_s", 0.0) / wall_s,
        },
        "logprob_mismatch": {
            "mean": sum(s["mismatch_mean"] for s in mismatch) / len(mismatch) if mismatch else None,
            "max": max((s["mismatch_max"] for s in mismatch), default=None),
        },
        "commands": outcomes.commands,
        "cost_model": {
            "measured_over_predicted": outcomes.cost_ratio,
            "drifted": outcomes.cost_drifted,
            "refit": asdict(outcomes.cost_refit) if outcomes.cost_refit else None,
        },
        "forecast": asdict(outcomes.snapshot.forecast) if outcomes.snapshot else None,
        "losses": outcomes.losses,
        "probe_drift": max((s["probe_drift"] for s in outcomes.steps), default=None),
        "alarms": outcomes.alarms,
    }


def step_line(step: dict[str, float], num_steps: int) -> str:
    """A training step on one line."""
    return (
        f"step {step['step']:.0f}/{num_steps}  reward {step['reward']:.3f}  length {step['response_mean']:.1f}  "
        f"staleness {step['staleness_mean']:.2f} (max {step['staleness_max']:.0f})  loss {step['loss']:+.4f}  "
        f"grad {step['grad_norm']:.2f}  train {step['train_s']:.2f} s  wait {step['wait_s']:.2f} s  "
        f"at {step['elapsed_s']:.1f} s"
    )


def draw(config: RunConfig, outcomes: Outcomes, path: Path) -> None:
    """Reward, staleness, lengths and throughput over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = outcomes.steps
    x = [s["step"] for s in steps]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, 2)
    title = f"{config.name}: eta {config.staleness.eta}, {config.staleness.admission}, {len(steps)} steps"
    figure.suptitle(title, fontsize=12)

    reward = axes[0][0]
    reward.plot(x, [s["reward"] for s in steps], color="#9ecae1", linewidth=1, label="batch")
    reward.plot(x, _smooth([s["reward"] for s in steps]), color="#08519c", linewidth=2, label="mean of last 10")
    for label, marker, color in (("sampled", "o", "#d94801"), ("greedy", "D", "#238b45")):
        scored = [e for e in outcomes.evaluations if getattr(e, label) is not None]
        if scored:
            at, means = [e.version for e in scored], [getattr(e, label) for e in scored]
            errors = [getattr(e, f"{label}_stderr") or 0.0 for e in scored]
            reward.errorbar(at, means, errors, fmt=marker, color=color, capsize=3, label=f"held out, {label}")
    title = "reward (held-out ones cannot be compared)" if not_comparable(outcomes.evaluations) else "reward"
    reward.set(title=title, xlabel="step", ylim=(min(0.0, *(s["reward"] for s in steps)), None))
    reward.legend(fontsize=8, loc="lower right")

    stale = axes[0][1]
    stale.plot(x, [s["staleness_mean"] for s in steps], color="#08519c", label="consumed, mean")
    stale.plot(x, [s["staleness_max"] for s in steps], color="#cb181d", linewidth=1, label="consumed, max")
    stale.plot(x, [s["staleness_in_flight"] for s in steps], color="#807dba", linewidth=1, label="in flight, mean")
    stale.plot(x, [s["staleness_in_queue"] for s in steps], color="#fd8d3c", linewidth=1, label="in queue, mean")
    if config.staleness.admission != "backlog":  # which keeps none
        stale.axhline(config.bound, color="#cb181d", linestyle="--", linewidth=1, label="bound")
    most = max([config.staleness.eta, *(s["staleness_max"] for s in steps)])
    stale.set(title="staleness (versions)", xlabel="step", ylim=(-0.05, 1.5 * most + 0.2))
    stale.legend(fontsize=7, loc="upper center", ncols=3)

    lengths = axes[1][0]
    lengths.plot(x, [s["response_mean"] for s in steps], color="#238b45", label="mean")
    lengths.plot(x, [s["response_max"] for s in steps], color="#a1d99b", linewidth=1, label="longest")
    lengths.set(title="response length (tokens)", xlabel="step", ylim=(0, None))
    lengths.legend(fontsize=8)

    speed = axes[1][1]
    times = [s["elapsed_s"] for s in steps]
    spans = [b - a for a, b in zip([0.0, *times[:-1]], times, strict=True)]
    rate = [s["response_tokens"] / max(t, 1e-9) for s, t in zip(steps, spans, strict=True)]
    speed.plot(x, rate, color="#9ecae1", linewidth=1)
    speed.plot(x, _smooth(rate), color="#08519c", linewidth=2)
    speed.set(title="throughput (response tokens/s)", xlabel="step", ylim=(0, None))
    for ax in figure.axes:
        ax.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def _smooth(values: list[float], span: int = 10) -> list[float]:
    return [sum(values[max(0, i - span + 1) : i + 1]) / min(i + 1, span) for i in range(len(values))]

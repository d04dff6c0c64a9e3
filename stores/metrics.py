"""Every metric, declared once: name, unit and meaning.

TensorBoard, Prometheus, the dashboard, summary.png and docs/metrics.md read them here. Metrics travel as floats by
name.

Tokens per second has one meaning: response tokens that were trained on, over wall time. Of a run: from when its first
step could begin to the end of its last step. Of a step: its batch, over the time since the step before ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a metric is a number of."""

    STEP = "per step"
    RUN = "whole run"
    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A name is unique among the metrics of its kind; gauges and counters are called as in the coordinator's
    snapshot."""

    name: str
    unit: str
    """Empty for a number without one."""
    doc: str
    kind: Kind = Kind.STEP
    label: str = ""
    """In a picture, beside others of its unit."""
    exported: str = ""
    """Its name in Prometheus, after "staleflow_"; empty where it is not there."""

    @property
    def help(self) -> str:
        """Its meaning and unit, on one line."""
        return f"{self.doc}, {self.unit}" if self.unit else self.doc


METRICS = (
    Metric(name="reward", unit="", doc="mean reward of the consumed batch", label="batch", exported="reward"),
    Metric(name="reward_errors", unit="trajectories", doc="of the batch whose reward could not be computed"),
    Metric(name="groups_with_signal", unit="share", doc="groups of the batch with unequal rewards; failed ones aside"),
    Metric(name="response_tokens", unit="tokens", doc="sampled tokens of the batch"),
    Metric(name="response_mean", unit="tokens", doc="mean response length", label="mean"),
    Metric(name="response_max", unit="tokens", doc="longest response", label="longest"),
    Metric(name="truncated_share", unit="share", doc="responses that ran into max_new_tokens"),
    Metric(name="staleness_mean", unit="versions", doc="mean of step - v_traj over the batch", label="consumed, mean"),
    Metric(name="staleness_max", unit="versions", doc="largest step - v_traj of the batch; at most eta",
           label="consumed, max", exported="staleness_max"),
    Metric(name="staleness_in_flight", unit="versions", doc="mean age of groups being sampled, over the step",
           label="in flight, mean"),
    Metric(name="staleness_in_queue", unit="versions", doc="mean age of finished groups that wait, over the step",
           label="in queue, mean"),
    Metric(name="mixed_versions", unit="share", doc="trajectories sampled under more than one version"),
    Metric(name="sampling_s", unit="s", doc="mean time from first routing to the last token"),
    Metric(name="loss", unit="", doc="loss, mean over minibatches"),
    Metric(name="grad_norm", unit="", doc="gradient norm before clipping, mean over minibatches"),
    Metric(name="clip_share", unit="share", doc="tokens where the clip cut the gradient"),
    Metric(name="ratio_mean", unit="", doc="mean importance ratio to the behaviour policy"),
    Metric(name="kl_rollout", unit="nats", doc="k3 estimate of KL(rollout || trainer), fresh tokens, before the step"),
    Metric(name="mismatch_mean", unit="nats", doc="mean |stored - recomputed logprob|, fresh tokens, equal weights"),
    Metric(name="mismatch_max", unit="nats", doc="largest |stored - recomputed logprob|, as above"),
    Metric(name="probe_drift", unit="nats", doc="largest |logprob of the probe - the trainer's| of all instances"),
    Metric(name="learning_rate", unit="", doc="learning rate of the step"),
    Metric(name="tokens_trained", unit="tokens", doc="tokens with gradient"),
    Metric(name="fetch_s", unit="s", doc="fetching the batch from the trajectory server"),
    Metric(name="train_s", unit="s", doc="forward, backward and optimizer"),
    Metric(name="publish_s", unit="s", doc="writing and fingerprinting the new weights"),
    Metric(name="overhead_s", unit="s", doc="between the batch being ready and the new version being known, less "
           "train_s and publish_s"),
    Metric(name="wait_s", unit="s", doc="the trainer waited for a batch to become ready"),
    Metric(name="elapsed_s", unit="s", doc="since the run's first step could begin"),
    Metric(name="commit_s", unit="s", doc="storing the step, while the next one runs"),
    Metric(name="tokens_per_s", unit="tokens/s", doc="response_tokens over the time since the step before ended",
           label="step", exported="tokens_per_second"),

    Metric(name="tokens_per_s", unit="tokens/s", kind=Kind.RUN, doc="response tokens of all steps over elapsed_s of "
           "the last: summary.json, the live view, simulate"),
    Metric(name="steady_tokens_per_s", unit="tokens/s", kind=Kind.RUN, doc="the same without a run's beginning and "
           "end: simulate, where variants are compared"),

    Metric(name="step", unit="steps", kind=Kind.GAUGE, doc="training steps done", exported="step"),
    Metric(name="staleness_in_flight", unit="versions", kind=Kind.GAUGE, doc="mean age of groups being sampled, now",
           exported="staleness_in_flight"),
    Metric(name="staleness_in_queue", unit="versions", kind=Kind.GAUGE, doc="mean age of finished groups that "
           "wait, now", exported="staleness_in_queue"),
    Metric(name="num_queued", unit="trajectories", kind=Kind.GAUGE, doc="waiting for an instance",
           exported="trajectories_queued"),
    Metric(name="num_running", unit="trajectories", kind=Kind.GAUGE, doc="being sampled",
           exported="trajectories_running"),
    Metric(name="num_scoring", unit="trajectories", kind=Kind.GAUGE, doc="waiting for their reward",
           exported="trajectories_scoring"),
    Metric(name="instance_tokens_per_s", unit="tokens/s", kind=Kind.GAUGE, doc="sampled by one instance, since the "
           "dashboard's page was last drawn"),
    Metric(name="num_started", unit="trajectories", kind=Kind.COUNTER, doc="started since the run began",
           exported="trajectories_started"),
)  # fmt: skip

STEP = {m.name: m for m in METRICS if m.kind is Kind.STEP}
"""Those of a training step, by name."""
GAUGES = {m.name: m for m in METRICS if m.kind is Kind.GAUGE}
NAMES = frozenset(STEP)
DERIVED = frozenset({"commit_s", "tokens_per_s"})
"""Per step, and not in its stored record: known when it is stored, or from the step before."""


def axis(what: str, *names: str) -> str:
    """Title of a picture of these metrics of a step, with their unit. Raises ValueError if they have several."""
    (unit,) = {STEP[name].unit for name in names}
    return f"{what}, {unit}" if unit else what


def with_rate(step: Mapping[str, float], before: Mapping[str, float] | None) -> dict[str, float]:
    """A step's metrics with its tokens_per_s. before: the step before; None for a run's first."""
    seconds = step.get("elapsed_s", 0.0) - (before.get("elapsed_s", 0.0) if before else 0.0)
    return {**step, "tokens_per_s": _rate(step.get("response_tokens", 0.0), seconds)}


def with_rates(steps: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """All steps of a run, each with its tokens_per_s."""
    rated: list[dict[str, float]] = []
    for step in steps:
        rated.append(with_rate(step, rated[-1] if rated else None))
    return rated


def tokens_per_s(steps: Sequence[Mapping[str, float]]) -> float:
    """Of a run, from all its steps so far; 0 without any."""
    return _rate(sum(s.get("response_tokens", 0.0) for s in steps), steps[-1].get("elapsed_s", 0.0) if steps else 0.0)


def _rate(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


HEADINGS = {Kind.STEP: "Per step", Kind.RUN: "Of a run", Kind.GAUGE: "Gauges", Kind.COUNTER: "Counters"}
SECTIONS = {
    Kind.STEP: "Each training step has these: in TensorBoard under these names, in Prometheus of the last step, and\n"
    f"in its record in the store (`staleflow store show RUN --json`), but for {' and '.join(sorted(DERIVED))}.",
    Kind.RUN: "Of all its steps.",
    Kind.GAUGE: "What is so now: `staleflow status --json`, the dashboard, Prometheus.",
    Kind.COUNTER: "What only grows.",
}


def page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from `stores/metrics.py`, by `python -m stores.metrics > docs/metrics.md`.",
        "",
        "Tokens per second has one meaning: response tokens that were trained on, over wall time. Of a run, from when",
        "its first step could begin to the end of its last step; of a step, its batch over the time since the step",
        "before ended.",
    ]
    for kind, intro in SECTIONS.items():
        lines += ["", f"## {HEADINGS[kind]}", "", intro, "", "| name | unit | meaning | Prometheus |"]
        lines.append("|---|---|---|---|")
        for m in (m for m in METRICS if m.kind is kind):
            name = f"`{PREFIX}{m.exported}{TOTAL if kind is Kind.COUNTER else ''}`" if m.exported else ""
            lines.append(f"| `{m.name}` | {m.unit} | {m.doc.replace('|', chr(92) + '|')} | {name} |")
    return "\n".join(lines) + "\n"


PREFIX, TOTAL = "staleflow_", "_total"
"""Of names in Prometheus: before all, and after counters'."""


if __name__ == "__main__":
    sys.stdout.write(page())

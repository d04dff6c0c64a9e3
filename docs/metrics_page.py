"""The page of all metrics: python -m docs.metrics_page > docs/metrics.md"""

from __future__ import annotations

import sys

from staleflow.stores.metrics import (
    DERIVED_METRICS,
    EVALUATION_PREFIX,
    METRICS,
    PROMETHEUS_PREFIX,
    REWARD_PART_PREFIX,
    SOURCE_METRICS,
    SOURCE_PREFIX,
    Kind,
    Metric,
)

COUNTER_SUFFIX = "_total"
"""Suffix of the names of counters in Prometheus."""
HEADINGS = {
    Kind.STEP: "Per step",
    Kind.EVALUATION: "Per evaluation",
    Kind.RUN: "Per run",
    Kind.GAUGE: "Gauges",
    Kind.COUNTER: "Counters",
}
SECTIONS = {
    Kind.STEP: "Values of a training step: in TensorBoard under these names, and in its record in the store\n"
    f"(`staleflow store show RUN --json`), except {' and '.join(sorted(DERIVED_METRICS))}. A reward with parts adds\n"
    f"`{REWARD_PART_PREFIX}NAME`, the mean of part NAME over the batch's responses that could be scored. Several task\n"
    f"sources add `{SOURCE_PREFIX}NAME/...` of each: "
    + ";\n".join(f"`{name}`, {metric.help}" for name, metric in SOURCE_METRICS.items())
    + ".",
    Kind.EVALUATION: f"Values of one evaluation set: in TensorBoard as `{EVALUATION_PREFIX}SET/NAME`, at the\n"
    "evaluated version, and in evaluations.json.",
    Kind.RUN: "Values over all steps of a run.",
    Kind.GAUGE: "Current values: `staleflow status --json`, the dashboard, Prometheus.",
    Kind.COUNTER: "Values that only grow.",
}


def page() -> str:
    """Generate docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `stores/metrics.py` by `make generated`. Tokens per second are response tokens that were",
        "trained on, over wall time.",
    ]
    for kind, intro in SECTIONS.items():
        rows = [(m, _meaning(m)) for m in METRICS if m.kind is kind]
        lines += ["", f"## {HEADINGS[kind]}", ""]
        lines += [intro, "", *(f"- `{metric.name}`: {meaning}" for metric, meaning in rows)]
    lines += ["", "## Prometheus", "", "Values of steps are those of the last one.", ""]
    for metric in METRICS:
        if metric.prometheus_name:
            suffix = COUNTER_SUFFIX if metric.kind is Kind.COUNTER else ""
            lines.append(f"- `{PROMETHEUS_PREFIX}{metric.prometheus_name}{suffix}`: `{metric.name}`")
    return "\n".join(lines) + "\n"


def _meaning(metric: Metric) -> str:
    """Meaning, and the unit where the meaning does not name it."""
    return metric.doc if metric.unit in metric.doc.replace(",", "").split() else metric.help


if __name__ == "__main__":
    sys.stdout.write(page())

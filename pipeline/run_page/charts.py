"""The charts of the run page: which metrics are drawn together, and their values from step records. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.stores.metrics import SOURCE_METRICS, SOURCE_PREFIX, STEP_METRICS, Metric, steps_with_tokens_per_s
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectory import Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of metrics with the same unit. hint: a line of text on how to read it."""

    title: str
    names: tuple[str, ...]
    hint: str = ""
    shows_staleness_bound: bool = False
    """Whether the staleness bound is drawn."""
    shows_held_out: bool = False
    """Whether rewards on held-out prompts are drawn."""
    is_only_for_many_turns: bool = False
    """Whether the chart is left out for a run whose trajectories all have one turn."""

    def page_values(self) -> dict[str, Any]:
        """The chart as plain values for the page, with unit and descriptions."""
        return {
            "title": self.title, "hint": self.hint, "held_out": self.shows_held_out,
            "staleness_bound": self.shows_staleness_bound,
            "unit": _metric(self.names[0]).unit,
            "lines": [
                {"name": name, "label": self._label(name), "doc": _metric(name).doc}
                for name in self.names
            ],
        }  # fmt: skip

    def _label(self, name: str) -> str:
        """A line's label; a line alone needs none besides the title."""
        if len(self.names) == 1 and not self.shows_held_out:
            return ""
        if name.startswith(SOURCE_PREFIX):
            return name.removeprefix(SOURCE_PREFIX).rpartition("/")[0]
        return STEP_METRICS[name].label or name.removesuffix("_s").replace("_", " ")


def _metric(name: str) -> Metric:
    """Return the metric of a line."""
    return SOURCE_METRICS[name.rpartition("/")[2]] if name.startswith(SOURCE_PREFIX) else STEP_METRICS[name]


CHARTS = (
    Chart(
        title="reward", names=("reward",), shows_held_out=True, hint="batch, and held-out prompts with standard error"
    ),
    Chart(title="response length", names=("response_mean", "response_max"), hint="of the batch"),
    Chart(
        title="staleness",
        names=("staleness_mean", "staleness_max", "staleness_in_flight", "staleness_in_queue"),
        shows_staleness_bound=True,
        hint="dashed: eta, the bound",
    ),
    Chart(title="importance ratio", names=("ratio_mean",), hint="to the behaviour policy; 1 is on-policy"),
    Chart(title="effective sample size", names=("ess",), hint="of the importance ratios, per token; 1 is on-policy"),
    Chart(
        title="shares of the batch",
        names=("groups_with_signal", "mixed_versions", "truncated_share"),
        hint="only groups with signal train",
    ),
    Chart(title="clipped tokens", names=("clip_share", "clip_share_low", "clip_share_high"), hint="of the loss"),
    Chart(title="entropy", names=("entropy",), hint="per token"),
    Chart(title="KL of the policy", names=("kl_old", "kl_behaviour", "kl_reference"), hint="k3, per token"),
    Chart(title="spread of advantages", names=("advantage_std",), hint="standard deviation over the batch"),
    Chart(title="dropped updates", names=("updates_dropped",), hint="gradients that were not finite"),
    Chart(title="loss", names=("loss",), hint="mean over minibatches"),
    Chart(title="loss of examples", names=("sft_loss",), hint="cross-entropy per answer token"),
    Chart(title="gradient norm", names=("grad_norm",), hint="before clipping"),
    Chart(
        title="logprob mismatch", names=("mismatch_mean", "mismatch_max", "probe_drift"), hint="rollout against trainer"
    ),
    Chart(title="KL(rollout || trainer)", names=("kl_rollout",), hint="fresh tokens"),
    Chart(title="throughput", names=("tokens_per_s",), hint="tokens trained on over wall time"),
    Chart(title="seconds of a step", names=("train_s", "wait_s", "publish_s", "fetch_s", "overhead_s")),
    Chart(title="turns", names=("turns_mean", "turns_max"), hint="of the batch", is_only_for_many_turns=True),
    Chart(
        title="branches",
        names=("branches",),
        hint="of the batch: conversations left their past",
        is_only_for_many_turns=True,
    ),
    Chart(
        title="tools",
        names=("tool_s",),
        hint="mean wait of a trajectory for its environment",
        is_only_for_many_turns=True,
    ),
    Chart(title="sampling time", names=("sampling_s",), hint="first routing to last token"),
    Chart(title="learning rate", names=("learning_rate",)),
    Chart(title="failed rewards", names=("reward_errors",), hint="trajectories not scored"),
)


SOURCE_CHART_TITLES = {"reward": "reward by task", "trained_share": "trained groups by task"}
"""Titles of the charts with a line for each of several task sources, by the end of their metrics' names."""


def charts(records: Sequence[CommitRecord], sources: Sequence[str] = ()) -> list[Chart]:
    """The charts that apply to a run with these step records. sources: names of its task sources, if it has several."""
    many_turns = have_many_turns(records)
    of_tasks = [
        Chart(
            title=title,
            names=tuple(f"{SOURCE_PREFIX}{source}/{metric}" for source in sources),
            hint=SOURCE_METRICS[metric].doc,
        )
        for metric, title in SOURCE_CHART_TITLES.items()
        if sources
    ]
    first, *others = [chart for chart in CHARTS if many_turns or not chart.is_only_for_many_turns]
    return [first, *of_tasks, *others]


def have_many_turns(records: Sequence[CommitRecord]) -> bool:
    """Whether any of these steps trained on a trajectory with several turns."""
    return any(r.metrics.get("turns_max", 0) > 1 for r in records)


def chart_values(records: Sequence[CommitRecord], first: int) -> dict[str, Any]:
    """Values of the charts for the training steps from index `first` on.

    Returns {"step": [S], "lines": {metric: [S]}, "drops": {"fate: reason": [S]}}. A value is None where a step has no
    finite one. The drops of a step are those since the commit of the step before.
    """
    steps = [r for r in records if r.kind == "step"]
    first = min(first, len(steps))
    before = steps[first - 1] if first else None
    step_metrics = steps_with_tokens_per_s({"elapsed_s": 0.0, **r.metrics} for r in steps[max(0, first - 1) :])[
        1 if first else 0 :
    ]
    names = {name for chart in CHARTS for name in chart.names}
    present_names = sorted(
        {name for step in step_metrics for name in step if name in names or name.startswith(SOURCE_PREFIX)}
    )
    new_steps = steps[first:]
    counts = [r.ledger.num_ended for r in ([before] if before else []) + new_steps]
    reasons = sorted({key for count in counts for key in count if not key.startswith(Fate.CONSUMED.value)})
    drops = {}
    for key in reasons:
        totals = [0 if before is None else before.ledger.num_ended.get(key, 0)]
        totals += [r.ledger.num_ended.get(key, 0) for r in new_steps]
        drops[outcome_in_words(key)] = [max(0, b - a) for a, b in itertools.pairwise(totals)]
    return {
        "step": [r.step for r in new_steps],
        "lines": {name: [round_finite(step.get(name)) for step in step_metrics] for name in present_names},
        "drops": drops,
    }


def outcome_in_words(outcome: str) -> str:
    """Format a key of the ledger's counts for display.

    >>> outcome_in_words("aborted:surplus_member")
    'aborted: surplus member'
    """
    return outcome.removesuffix(":none").replace(":", ": ").replace("_", " ")


def round_finite(value: float | None) -> float | None:
    """Round a value to six digits; None if it is not finite, which JSON cannot express."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None

"""All metrics, with name, unit and meaning.

TensorBoard, Prometheus, the dashboard, summary.png and docs/metrics.md use these declarations. Values of metrics are
floats in dicts, by name.

Tokens per second has one meaning: response tokens that were trained on, over wall time. For a run: from when its first
step could begin to the end of its last step. For a step: its batch, over the time since the end of the previous step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a metric describes, and how it changes."""

    STEP = "per step"
    EVALUATION = "per evaluation"
    RUN = "whole run"
    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Names are unique within a kind; gauges and counters have the names of the coordinator's snapshot."""

    name: str
    unit: str
    """Empty for a number without one."""
    doc: str
    kind: Kind = Kind.STEP
    label: str = ""
    """Legend entry in a plot with other metrics of the same unit."""
    prometheus_name: str = ""
    """Name in Prometheus, after "staleflow_"; empty if it is not exported."""

    @property
    def help(self) -> str:
        """Meaning and unit on one line."""
        return f"{self.doc}, {self.unit}" if self.unit else self.doc


METRICS = (
    Metric(name="reward", unit="", doc="mean reward of the consumed batch", label="batch", prometheus_name="reward"),
    Metric(name="reward_errors", unit="trajectories", doc="trajectories whose reward could not be computed",
           label="failed"),
    Metric(name="groups_with_signal", unit="share", doc="groups with unequal rewards; failed ones are ignored"),
    Metric(name="advantage_std", unit="", doc="standard deviation of the batch's advantages"),
    Metric(name="response_tokens", unit="tokens", doc="sampled tokens of the batch"),
    Metric(name="response_mean", unit="tokens", doc="mean response length, sampled tokens", label="mean"),
    Metric(name="response_max", unit="tokens", doc="longest response, sampled tokens", label="longest"),
    Metric(name="turns_mean", unit="turns", doc="mean number of turns of a trajectory", label="mean"),
    Metric(name="turns_max", unit="turns", doc="most turns of a trajectory", label="most"),
    Metric(name="branches", unit="branches", doc="times that a conversation continued from an earlier point"),
    Metric(name="given_tokens", unit="tokens", doc="tokens that environments returned between turns"),
    Metric(name="tool_s", unit="s", doc="mean time a trajectory waited for its environment, all turns together"),
    Metric(name="prefilled_tokens", unit="tokens", doc="prompt and context tokens that instances computed since the "
           "previous step", label="computed"),
    Metric(name="cached_tokens", unit="tokens", doc="prompt and context tokens that instances found in their KV "
           "caches since the previous step", label="found cached"),
    Metric(name="kept_tokens", unit="tokens", doc="KV tokens kept for turns to come, on all instances, when the step "
           "ended"),
    Metric(name="drafted_tokens", unit="tokens", doc="drafted tokens that instances verified, since the previous step",
           label="drafted"),
    Metric(name="accepted_tokens", unit="tokens", doc="drafted tokens that the policy sampled too, since the "
           "previous step", label="accepted"),
    Metric(name="truncated_share", unit="share", doc="responses cut off at max_new_tokens"),
    Metric(name="staleness_mean", unit="versions", doc="mean of step - v_traj over the batch", label="consumed, mean"),
    Metric(name="staleness_max", unit="versions", doc="largest step - v_traj of the batch; at most eta",
           label="consumed, max", prometheus_name="staleness_max"),
    Metric(name="staleness_in_flight", unit="versions", doc="mean age of groups being sampled, over the step",
           label="in flight, mean"),
    Metric(name="staleness_in_queue", unit="versions", doc="mean age of finished groups in the queue, over the step",
           label="in queue, mean"),
    Metric(name="mixed_versions", unit="share", doc="trajectories sampled under more than one version"),
    Metric(name="sampling_s", unit="s", doc="mean time from first routing to last token"),
    Metric(name="loss", unit="", doc="loss of the batch, mean over minibatches", label="loss"),
    Metric(name="sft_loss", unit="nats", doc="cross-entropy of the step's examples per answer token, mean over "
           "minibatches; absent without training.sft.weight"),
    Metric(name="sft_tokens", unit="tokens", doc="answer tokens of the step's examples; absent as sft_loss"),
    Metric(name="grad_norm", unit="", doc="gradient norm before clipping, mean over minibatches", label="norm"),
    Metric(name="updates_dropped", unit="updates", doc="optimizer updates left out because their gradient was not "
           "finite"),
    Metric(name="tokens_dropped", unit="tokens", doc="sampled tokens that count in the loss's mean and have no "
           "gradient, because their stored logprob is not finite"),
    Metric(name="clip_share", unit="share", doc="tokens clipped by the loss", label="all"),
    Metric(name="clip_share_low", unit="share", doc="tokens clipped because their ratio is low", label="low"),
    Metric(name="clip_share_high", unit="share", doc="tokens clipped because their ratio is high", label="high"),
    Metric(name="ratio_mean", unit="", doc="mean importance ratio to the behaviour policy"),
    Metric(name="ess", unit="share", doc="effective sample size of the importance ratios over the number of tokens; 1 "
           "is on-policy", prometheus_name="effective_sample_size"),
    Metric(name="ess_stderr", unit="share", doc="standard error of ess; 0 if all rows were computed"),
    Metric(name="entropy", unit="nats", doc="entropy of each token's distribution, at the sampling temperature; from "
           "the sampled tokens' logprobs"),
    Metric(name="entropy_stderr", unit="nats", doc="standard error of entropy, as of ess"),
    Metric(name="kl_old", unit="nats", doc="k3 estimate of KL(pi_old || pi) as rows are trained on; pi_old as in the "
           "loss: pi before the step, or the behaviour policy", label="old"),
    Metric(name="kl_behaviour", unit="nats", doc="k3 estimate of KL(rollout || pi) as rows are trained on",
           label="behaviour"),
    Metric(name="kl_behaviour_stderr", unit="nats", doc="standard error of kl_behaviour, as of ess"),
    Metric(name="kl_reference", unit="nats", doc="k3 estimate of KL(pi || reference) over tokens with gradient; "
           "absent without a reference model", label="reference"),
    Metric(name="kl_rollout", unit="nats", doc="k3 estimate of KL(rollout || trainer), fresh tokens, before the step; "
           "absent if no row is fresh"),
    Metric(name="mismatch_mean", unit="nats", doc="mean |stored - recomputed logprob|, fresh tokens, equal weights; "
           "absent if no row is fresh", label="mean"),
    Metric(name="mismatch_max", unit="nats", doc="largest |stored - recomputed logprob|, as above",
           label="largest"),
    Metric(name="probe_drift", unit="nats", doc="mean |logprob of the probe - the trainer's|, of the instance where it "
           "is largest; absent without a held-out prompt"),
    Metric(name="probe_limit", unit="nats", doc="the most that probe_drift may be before an instance is taken out of "
           "service"),
    Metric(name="learning_rate", unit="", doc="learning rate of the step"),
    Metric(
        name="tokens_trained",
        unit="tokens",
        doc="tokens of the batch that contributed to the gradient, each once, however many epochs it is trained in",
    ),
    Metric(name="fetch_s", unit="s", doc="time to fetch the batch from the trajectory server"),
    Metric(name="train_s", unit="s", doc="time of forward, backward and optimizer"),
    Metric(name="publish_s", unit="s", doc="time to write and fingerprint the new weights"),
    Metric(name="overhead_s", unit="s", doc="time from the batch being ready to the new version being announced, minus "
           "train_s and publish_s"),
    Metric(name="resume_wait_s", unit="s", doc="part of overhead_s: time the trainer waited until the resume point "
           "of an earlier step was written"),
    Metric(name="teacher_wait_s", unit="s", doc="part of overhead_s: time the step waited for its trajectories' "
           "logprobs under the reference model; absent without teachers"),
    Metric(name="wait_s", unit="s", doc="time the trainer waited for the batch to be ready"),
    Metric(name="elapsed_s", unit="s", doc="time since the run's first step could begin"),
    Metric(name="commit_s", unit="s", doc="time to store the step, while the next one runs"),
    Metric(name="tokens_per_s", unit="tokens/s", doc="response_tokens over the time since the end of the previous step",
           label="step", prometheus_name="tokens_per_second"),

    Metric(name="sampled", unit="", kind=Kind.EVALUATION, doc="mean reward of the sampled responses"),
    Metric(name="sampled_stderr", unit="", kind=Kind.EVALUATION, doc="standard error of that mean, over prompts"),
    Metric(name="greedy", unit="", kind=Kind.EVALUATION, doc="mean reward of the greedy responses"),
    Metric(name="greedy_stderr", unit="", kind=Kind.EVALUATION, doc="standard error of that mean, over prompts"),
    Metric(name="tokens", unit="tokens", kind=Kind.EVALUATION, doc="tokens sampled in the evaluation"),
    Metric(name="seconds", unit="s", kind=Kind.EVALUATION, doc="time from the evaluation's request to its last score"),
    Metric(name="tokens_per_s", unit="tokens/s", kind=Kind.RUN, doc="response tokens of all steps over elapsed_s of "
           "the last (summary.json, live view, simulate)"),
    Metric(name="steady_tokens_per_s", unit="tokens/s", kind=Kind.RUN, doc="the same without the run's warm-up and end "
           "(simulate, to compare variants)"),

    Metric(name="step", unit="steps", kind=Kind.GAUGE, doc="training steps finished", prometheus_name="step"),
    Metric(name="staleness_in_flight", unit="versions", kind=Kind.GAUGE, doc="mean age of groups being sampled, now",
           prometheus_name="staleness_in_flight"),
    Metric(name="staleness_in_queue", unit="versions", kind=Kind.GAUGE, doc="mean age of finished groups "
           "in the queue, now", prometheus_name="staleness_in_queue"),
    Metric(name="num_queued", unit="trajectories", kind=Kind.GAUGE, doc="trajectories waiting for an instance",
           prometheus_name="trajectories_queued"),
    Metric(name="num_running", unit="trajectories", kind=Kind.GAUGE, doc="trajectories being sampled",
           prometheus_name="trajectories_running"),
    Metric(name="num_in_environment", unit="trajectories", kind=Kind.GAUGE, doc="trajectories waiting for their "
           "environment", prometheus_name="trajectories_in_environment"),
    Metric(name="num_scoring", unit="trajectories", kind=Kind.GAUGE, doc="trajectories waiting for their reward",
           prometheus_name="trajectories_scoring"),
    Metric(name="instance_tokens_per_s", unit="tokens/s", kind=Kind.GAUGE, doc="tokens sampled by one instance, since "
           "the dashboard page was last drawn"),
    Metric(name="num_started", unit="trajectories", kind=Kind.COUNTER, doc="trajectories started since the run began",
           prometheus_name="trajectories_started"),
)  # fmt: skip

EVALUATION_PREFIX = "evaluation/"
"""Prefix of the metrics of evaluations in trackers: `evaluation/SET/METRIC`."""
REWARD_PART_PREFIX = "reward/"
"""Prefix of the mean of each part of a job's reward: `reward/PART`."""
SOURCE_PREFIX = "task/"
"""Prefix of the metrics of a job's task sources: `task/SOURCE/METRIC`, with a metric of SOURCE_METRICS."""
SOURCE_METRICS = {
    m.name: m
    for m in (
        Metric(name="reward", unit="", doc="mean reward of the source's groups in the batch"),
        Metric(name="reward_scored", unit="", doc="mean reward of all its groups that were scored since the previous "
               "step, filtered ones included"),
        Metric(name="trained_share", unit="share", doc="its part of the groups trained on since the run began"),
        Metric(name="drawn_share", unit="share", doc="its part of the groups drawn since the run began"),
    )
}  # fmt: skip
"""The metrics of a task source, by name without prefix."""
STEP_METRICS = {m.name: m for m in METRICS if m.kind is Kind.STEP}
EVALUATION_METRICS = {m.name: m for m in METRICS if m.kind is Kind.EVALUATION}
GAUGES = {m.name: m for m in METRICS if m.kind is Kind.GAUGE}
DERIVED_METRICS = frozenset({"commit_s", "tokens_per_s"})
"""Metrics of a step that are not in its stored record: they are known later, or computed from two steps."""


def axis_title(quantity: str, *names: str) -> str:
    """Title of a plot's axis for these step metrics: quantity and unit. Raises ValueError if their units differ."""
    (unit,) = {STEP_METRICS[name].unit for name in names}
    return f"{quantity}, {unit}" if unit else quantity


def step_with_tokens_per_s(step: Mapping[str, float], previous: Mapping[str, float] | None) -> dict[str, float]:
    """Add tokens_per_s to a copy of a step's metrics. previous: metrics of the previous step; None for the first."""
    seconds = step.get("elapsed_s", 0.0) - (previous.get("elapsed_s", 0.0) if previous else 0.0)
    return {**step, "tokens_per_s": _rate(step.get("response_tokens", 0.0), seconds)}


def steps_with_tokens_per_s(steps: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Add tokens_per_s to copies of the metrics of all steps."""
    result: list[dict[str, float]] = []
    for step in steps:
        result.append(step_with_tokens_per_s(step, result[-1] if result else None))
    return result


def tokens_per_s(steps: Sequence[Mapping[str, float]]) -> float:
    """Tokens per second of a run, from its steps so far; 0 without steps."""
    return _rate(sum(s.get("response_tokens", 0.0) for s in steps), steps[-1].get("elapsed_s", 0.0) if steps else 0.0)


def _rate(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


PROMETHEUS_PREFIX = "staleflow_"
"""Prefix of all names in Prometheus."""

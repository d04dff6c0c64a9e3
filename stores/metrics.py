"""Every metric, declared once: its name, its unit and what it is. Metrics travel as floats by name.

Tokens per second has one meaning: response tokens that were trained on, over wall time. Of a run: from when its first
step could begin to the end of its last step. Of a step: its batch, over the time since the step before ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    unit: str
    doc: str


METRICS = (
    Metric(name="reward", unit="", doc="mean reward of the consumed batch"),
    Metric(name="reward_errors", unit="trajectories", doc="of the batch whose reward could not be computed"),
    Metric(name="groups_with_signal", unit="share", doc="groups of the batch with unequal rewards; failed ones aside"),
    Metric(name="response_tokens", unit="tokens", doc="sampled tokens of the batch"),
    Metric(name="response_mean", unit="tokens", doc="mean response length"),
    Metric(name="response_max", unit="tokens", doc="longest response"),
    Metric(name="truncated_share", unit="share", doc="responses that ran into max_new_tokens"),
    Metric(name="staleness_mean", unit="versions", doc="mean of step - v_traj over the batch"),
    Metric(name="staleness_max", unit="versions", doc="largest of them; at most eta"),
    Metric(name="staleness_in_flight", unit="versions", doc="mean age of groups being sampled, over the step"),
    Metric(name="staleness_in_queue", unit="versions", doc="mean age of finished groups that wait, over the step"),
    Metric(name="mixed_versions", unit="share", doc="trajectories sampled under more than one version"),
    Metric(name="sampling_s", unit="s", doc="mean time from first routing to the last token"),
    Metric(name="loss", unit="", doc="loss, mean over minibatches"),
    Metric(name="grad_norm", unit="", doc="gradient norm before clipping, mean over minibatches"),
    Metric(name="clip_share", unit="share", doc="tokens where the clip cut the gradient"),
    Metric(name="ratio_mean", unit="", doc="mean importance ratio to the behaviour policy"),
    Metric(name="kl_rollout", unit="nats", doc="k3 estimate of KL(rollout || trainer), fresh tokens, before the step"),
    Metric(name="mismatch_mean", unit="nats", doc="mean |stored - recomputed logprob|, fresh tokens, equal weights"),
    Metric(name="mismatch_max", unit="nats", doc="largest of them"),
    Metric(name="probe_drift", unit="nats", doc="largest |logprob of the probe - the trainer's| of all instances"),
    Metric(name="learning_rate", unit="", doc="of the step"),
    Metric(name="tokens_trained", unit="tokens", doc="tokens with gradient"),
    Metric(name="fetch_s", unit="s", doc="fetching the batch from the trajectory server"),
    Metric(name="train_s", unit="s", doc="forward, backward and optimizer"),
    Metric(name="publish_s", unit="s", doc="writing and fingerprinting the new weights"),
    Metric(name="overhead_s", unit="s", doc="of the step, between its batch being ready and its version being known, "
           "less train_s and publish_s"),
    Metric(name="wait_s", unit="s", doc="the trainer waited for a batch to become ready"),
    Metric(name="elapsed_s", unit="s", doc="since the run's first step could begin"),
    Metric(name="commit_s", unit="s", doc="storing the step, while the next one runs"),
    Metric(name="tokens_per_s", unit="tokens/s", doc="response_tokens over the time since the step before ended"),
)  # fmt: skip
NAMES = frozenset(m.name for m in METRICS)


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

"""Diagnosis of a run's bottleneck from the times of its steps: one cause, its share of the time, and advice. Pure.

If the trainer hardly waits, it is the bottleneck, and the question is how many instances would keep up with it.
Otherwise the activity during its waiting time is the bottleneck: rewards, environments or slots on their hosts, a slow
instance, loading of weights, KV memory, or too little sampling. Sampling increases with another instance or with a
larger staleness bound. The cost model says which increases it more:

    rate(n) = n / token_s(n)                               tokens/s of an instance that runs n trajectories
    one more instance   (I + 1) / I if all are full, else token_s(n) / token_s(n I / (I + 1)): the work is spread wider
    one more version    rate(n (eta + 2) / (eta + 1)) / rate(n) as far as instances have room, else 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from staleflow.pipeline.config.factories import cost_model_at, ledger_eta
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.profiling.fit import CostModelFit
from staleflow.pipeline.profiling.step_samples import DraftStats
from staleflow.pipeline.profiling.step_times import PeriodTimes, StepTimes, find_slow_instances, sum_steps
from staleflow.tasks.emulation.cost_model import CostModel

NEGLIGIBLE_SHARE = 0.1
"""Share of the time that the trainer may wait, and share of environment slots that may be missing, before a change is
advised: about the cost of single long responses."""
MIN_BOTTLENECK_SHARE = 0.5
"""Minimum share of the waiting time that makes an activity the bottleneck."""
MIN_WINDOW_STEPS = 5
"""Number of latest steps in the diagnosis of a running job, if eta + 1 are fewer."""
REQUIRED_SAMPLING_FACTOR = 1.5
"""Factor on the sampling that `num_instances_needed` requires, because it assumes full instances and the bound leaves
gaps."""


class Cause(Enum):
    """Bottleneck of a run."""

    REWARD = "reward"
    ENVIRONMENT = "environment"
    ENVIRONMENT_SLOTS = "environment slots"
    SLOW_INSTANCE = "slow instance"
    WEIGHTS = "weights"
    KV_MEMORY = "KV memory"
    FEW_INSTANCES = "too few instances"
    BOUND = "staleness bound"
    MANY_INSTANCES = "too many instances"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpeed:
    """A job, and what determines the speed of its instances.

    Args:
        cost_model: Cost model of a decode step.
        acceptance_rate: Acceptance rate of draft tokens.
        is_fitted: Whether `cost_model` was fitted to this run; otherwise only ratios of its times are used.
    """

    config: RunConfig
    cost_model: CostModel
    acceptance_rate: float
    is_fitted: bool = False

    @property
    def eta(self) -> int:
        """Number of versions that work may lag behind under its admission rule."""
        return max_versions_behind(self.config)

    def token_s(self, running: float, kv_tokens: float) -> float:
        """Seconds per token of each request while an instance runs `running` of them, with the job's drafting."""
        num_running = max(1, round(running))
        cost = cost_model_at(self.cost_model, self.config.rollout.engine.speculation, self.acceptance_rate, num_running)
        return cost.step_s(max(running, 1.0), kv_tokens)


def max_versions_behind(config: RunConfig) -> int:
    """Number of versions that a job's work may lag behind: its staleness bound, or that of its admission rule."""
    return config.staleness.admission.max_versions_behind(ledger_eta(config))


def make_job_speed(
    config: RunConfig, fit: CostModelFit | None = None, draft_stats: DraftStats | None = None
) -> JobSpeed:
    """Build the `JobSpeed` of a job. fit: cost model fitted to the job's run, if there is one. draft_stats: draft
    statistics of that run."""
    draft_stats = draft_stats or DraftStats()
    acceptance_rate = draft_stats.acceptance_rate
    return JobSpeed(
        config=config,
        cost_model=config.rollout.cost if fit is None else draft_stats.scale_cost_model(fit.model),
        acceptance_rate=config.workload.acceptance_rate if acceptance_rate is None else acceptance_rate,
        is_fitted=fit is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The bottleneck of a run. share: share of the time in which the trainer waits, or trains if it is the
    bottleneck."""

    cause: Cause
    share: float
    finding: str
    """The finding, for display."""
    advice: str
    """What to change, for display."""
    change: tuple[tuple[str, float | str], ...] = ()
    """Keys of the job file and the values advised, for a simulation."""

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values, for JSON."""
        return {"cause": self.cause.value, "share": self.share, "what": self.finding, "advice": self.advice}

    @property
    def line(self) -> str:
        """The finding and the advice in one line."""
        return f"{self.finding}: {self.advice}"

    @property
    def short_line(self) -> str:
        """Short form, for the printed line of a training step."""
        activity = "busy" if self.cause in (Cause.TRAINER, Cause.MANY_INSTANCES) else "idle"
        return f"bottleneck: {self.cause.value} (trainer {activity} {self.share:.0%})"


def diagnose(times: StepTimes, job_speed: JobSpeed) -> Diagnosis | None:
    """Find the bottleneck from the sum of several steps; None without steps."""
    if not times.num_steps or not times.total_s:
        return None
    share = times.waiting.total_s / times.total_s
    if share < NEGLIGIBLE_SHARE:
        return _diagnose_trainer(1 - share, num_instances_needed(times, job_speed), job_speed.config.rollout.instances)
    return _diagnose_waiting(times, job_speed, share)


def sum_recent_steps(step_times: Sequence[StepTimes], eta: int) -> StepTimes:
    """Sum of the latest eta + 1 steps, at least MIN_WINDOW_STEPS, as far as there are so many without the first step,
    in which the pipeline fills."""
    return sum_steps(step_times[max(1, len(step_times) - max(eta + 1, MIN_WINDOW_STEPS)) :] or step_times)


def _diagnose_waiting(times: StepTimes, job_speed: JobSpeed, share: float) -> Diagnosis:
    diagnosis, rollout = partial(Diagnosis, share=share), job_speed.config.rollout
    waiting_times, waits = times.waiting, f"the trainer waits {share:.0%} of the time"
    if waiting_times.share_of(waiting_times.scoring_s) >= MIN_BOTTLENECK_SHARE:
        return diagnosis(
            cause=Cause.REWARD,
            finding=f"{waits}, {waiting_times.share_of(waiting_times.scoring_s):.0%} of that for rewards",
            advice="make the reward function faster, or raise reward.workers",
        )
    if waiting_times.share_of(waiting_times.environment_s) >= MIN_BOTTLENECK_SHARE:
        return _diagnose_environment(waiting_times, job_speed, share)
    slow_names, factor = find_slow_instances(times.speeds)
    if slow_names:
        names = f"{slow_names[0]} takes" if len(slow_names) == 1 else f"{', '.join(slow_names)} take"
        return diagnosis(
            cause=Cause.SLOW_INSTANCE,
            finding=f"{waits}, and {names} {factor:.1f} times as long for a token as the others",
            advice="check what else runs on that machine, or leave it out",
            change=(("simulation.straggler_share", 0.0),),
        )
    if waiting_times.share_of(waiting_times.pull_s) >= MIN_BOTTLENECK_SHARE:
        return diagnosis(
            cause=Cause.WEIGHTS,
            finding=f"{waits}, and instances load weights {waiting_times.share_of(waiting_times.pull_s):.0%} of that",
            advice="take larger steps (batch.groups_per_step), publish bfloat16 instead of float32 (model.dtype), or "
            "use a faster network if there are several hosts",
        )
    runs = f"instances run {waiting_times.mean_running:.0f} of {rollout.engine.max_running}"
    if waiting_times.share_of(waiting_times.out_of_memory_s) >= MIN_BOTTLENECK_SHARE:
        return diagnosis(
            cause=Cause.KV_MEMORY,
            finding=f"{waits}, and KV memory is full ({runs})",
            advice=f"raise rollout.engine.kv_tokens above {rollout.engine.kv_tokens}",
            change=(("rollout.engine.kv_tokens", 2 * rollout.engine.kv_tokens),),
        )
    instance_gain, version_gain = compute_sampling_gains(waiting_times, job_speed)
    admission = job_speed.config.staleness.admission
    if instance_gain >= version_gain or not admission.keeps_bound:
        return diagnosis(
            cause=Cause.FEW_INSTANCES,
            finding=f"{waits} for responses ({runs})",
            advice=f"add an instance (rollout.instances = {rollout.instances + 1})",
            change=(("rollout.instances", rollout.instances + 1),),
        )
    finding = f"{waits} for the longest responses, and instances have room ({runs})"
    if not admission.starts_all_reservable:
        change: tuple[tuple[str, float | str], ...] = (("staleness.admission", "staleflow"),)
        return diagnosis(cause=Cause.BOUND, finding=finding, advice='staleness.admission = "staleflow"', change=change)
    return diagnosis(
        cause=Cause.BOUND,
        finding=finding,
        advice=f"fewer instances, or one more version of staleness (staleness.eta = {job_speed.eta + 1})",
        change=(("staleness.eta", job_speed.eta + 1),),
    )


def _diagnose_environment(waiting_times: PeriodTimes, job_speed: JobSpeed, share: float) -> Diagnosis:
    """Diagnose a run whose trainer waits for environments: for their steps, or for free slots on their hosts."""
    environment = job_speed.config.environment
    num_slots = environment.hosts * environment.concurrency
    environment_share = waiting_times.share_of(waiting_times.environment_s)
    waits = f"the trainer waits {share:.0%} of the time, {environment_share:.0%} of that for"
    if waiting_times.mean_in_environment > (1 + NEGLIGIBLE_SHARE) * num_slots:
        slots_per_host = math.ceil(waiting_times.mean_in_environment / environment.hosts)
        return Diagnosis(
            cause=Cause.ENVIRONMENT_SLOTS,
            share=share,
            finding=f"{waits} slots on environment hosts ({waiting_times.mean_in_environment:.0f} needed, "
            f"of {num_slots})",
            advice=f"raise environment.concurrency to {slots_per_host} while the hosts' machines have room, or "
            f"environment.hosts above {environment.hosts}",
            change=(("environment.concurrency", slots_per_host),),
        )
    return Diagnosis(
        cause=Cause.ENVIRONMENT,
        share=share,
        finding=f"{waits} environments ({waiting_times.mean_in_environment:.0f} in steps, {num_slots} slots)",
        advice="make the environment faster, or start more (batch.extra_groups)",
    )


def _diagnose_trainer(share: float, num_needed: int, num_instances: int) -> Diagnosis:
    """The diagnosis that the trainer is the bottleneck. share: share of the time in which it trains. num_needed: number
    of instances that keep up with it. A single instance is never advised: the trainer may wait for it."""
    trains = f"training takes {share:.0%} of the time"
    if 1 < num_needed < num_instances:
        return Diagnosis(
            cause=Cause.MANY_INSTANCES,
            share=share,
            finding=f"{trains}, and on average {num_needed} of {num_instances} instances would keep up",
            advice=f"rollout.instances = {num_needed}, or a faster trainer",
            change=(("rollout.instances", num_needed),),
        )
    return Diagnosis(
        cause=Cause.TRAINER,
        share=share,
        finding=trains,
        advice="a faster trainer, or a smaller batch" if num_needed == 1 else "all parts are used well",
    )


def compute_sampling_gains(waiting_times: PeriodTimes, job_speed: JobSpeed) -> tuple[float, float]:
    """Factors on the sampling rate: of one more instance, and of one more version of staleness."""
    num_instances, running = job_speed.config.rollout.instances, max(waiting_times.mean_running, 1e-9)
    kv_tokens_each = waiting_times.mean_kv_tokens / running

    def token_s(n: float) -> float:
        return job_speed.token_s(n, n * kv_tokens_each)

    free_share = 1 - waiting_times.share_of(waiting_times.at_max_running_s + waiting_times.out_of_memory_s)
    instance_gain = token_s(running) / token_s(running * num_instances / (num_instances + 1))
    growth = (job_speed.eta + 2) / (job_speed.eta + 1)
    version_gain = growth * token_s(running) / token_s(running * growth)
    return 1 + free_share * (instance_gain - 1) + (1 - free_share) / num_instances, 1 + free_share * (version_gain - 1)


def num_instances_needed(times: StepTimes, job_speed: JobSpeed) -> int:
    """Minimum number of instances that sample as much as the run did in the same time, weight loads excluded, if each
    is as full as its limits and the bound allow. Trajectories in environments count as running on an instance."""
    config, engine = job_speed.config, job_speed.config.rollout.engine
    trajectory_seconds = times.waiting.trajectory_seconds + times.training.trajectory_seconds
    kv_token_seconds = times.waiting.kv_token_seconds + times.training.kv_token_seconds
    kv_tokens_each = kv_token_seconds / trajectory_seconds if trajectory_seconds else 0.0
    max_running = min(engine.max_running, engine.kv_tokens / kv_tokens_each if kv_tokens_each else math.inf)
    measured_s = sum(s.measured_s for s in times.speeds.values())
    expected_s = sum(s.expected_s for s in times.speeds.values())
    slowdown = measured_s / expected_s if expected_s and not job_speed.is_fitted else 1.0
    sampling_s = times.total_s - times.waiting.pull_s - times.training.pull_s
    in_flight = (job_speed.eta + 1) * config.groups_started_per_step * config.members_started_per_group
    for count in range(1, config.rollout.instances):
        n = max(1.0, min(max_running, in_flight / count))
        token_s = job_speed.token_s(n, n * kv_tokens_each) * slowdown
        if count * n / token_s * sampling_s >= REQUIRED_SAMPLING_FACTOR * times.num_tokens:
            return count
    return config.rollout.instances

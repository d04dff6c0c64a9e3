"""Diagnosis of a run's bottleneck from the times of its steps: one cause, its share of the time, and advice. Pure.

If the trainer hardly waits, it is the bottleneck, and the question is how many instances would keep up with it.
Otherwise its waiting time names the bottleneck: rewards, environments or slots on their hosts, a slow instance, weights
being loaded, KV memory, or too little sampling. More sampling comes from another instance or from a larger staleness
bound; which gains more follows from the cost model:

    rate(n) = n / step_s(n)                                tokens/s of an instance that runs n trajectories
    one more instance   (I + 1) / I if all are full, else step_s(n) / step_s(n I / (I + 1)): the same work, more thinly
    one more version    rate(n (eta + 2) / (eta + 1)) / rate(n) as far as instances have room, else 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from staleflow.pipeline.config.factories import ledger_eta, while_drafting
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.profiling.draft_stats import DraftsUsed
from staleflow.pipeline.profiling.fit import Fit
from staleflow.pipeline.profiling.step_times import PeriodTimes, StepTimes, slow_instances, sum_steps
from staleflow.pipeline.strategies.admission import Admission
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.engines.engine_settings import Speculation

SMALL_SHARE = 0.1
"""Share of the time that the trainer may wait before anything is advised: about what single long responses cost."""
MAIN_SHARE = 0.5
"""Share of the waiting time from which on an activity is the bottleneck."""
MIN_STEPS = 5
"""Minimum number of latest steps in the diagnosis of a running job."""
SAFETY_FACTOR = 1.5
"""Factor on the sampling that `instances_needed` asks for: it assumes full instances, and the bound leaves gaps."""


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
class Sizes:
    """Sizes of a job that determine its speed.

    eta: versions that its admission rule lets work be behind. trajectories: per training step. hosts, concurrency: of
    environments. cost: of a decode step. acceptance: rate of drafted tokens. fitted: whether `cost` was fitted to this
    run; otherwise only ratios of it are used.
    """

    eta: int
    admission: Admission
    trajectories: int
    instances: int
    max_running: int
    kv_tokens: int
    hosts: int
    concurrency: int
    cost: CostModel
    speculation: Speculation
    acceptance: float
    fitted: bool = False

    def token_s(self, running: float, kv_tokens: float) -> float:
        """Seconds per token of each request while an instance runs `running` of them, with the job's drafting."""
        num_running = max(1, round(running))
        cost = while_drafting(self.cost, self.speculation, self.acceptance, num_running, kv_tokens)
        return cost.mean_step_s(running, kv_tokens)


def versions_behind(config: RunConfig) -> int:
    """Versions that a job's work may be behind: its bound, or that of an admission rule with its own."""
    return config.staleness.admission.versions_behind(ledger_eta(config))


def sizes_of(config: RunConfig, fit: Fit | None = None, drafts: DraftsUsed | None = None) -> Sizes:
    """Make the `Sizes` of a job. fit: of the job's own run, if it has one; drafts: draft statistics of that run."""
    staleness, engine = config.staleness, config.rollout.engine
    drafts = drafts or DraftsUsed()
    acceptance = drafts.acceptance
    return Sizes(
        eta=versions_behind(config),
        admission=staleness.admission,
        trajectories=config.oversampled_groups * config.oversampled_group_size,
        instances=config.rollout.instances,
        max_running=engine.max_running,
        kv_tokens=engine.kv_tokens,
        hosts=config.environment.hosts,
        concurrency=config.environment.concurrency,
        cost=config.rollout.cost if fit is None else drafts.cost(fit.model),
        speculation=engine.speculation,
        acceptance=config.workload.acceptance_rate if acceptance is None else acceptance,
        fitted=fit is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Bottleneck of a run. share: of the time that the trainer waits, or trains if it is the bottleneck itself."""

    cause: Cause
    share: float
    finding: str
    """The finding, for people."""
    advice: str
    """What to change, for people."""
    change: tuple[tuple[str, float | str], ...] = ()
    """The same as keys of the job file and their new values, for a simulation of its effect."""
    halved: tuple[str, ...] = ()
    """Keys whose seconds a simulation of its effect halves."""
    injected: tuple[tuple[str, float], ...] = ()
    """Keys and values that the job does not have, but the run: what slows it and no job file says."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"cause": self.cause.value, "share": self.share, "what": self.finding, "advice": self.advice}

    @property
    def line(self) -> str:
        return f"{self.finding}: {self.advice}"

    @property
    def short(self) -> str:
        """Short form, for the printed line of a training step."""
        does = "busy" if self.cause in (Cause.TRAINER, Cause.MANY_INSTANCES) else "idle"
        return f"bottleneck: {self.cause.value} (trainer {does} {self.share:.0%})"


def diagnose(load: StepTimes, sizes: Sizes) -> Diagnosis | None:
    """Find the bottleneck of the summed steps; None if there are none."""
    if not load.steps or not load.total_s:
        return None
    share = load.waiting.total_s / load.total_s
    if share < SMALL_SHARE:
        return trainer_limits(1 - share, instances_needed(load, sizes), sizes.instances)
    return _trainer_waits(load, sizes, share)


def recent(loads: Sequence[StepTimes], eta: int) -> StepTimes:
    """Sum of the latest steps: at least eta + 1 of them, without the first step, in which the pipeline fills."""
    return sum_steps(loads[max(1, len(loads) - max(eta + 1, MIN_STEPS)) :] or loads)


def _trainer_waits(load: StepTimes, sizes: Sizes, share: float) -> Diagnosis:
    waiting, waits = load.waiting, f"the trainer waits {share:.0%} of the time"
    if waiting.share(waiting.scoring_s) >= MAIN_SHARE:
        return Diagnosis(
            cause=Cause.REWARD,
            share=share,
            finding=f"{waits}, {waiting.share(waiting.scoring_s):.0%} of that for rewards",
            advice="make the reward function faster, or raise reward.workers",
            halved=("simulation.reward_s",),
        )
    if waiting.share(waiting.environment_s) >= MAIN_SHARE:
        return _environment_limits(waiting, sizes, share)
    slow, factor = slow_instances(load.speeds)
    if slow:
        names = f"{slow[0]} takes" if len(slow) == 1 else f"{', '.join(slow)} take"
        return Diagnosis(
            cause=Cause.SLOW_INSTANCE,
            share=share,
            finding=f"{waits}, and {names} {factor:.1f} times as long for a token as the others",
            advice="see what else runs on that machine, or do without it",
            change=(("simulation.straggler_share", 0.0),),
            injected=(
                ("simulation.straggler_share", len(slow) / sizes.instances),
                ("simulation.straggler_factor", factor),
            ),
        )
    if waiting.share(waiting.pull_s) >= MAIN_SHARE:
        return Diagnosis(
            cause=Cause.WEIGHTS,
            share=share,
            finding=f"{waits}, and instances load weights {waiting.share(waiting.pull_s):.0%} of that",
            advice="pull less often (rollout.synchronization), or speed up the network between the hosts",
            halved=("simulation.pull_s",),
        )
    runs = f"instances run {waiting.running:.0f} of {sizes.max_running}"
    if waiting.share(waiting.out_of_memory_s) >= MAIN_SHARE:
        return Diagnosis(
            cause=Cause.KV_MEMORY,
            share=share,
            finding=f"{waits}, and KV memory is full ({runs})",
            advice=f"raise rollout.engine.kv_tokens above {sizes.kv_tokens}",
            change=(("rollout.engine.kv_tokens", 2 * sizes.kv_tokens),),
        )
    instance, version = gains(waiting, sizes)
    if instance >= version or not sizes.admission.keeps_bound:
        return Diagnosis(
            cause=Cause.FEW_INSTANCES,
            share=share,
            finding=f"{waits} for responses ({runs})",
            advice=f"add an instance (rollout.instances = {sizes.instances + 1})",
            change=(("rollout.instances", sizes.instances + 1),),
        )
    finding = f"{waits} for the longest responses, and instances have room ({runs})"
    if not sizes.admission.reserves:
        change: tuple[tuple[str, float | str], ...] = (("staleness.admission", "staleflow"),)
        return Diagnosis(
            cause=Cause.BOUND, share=share, finding=finding, advice='staleness.admission = "staleflow"', change=change
        )
    return Diagnosis(
        cause=Cause.BOUND,
        share=share,
        finding=finding,
        advice=f"fewer instances, or one more version of staleness (staleness.eta = {sizes.eta + 1})",
        change=(("staleness.eta", sizes.eta + 1),),
    )


def _environment_limits(waiting: PeriodTimes, sizes: Sizes, share: float) -> Diagnosis:
    """Diagnosis if the trainer waits for environments: for their steps, or for free slots on their hosts."""
    num_slots = sizes.hosts * sizes.concurrency
    waits = f"the trainer waits {share:.0%} of the time, {waiting.share(waiting.environment_s):.0%} of that for"
    if waiting.awaiting_environment > (1 + SMALL_SHARE) * num_slots:
        needed_slots = math.ceil(waiting.awaiting_environment / sizes.hosts)
        return Diagnosis(
            cause=Cause.ENVIRONMENT_SLOTS,
            share=share,
            finding=f"{waits} slots on environment hosts ({waiting.awaiting_environment:.0f} needed, of {num_slots})",
            advice=f"raise environment.concurrency to {needed_slots} while the hosts' machines have room, or "
            f"environment.hosts above {sizes.hosts}",
            change=(("environment.concurrency", needed_slots),),
        )
    return Diagnosis(
        cause=Cause.ENVIRONMENT,
        share=share,
        finding=f"{waits} environments ({waiting.awaiting_environment:.0f} in steps, {num_slots} slots)",
        advice="make the environment faster, or start more (batch.extra_groups)",
        halved=("workload.tool_s",),
    )


def trainer_limits(share: float, needed: int, instances: int) -> Diagnosis:
    """Diagnosis if the trainer is the bottleneck. share: of the time that it trains. needed: instances that keep up."""
    trains = f"training takes {share:.0%} of the time"
    if 1 < needed < instances:
        return Diagnosis(
            cause=Cause.MANY_INSTANCES,
            share=share,
            finding=f"{trains}, and {needed} of {instances} instances would keep up",
            advice=f"rollout.instances = {needed}, or a faster trainer",
            change=(("rollout.instances", needed),),
        )
    suffices = f", and one of {instances} instances would keep up" if needed < instances else ""
    return Diagnosis(
        cause=Cause.TRAINER,
        share=share,
        finding=f"{trains}{suffices}",
        advice="a faster trainer, or a smaller batch" if instances == 1 or suffices else "all parts are used well",
        halved=("simulation.train_s", "simulation.train_s_per_token"),
    )


def gains(waiting: PeriodTimes, sizes: Sizes) -> tuple[float, float]:
    """Factors on the sampling rate: (of one more instance, of one more version of staleness)."""
    count, running = sizes.instances, max(waiting.running, 1e-9)
    kv_tokens_each = waiting.kv_tokens / running

    def step_s(n: float) -> float:
        return sizes.token_s(n, n * kv_tokens_each)

    free_share = 1 - waiting.share(waiting.at_max_running_s + waiting.out_of_memory_s)
    thinner = step_s(running) / step_s(running * count / (count + 1))
    more = (sizes.eta + 2) / (sizes.eta + 1)
    fuller = more * step_s(running) / step_s(running * more)
    return 1 + free_share * (thinner - 1) + (1 - free_share) / count, 1 + free_share * (fuller - 1)


def instances_needed(load: StepTimes, sizes: Sizes) -> int:
    """Minimum number of instances that sample as much as was trained on, each as full as its limits and the bound
    allow."""
    running_s = load.waiting.running_s + load.training.running_s
    kv_tokens_each = (load.waiting.kv_s + load.training.kv_s) / running_s if running_s else 0.0
    max_running = (
        min(sizes.max_running, sizes.kv_tokens / kv_tokens_each) if kv_tokens_each else float(sizes.max_running)
    )
    measured_s = sum(s.measured_s for s in load.speeds.values())
    expected_s = sum(s.expected_s for s in load.speeds.values())
    slower = measured_s / expected_s if expected_s and not sizes.fitted else 1.0
    in_flight = (sizes.eta + 1) * sizes.trajectories
    for count in range(1, sizes.instances):
        n = max(1.0, min(max_running, in_flight / count))
        step_s = sizes.token_s(n, n * kv_tokens_each) * slower
        if count * n / step_s * load.total_s >= SAFETY_FACTOR * load.tokens:
            return count
    return sizes.instances

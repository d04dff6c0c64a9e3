"""What limits a run, from the loads of its steps: one cause, its share of the time, and what to change. Pure.

If the trainer hardly waits, it is the limit, and the question is how many instances would keep up with it. Otherwise
its waiting time says what for: rewards, environments or a place on their hosts, a slow instance, weights being loaded,
KV memory, or more sampling. More sampling comes from another instance or from a larger bound; which is worth more
follows from the cost model:

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

LITTLE = 0.1
"""Share of the time that the trainer may wait without being worth a change: about what single long responses cost."""
MOSTLY = 0.5
"""Share of the waiting time from which on something is what the trainer waits for."""
LATEST = 5
"""Fewest latest steps that are judged together while a run lasts."""
RESERVE = 1.5
"""Factor by which the instances that are said to keep up could sample more than is needed if they were always full:
under the bound they are not."""


class Cause(Enum):
    """What limits a run."""

    REWARD = "reward"
    ENVIRONMENT = "environment"
    ENVIRONMENT_PLACES = "environment places"
    SLOW_INSTANCE = "slow instance"
    WEIGHTS = "weights"
    KV_MEMORY = "KV memory"
    FEW_INSTANCES = "too few instances"
    BOUND = "staleness bound"
    MANY_INSTANCES = "too many instances"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a job that bear on its speed. eta: versions that its admission rule lets work lie behind.
    trajectories: of a step. hosts, concurrency: of environments. cost: of a decode step; acceptance:
    of drafted tokens. fitted: whether it is fitted
    to the run itself; else only ratios of it are used."""

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
        """Seconds in which each trajectory of so many on an instance gains a token, with drafts as the job has them."""
        whole = max(1, round(running))
        cost = while_drafting(self.cost, self.speculation, self.acceptance, whole, kv_tokens)
        return cost.mean_step_s(running, kv_tokens)


def versions_behind(config: RunConfig) -> int:
    """How many versions a job's work may lie behind: its bound, or that of a rule that does not ask for one."""
    return config.staleness.admission.versions_behind(ledger_eta(config))


def sizes_of(config: RunConfig, fit: Fit | None = None, drafts: DraftsUsed | None = None) -> Sizes:
    """The sizes of a job. fit: to its own run, if there is one; drafts: of that run."""
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
    """What limits a run. share: of the time; the trainer's waiting, or its training if it is the limit itself."""

    cause: Cause
    share: float
    what: str
    """The finding, for people."""
    advice: str
    """What to change, for people."""
    change: tuple[tuple[str, float | str], ...] = ()
    """The same as keys of the job file and their new values, for a simulation of its effect."""
    halved: tuple[str, ...] = ()
    """Keys whose seconds a simulation of its effect halves."""
    planted: tuple[tuple[str, float], ...] = ()
    """Keys and values that the job does not have, but the run: what slows it and no job file says."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"cause": self.cause.value, "share": self.share, "what": self.what, "advice": self.advice}

    @property
    def line(self) -> str:
        return f"{self.what}: {self.advice}"

    @property
    def short(self) -> str:
        """The finding in a few words, for the line of a training step."""
        does = "busy" if self.cause in (Cause.TRAINER, Cause.MANY_INSTANCES) else "idle"
        return f"bottleneck: {self.cause.value} (trainer {does} {self.share:.0%})"


def diagnose(load: StepTimes, sizes: Sizes) -> Diagnosis | None:
    """What limits the steps of a load; None if it has none."""
    if not load.steps or not load.total_s:
        return None
    share = load.waiting.total_s / load.total_s
    if share < LITTLE:
        return trainer_limits(1 - share, instances_needed(load, sizes), sizes.instances)
    return _trainer_waits(load, sizes, share)


def recent(loads: Sequence[StepTimes], eta: int) -> StepTimes:
    """The latest steps of a run, added up: a period of it at least, without the first step, in which it fills."""
    return sum_steps(loads[max(1, len(loads) - max(eta + 1, LATEST)) :] or loads)


def _trainer_waits(load: StepTimes, sizes: Sizes, share: float) -> Diagnosis:
    waiting, waits = load.waiting, f"the trainer waits {share:.0%} of the time"
    if waiting.share(waiting.scoring_s) >= MOSTLY:
        return Diagnosis(
            cause=Cause.REWARD,
            share=share,
            what=f"{waits}, {waiting.share(waiting.scoring_s):.0%} of that for rewards",
            advice="make the reward function faster, or raise reward.workers",
            halved=("simulation.reward_s",),
        )
    if waiting.share(waiting.environment_s) >= MOSTLY:
        return _environment_limits(waiting, sizes, share)
    slow, factor = slow_instances(load.speeds)
    if slow:
        names = f"{slow[0]} takes" if len(slow) == 1 else f"{', '.join(slow)} take"
        return Diagnosis(
            cause=Cause.SLOW_INSTANCE,
            share=share,
            what=f"{waits}, and {names} {factor:.1f} times as long for a token as the others",
            advice="see what else runs on that machine, or do without it",
            change=(("simulation.straggler_share", 0.0),),
            planted=(
                ("simulation.straggler_share", len(slow) / sizes.instances),
                ("simulation.straggler_factor", factor),
            ),
        )
    if waiting.share(waiting.pull_s) >= MOSTLY:
        return Diagnosis(
            cause=Cause.WEIGHTS,
            share=share,
            what=f"{waits}, and instances load weights {waiting.share(waiting.pull_s):.0%} of that",
            advice="pull less often (rollout.synchronization), or speed up the network between the hosts",
            halved=("simulation.pull_s",),
        )
    runs = f"instances run {waiting.running:.0f} of {sizes.max_running}"
    if waiting.share(waiting.out_of_memory_s) >= MOSTLY:
        return Diagnosis(
            cause=Cause.KV_MEMORY,
            share=share,
            what=f"{waits}, and KV memory is full ({runs})",
            advice=f"raise rollout.engine.kv_tokens above {sizes.kv_tokens}",
            change=(("rollout.engine.kv_tokens", 2 * sizes.kv_tokens),),
        )
    instance, version = gains(waiting, sizes)
    if instance >= version or not sizes.admission.keeps_bound:
        return Diagnosis(
            cause=Cause.FEW_INSTANCES,
            share=share,
            what=f"{waits} for responses ({runs})",
            advice=f"add an instance (rollout.instances = {sizes.instances + 1})",
            change=(("rollout.instances", sizes.instances + 1),),
        )
    what = f"{waits} for the longest responses, and instances have room ({runs})"
    if not sizes.admission.reserves:
        change: tuple[tuple[str, float | str], ...] = (("staleness.admission", "staleflow"),)
        return Diagnosis(
            cause=Cause.BOUND, share=share, what=what, advice='staleness.admission = "staleflow"', change=change
        )
    return Diagnosis(
        cause=Cause.BOUND,
        share=share,
        what=what,
        advice=f"fewer instances, or one more version of staleness (staleness.eta = {sizes.eta + 1})",
        change=(("staleness.eta", sizes.eta + 1),),
    )


def _environment_limits(waiting: PeriodTimes, sizes: Sizes, share: float) -> Diagnosis:
    """Which of both the trainer waits for: environments, or a place on their hosts, since more act than there are."""
    places = sizes.hosts * sizes.concurrency
    waits = f"the trainer waits {share:.0%} of the time, {waiting.share(waiting.environment_s):.0%} of that for"
    if waiting.awaiting_environment > (1 + LITTLE) * places:
        enough = math.ceil(waiting.awaiting_environment / sizes.hosts)
        return Diagnosis(
            cause=Cause.ENVIRONMENT_PLACES,
            share=share,
            what=f"{waits} a place on environment hosts ({waiting.awaiting_environment:.0f} act, there are {places})",
            advice=f"raise environment.concurrency to {enough} while the hosts' machines have room, or "
            f"environment.hosts above {sizes.hosts}",
            change=(("environment.concurrency", enough),),
        )
    return Diagnosis(
        cause=Cause.ENVIRONMENT,
        share=share,
        what=f"{waits} environments ({waiting.awaiting_environment:.0f} act, there are places for {places})",
        advice="make the environment faster, or start more (batch.extra_groups)",
        halved=("workload.tool_s",),
    )


def trainer_limits(share: float, needed: int, instances: int) -> Diagnosis:
    """The finding that a trainer which trains for this share of the time is the limit. needed: how many of the
    instances keep up with it."""
    trains = f"training takes {share:.0%} of the time"
    if 1 < needed < instances:
        return Diagnosis(
            cause=Cause.MANY_INSTANCES,
            share=share,
            what=f"{trains}, and {needed} of {instances} instances would keep up",
            advice=f"rollout.instances = {needed}, or a faster trainer",
            change=(("rollout.instances", needed),),
        )
    one = f", and one of {instances} instances would keep up" if needed < instances else ""
    return Diagnosis(
        cause=Cause.TRAINER,
        share=share,
        what=f"{trains}{one}",
        advice="a faster trainer, or a smaller batch" if instances == 1 or one else "all parts are used well",
        halved=("simulation.train_s", "simulation.train_s_per_token"),
    )


def gains(waiting: PeriodTimes, sizes: Sizes) -> tuple[float, float]:
    """Factors on the rate of sampling: of one more instance, and of one more version of staleness."""
    count, running = sizes.instances, max(waiting.running, 1e-9)
    each = waiting.kv_tokens / running

    def step_s(n: float) -> float:
        return sizes.token_s(n, n * each)

    room = 1 - waiting.share(waiting.at_max_running_s + waiting.out_of_memory_s)
    thinner = step_s(running) / step_s(running * count / (count + 1))
    more = (sizes.eta + 2) / (sizes.eta + 1)
    fuller = more * step_s(running) / step_s(running * more)
    return 1 + room * (thinner - 1) + (1 - room) / count, 1 + room * (fuller - 1)


def instances_needed(load: StepTimes, sizes: Sizes) -> int:
    """The least number of instances that sample as much as was trained on, each as full as cache, concurrency and bound
    allow."""
    running_s = load.waiting.running_s + load.training.running_s
    each = (load.waiting.kv_s + load.training.kv_s) / running_s if running_s else 0.0
    most = min(sizes.max_running, sizes.kv_tokens / each) if each else float(sizes.max_running)
    measured_s = sum(s.measured_s for s in load.speeds.values())
    expected_s = sum(s.expected_s for s in load.speeds.values())
    slower = measured_s / expected_s if expected_s and not sizes.fitted else 1.0
    in_flight = (sizes.eta + 1) * sizes.trajectories
    for count in range(1, sizes.instances):
        n = max(1.0, min(most, in_flight / count))
        step_s = sizes.token_s(n, n * each) * slower
        if count * n / step_s * load.total_s >= RESERVE * load.tokens:
            return count
    return sizes.instances

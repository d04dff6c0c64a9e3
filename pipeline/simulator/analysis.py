"""Throughput of a simulated run, and the lower bound on its step time. Pure.

The bound of a step is the largest of three times: its training; the decode and prefill work of its batch, divided over
all instances that are as full as cache, concurrency and staleness bound allow; and, if no work is dropped, its longest
response alone on an instance, divided by the eta + 1 intervals between steps that it may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from staleflow.pipeline.config import factories
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.profiling.diagnosis import Diagnosis, diagnose, make_job_speed, max_versions_behind
from staleflow.pipeline.profiling.step_times import StepTimes, find_steady_steps, sum_steady_steps
from staleflow.stores.metrics import tokens_per_s
from staleflow.tasks.emulation.batch_simulator import WorkTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeBound:
    """Lower bound on the seconds of a step, by cause. running: number of trajectories per instance in work_s.
    intervals: number of intervals between steps that a response may take."""

    train_s: float
    work_s: float
    longest_s: float
    running: int
    intervals: int

    @property
    def step_s(self) -> float:
        return max(self.train_s, self.work_s, self.longest_s)

    @property
    def cause(self) -> str:
        causes = {self.train_s: "training", self.work_s: "decode work", self.longest_s: "longest response"}
        return causes[self.step_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationStats:
    """Statistics of a simulated run. The trainer's share is of the measured steps, other shares of all instances' time
    in the run. ending_counts: trajectories by fate and reason. command_counts: by kind. refusals: counts by reason."""

    num_measured_steps: int
    step_s: float
    """Mean seconds between training steps."""
    tokens_per_s: float
    """See stores/metrics.py."""
    steady_tokens_per_s: float
    """The same in the steady part, which approximates longer runs, and by which variants are compared."""
    step_time_bound: StepTimeBound
    trainer_idle_share: float
    rollout_idle_share: float
    prefill_share: float
    pull_share: float
    staleness: dict[int, int]
    """Number of trained trajectories by v_train - v_traj."""
    bound_kept: bool
    """Whether no trajectory was older than the job's eta."""
    ending_counts: dict[str, int]
    wasted_tokens: int
    reprefilled_tokens: int
    cached_tokens: int
    """Context tokens of later turns that were still cached on an instance."""
    max_kept_tokens: int
    """Maximum KV tokens that an instance had cached for later turns."""
    sampled_tokens: int
    preemptions: int
    command_counts: dict[str, int]
    num_events: int
    refusals: dict[str, int]
    instance_losses: int
    finished_s: float
    diagnosis: Diagnosis | None
    """Diagnosis of what limits the job; None without steps."""

    @property
    def share_of_step_time_bound(self) -> float:
        """Lower bound on the step time as a share of the step time; 1 is optimal."""
        return self.step_time_bound.step_s / self.step_s if self.step_s else 0.0

    @property
    def dropped(self) -> dict[str, int]:
        """Number of trajectories by reason that ended before the run did and were not trained on."""
        counts: Counter[str] = Counter()
        for outcome, count in sorted(self.ending_counts.items()):
            counts[outcome.partition(":")[2]] += count
        return {reason: count for reason, count in counts.items() if reason not in ("", "run_ended")}


def compute_stats(config: RunConfig, trace: Trace) -> SimulationStats:
    """Compute the statistics of the steady part of a run; see `find_steady_steps`."""
    eta = min(max_versions_behind(config), config.staleness.eta)
    first, last = find_steady_steps(len(trace.steps), eta)
    window = trace.steps[first + 1 : last + 1] or trace.steps
    begin_s = trace.steps[first].finished_s if last > first else 0.0
    span_s = max(window[-1].finished_s - begin_s, 1e-12)
    totals = [i.work for i in trace.instances]
    alive_s = sum((trace.finished_s if i.lost_s is None else i.lost_s) - i.joined_s for i in trace.instances) or 1e-12
    sampled_tokens = sum(w.sampled_tokens for w in totals)
    busy_s = sum(w.decode_s + w.prefill_s + w.pull_s for w in totals)
    staleness: Counter[int] = Counter()
    for step in trace.steps:
        staleness.update(step.staleness)
    return SimulationStats(
        num_measured_steps=len(window),
        step_s=span_s / len(window),
        tokens_per_s=tokens_per_s(as_metrics(trace.steps)),
        steady_tokens_per_s=steady_tokens_per_s(as_metrics(trace.steps), eta),
        step_time_bound=mean_step_time_bound(config, window),
        trainer_idle_share=max(0.0, 1 - sum(s.finished_s - s.ready_s for s in window) / span_s),
        rollout_idle_share=max(0.0, 1 - busy_s / alive_s),
        prefill_share=sum(w.prefill_s for w in totals) / alive_s,
        pull_share=sum(w.pull_s for w in totals) / alive_s,
        staleness=dict(sorted(staleness.items())),
        bound_kept=max(staleness, default=0) <= config.staleness.eta,
        ending_counts=trace.ending_counts,
        wasted_tokens=max(0, sampled_tokens - trace.evaluated_tokens - sum(s.tokens for s in trace.steps)),
        reprefilled_tokens=sum(w.repeated_prefill_tokens for w in totals),
        cached_tokens=sum(w.cached_tokens for w in totals),
        max_kept_tokens=max((i.max_kept_tokens for i in trace.instances), default=0),
        sampled_tokens=sampled_tokens,
        preemptions=sum(w.preemptions for w in totals),
        command_counts=trace.command_counts,
        num_events=trace.num_events,
        refusals=trace.refusals,
        instance_losses=trace.instance_losses,
        finished_s=trace.finished_s,
        diagnosis=diagnose(sum_steady_steps(trace.step_times, eta), make_job_speed(config)),
    )


def steady_tokens_per_s(steps: Sequence[Mapping[str, float]], eta: int) -> float:
    """Tokens per second in the steady part of a simulated or real run; of the whole run if it has one step."""
    first, last = find_steady_steps(len(steps), eta)
    if last <= first:
        return tokens_per_s(steps)
    begin_s = steps[first]["elapsed_s"]
    return tokens_per_s([{**s, "elapsed_s": s["elapsed_s"] - begin_s} for s in steps[first + 1 : last + 1]])


def as_metrics(steps: Iterable[TrainedStep]) -> list[dict[str, float]]:
    """Simulated steps as metrics of real ones: tokens, seconds since the start, and mean staleness."""
    return [
        {
            "response_tokens": float(s.tokens),
            "elapsed_s": s.finished_s,
            "staleness_mean": sum(lag * n for lag, n in s.staleness.items()) / sum(s.staleness.values()),
        }
        for s in steps
    ]


def mean_step_time_bound(config: RunConfig, steps: list[TrainedStep]) -> StepTimeBound:
    """Compute the lower bound on the time of training steps, as a mean over steps of a simulated run."""
    cost, engine, count = config.rollout.cost, config.rollout.engine, len(steps)
    instances = config.rollout.instances
    tokens = sum(s.tokens for s in steps)
    context = sum(s.context_tokens for s in steps)
    intervals = max_versions_behind(config) + 1
    in_flight = intervals * config.groups_started_per_step * config.members_started_per_group / instances
    running = max(1, int(min(engine.max_running, engine.kv_tokens / (context / tokens), in_flight)))
    cost = factories.job_cost_model_at(config, running)
    work_s = cost.k1 * context + cost.compute_s(running) / running * tokens
    work_s += cost.prefill * sum(s.min_prefill_tokens for s in steps)
    keeps_all = config.staleness.admission.awaits_due_groups and not config.batch.stragglers.truncates
    longest_s = sum(s.longest_s for s in steps) / count / intervals if keeps_all else 0.0
    return StepTimeBound(
        train_s=sum(s.finished_s - s.ready_s for s in steps) / count,
        work_s=work_s / instances / count,
        longest_s=longest_s,
        running=running,
        intervals=intervals,
    )


def explain_step_time(stats: SimulationStats) -> list[str]:
    """Explain the step time of a simulated run, and its distance from the lower bound, in lines of text."""
    bound = stats.step_time_bound
    lines = [stats.diagnosis.line] if stats.diagnosis is not None else []
    lines += [
        f"a step takes {stats.step_s:.1f} s; the lower bound is {bound.step_s:.1f} s "
        f"({stats.share_of_step_time_bound:.0%} of it is reached)",
        f"  {bound.train_s:8.1f} s  training" + _mark(bound, bound.train_s),
        f"  {bound.work_s:8.1f} s  decode and prefill work of a batch, {bound.running} trajectories per instance"
        + _mark(bound, bound.work_s),
        f"  {bound.longest_s:8.1f} s  longest response alone on an instance, divided by eta + 1 = {bound.intervals}"
        + (_mark(bound, bound.longest_s) if bound.longest_s else "  (does not apply: long responses may be dropped)"),
        "time of an instance:",
    ]
    decode = 1 - stats.rollout_idle_share - stats.prefill_share - stats.pull_share
    recomputed_share = stats.reprefilled_tokens / max(1, stats.reprefilled_tokens + stats.sampled_tokens)
    lines += [
        f"  {decode:8.1%}  decoding",
        f"  {stats.prefill_share:8.1%}  prefill ({stats.reprefilled_tokens / 1e6:.1f} M tokens were prefilled again, "
        f"{recomputed_share:.0%} of these and the sampled tokens)",
        f"  {stats.pull_share:8.1%}  loading weights",
        f"  {stats.rollout_idle_share:8.1%}  idle",
        f"the trainer waited {stats.trainer_idle_share:.1%} of the time",
    ]
    if stats.cached_tokens:
        share = stats.cached_tokens / (stats.cached_tokens + stats.reprefilled_tokens)
        lines.append(
            f"{stats.cached_tokens / 1e6:.1f} M context tokens of later turns were still cached, {share:.0%} of those "
            f"computed before; an instance had at most {stats.max_kept_tokens:,} cached"
        )
    if stats.wasted_tokens:
        lines.append(f"{stats.wasted_tokens / 1e6:.2f} M sampled tokens were never trained on")
    for reason, count in sorted(stats.refusals.items(), key=lambda item: -item[1]):
        lines.append(f"  {count:8}  times routing declined: {reason}")
    return lines


def _mark(bound: StepTimeBound, seconds: float) -> str:
    return "  <- the bound" if seconds == bound.step_s else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One training step."""

    step: int
    ready_s: float
    finished_s: float
    tokens: int
    """Sampled tokens of its batch."""
    min_prefill_tokens: int
    """Minimum number of tokens to prefill for its batch: prompts and tool results."""
    context_tokens: float
    """Sum over its sampled tokens of the KV tokens in context when each was sampled."""
    longest_tokens: int
    longest_s: float
    """Seconds of its longest response alone on an instance, including tool calls."""
    staleness: dict[int, int]
    """Number of trajectories by v_train - v_traj."""


@dataclass(slots=True)
class InstanceTrace:
    """The record of one simulated instance."""

    name: str
    joined_s: float
    lost_s: float | None = None
    work: WorkTotals = field(default_factory=WorkTotals)
    max_kept_tokens: int = 0
    """Maximum KV tokens cached for later turns, over all ticks."""


@dataclass(slots=True)
class Trace:
    """The record of one simulated run. command_counts: by kind."""

    steps: list[TrainedStep] = field(default_factory=list)
    instances: list[InstanceTrace] = field(default_factory=list)
    command_counts: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    ending_counts: dict[str, int] = field(default_factory=dict)
    """Number of trajectories by fate and reason, over the whole run."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Numbers of proposals that the coordinator refused, by reason."""
    instance_losses: int = 0
    """Number of instances that were lost."""
    finished_s: float = 0.0
    evaluations: list[tuple[int, float, bool]] = field(default_factory=list)
    """Evaluations as (version, time of the end in seconds, whether it was abandoned)."""
    evaluated_tokens: int = 0
    """Tokens sampled for evaluations."""
    step_times: list[StepTimes] = field(default_factory=list)
    """Time breakdown of each step."""

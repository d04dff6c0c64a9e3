"""Time breakdown of a run's steps from its events and commands: what the trainer waits for, how full the instances are,
and how long a token takes on each. Pure.

Runs, simulations and journals have the same events and commands, so the same numbers come out of all three. Seconds are
the coordinator's: those of the cost model in a simulated or emulated run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.coordination.commands import (
    Abort,
    Command,
    Discard,
    FinishEvaluation,
    Pull,
    Route,
    Score,
    SetDraftLength,
    StepEnvironment,
    Train,
)
from staleflow.pipeline.coordination.events import (
    DecodeStats,
    EnvironmentFailed,
    EnvironmentStepped,
    EvaluationRequested,
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PullFinished,
    RunResumed,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.profiling.draft_stats import DraftStats
from staleflow.pipeline.profiling.fit import MIN_POINTS, Fit, StepPoint, fit_steps
from staleflow.pipeline.profiling.latencies import Latencies
from staleflow.pipeline.profiling.step_times import Speed, StepTimes, slow_instances, sum_steps
from staleflow.pipeline.profiling.tracked_instances import FleetCounts, ReportSums, RunningTrajectory, TrackedInstance
from staleflow.stores.trajectory import GroupId, InstanceId, TrajectoryId, is_evaluation
from staleflow.tasks.emulation.cost_model import CostModel

MAX_SAMPLES = 4096
"""Maximum sampled responses kept for the fit. Beyond it, only every second, fourth, ... response is kept."""
LEVELS, PARTS, LENGTHS = 32, 2, 4
"""Bins in which samples are averaged: by running requests, each of these by KV tokens, each of these by response
length. Different lengths separate the time of decoding from a fixed delay per response."""
MAX_DELAY_SHARE = 0.3
"""Largest share of a response's time that may be delay of its messages; a fit with more is rejected."""
MIN_FIXED_SHARE = 0.01
"""Minimum share of a decode step that does not depend on the KV cache."""
MIN_WARM_SAMPLES = 64
"""Samples after the first training step from which on earlier ones, sampled while processes warmed up, are left out."""
MIN_STEPS, MIN_BUSY_SHARE = 3, 0.9
"""Decode steps between two reports, and the share of that time spent in them, needed to measure a step from them."""
TOKEN_S_WEIGHT = 0.1
"""Weight of the latest response in the moving average of an instance's seconds per token."""


class Sample(NamedTuple):
    """Mean decode step of an instance during one response, or between two of its reports.

    computed_tokens: tokens per step, including drafted ones. steps: number of decode steps; a step samples one token,
    and accepts drafted ones. prefilled: tokens that the instance prefilled in the same time, including this response's.
    """

    computed_tokens: float
    kv_tokens: float
    seconds: float
    steps: float
    prefilled: float
    instance: InstanceId


class TimeTracker:
    """Time breakdown of one run, updated with each event.

    Args:
        cost: Cost model that measured speeds are compared with.
        group_size: Trajectories of a group.
        on_pull: The job's rollout.on_pull: what loading weights does to running requests.
        first_length: Tokens that an instance drafts before the first `SetDraftLength`.

    Attributes:
        finished_steps: Times of each finished training step.
        latencies: Latencies of everything but decoding.
    """

    def __init__(self, cost: CostModel, group_size: int, *, on_pull: str = "keep", first_length: int = 0) -> None:
        self._cost = cost
        self._on_pull = on_pull
        self._group_size = group_size
        self._first_length = first_length
        self._now = 0.0
        self._training = False
        self._instances: dict[InstanceId, TrackedInstance] = {}
        self._fleet = FleetCounts()
        self._prompts: dict[GroupId, int] = {}
        self._tokens: dict[TrajectoryId, int] = {}  # of unfinished trajectories that are on no instance
        self._instance_of: dict[TrajectoryId, TrackedInstance] = {}
        self._queued: set[TrajectoryId] = set()
        self._scoring: set[TrajectoryId] = set()
        self._in_environment: dict[TrajectoryId, int] = {}  # and their route number
        # (instance, its pulls by then, cached tokens) of each trajectory's latest turn.
        self._cached_on: dict[TrajectoryId, tuple[InstanceId, int, int]] = {}
        self._step = StepTimes()
        self._samples: list[Sample] = []
        self._step_samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)  # between two reports of an instance
        self._warmup_samples: list[Sample] = []
        self._until_sample = self._sample_every = 1
        self.finished_steps: list[StepTimes] = []
        self.latencies = Latencies()
        self._reported_drafts, self._sampled_drafts = DraftStats(), DraftStats()

    def observe(self, now: float, event: Event, commands: Iterable[Command]) -> None:
        """Update from an event handled at `now`, and the commands that followed."""
        commands = tuple(commands)
        if isinstance(event, RunResumed):
            self._reset_in_flight(now)
        self._advance_to(now)
        self._apply_event(event)
        for command in commands:
            self._apply_command(command)
        self.latencies.observe(now, event, commands)

    def start(self, now: float) -> None:
        """Start measuring at `now` seconds on the coordinator's clock."""
        self._now = now

    def _reset_in_flight(self, now: float) -> None:
        """Clear the in-flight state of a killed run, when it is resumed."""
        self._now, self._training = now, False
        self._instances, self._fleet = {}, FleetCounts()
        for collection in (
            self._prompts,
            self._tokens,
            self._instance_of,
            self._queued,
            self._scoring,
            self._in_environment,
            self._cached_on,
        ):
            collection.clear()
        self._step = StepTimes()

    def fit(self) -> Fit | None:
        """Fit the cost model and the delay of messages to the samples; None if there are too few.

        The result is scaled so that it predicts the total time of all samples. Slow instances are left out.
        """
        slow, _ = self.slow
        samples = self._samples if len(self._samples) >= MIN_WARM_SAMPLES else [*self._warmup_samples, *self._samples]
        rows = np.asarray([sample[:-1] for sample in samples if sample.instance not in slow], np.float64)
        if len(rows) < MIN_POINTS:
            return None
        reports = np.asarray([part[:-1] for part in self._step_samples if part.instance not in slow], np.float64)
        if len(reports) >= MIN_WARM_SAMPLES:
            return self._fit_reports(reports, rows)
        fit = _fit_responses(rows)
        if fit.model.compute_s(1) <= 0:  # all ran under one load, which only its KV tokens explain
            fit = replace(
                fit, model=replace(fit.model, k4=MIN_FIXED_SHARE * float(rows[:, 2].sum() / rows[:, 3].sum()))
            )
        computed, kv_tokens, seconds, steps, prefilled = rows.T
        predicted_s = fit.model.steps_s(computed, kv_tokens) * steps + fit.model.prefill * prefilled + fit.delay_s
        factor = float(seconds.sum() / predicted_s.sum())
        model = replace(fit.model.times(factor), verify_share=self._cost.verify_share)  # steps of a run do not tell
        return replace(fit, model=model, delay_s=fit.delay_s * factor)

    def _fit_reports(self, reports: npt.NDArray[np.float64], rows: npt.NDArray[np.float64]) -> Fit:
        """Fit to the steps that instances reported, as they do in a job with speculative decoding.

        There, drafts are long while few requests run and short while many do, so whole responses computed much the
        same per step and do not determine the model. The time by which responses took longer is delay.
        """
        fit = fit_steps([replace(point, ended=0.0) for point in _averaged(reports)])
        computed, kv_tokens, seconds, steps, prefilled = rows.T
        predicted_s = fit.model.steps_s(computed, kv_tokens) * steps + fit.model.prefill * prefilled
        delay_s = max(0.0, float((seconds - predicted_s).mean()))
        model = replace(fit.model, verify_share=self._cost.verify_share)  # steps of a run do not tell
        return replace(fit, model=model, delay_s=delay_s if delay_s <= MAX_DELAY_SHARE * seconds.mean() else 0.0)

    @property
    def drafts(self) -> DraftStats:
        """Draft statistics from instances' reports, or from sampled responses if there are none (constant draft
        length)."""
        return self._reported_drafts if self._reported_drafts.steps else self._sampled_drafts

    @property
    def num_instances(self) -> int:
        """Number of instances that have finished a response."""
        return len(sum_steps(self.finished_steps).speeds)

    @property
    def slow(self) -> tuple[list[InstanceId], float]:
        """Slow instances of the run so far, and their factor; see `slow_instances`."""
        return slow_instances(sum_steps(self.finished_steps).speeds)

    # -- time ----------------------------------------------------------------------------------------------------

    def _advance_to(self, now: float) -> None:
        passed_s, self._now = max(0.0, now - self._now), max(now, self._now)
        fleet, count = self._fleet, max(1, self._fleet.instances)
        breakdown = self._step.training if self._training else self._step.waiting
        breakdown.total_s += passed_s
        num_sampling = fleet.running + len(self._queued)
        breakdown.scoring_s += passed_s * (0 < len(self._scoring) >= num_sampling + len(self._in_environment))
        environments_lead = 0 < len(self._in_environment) >= num_sampling + len(self._scoring)
        breakdown.environment_s += passed_s * environments_lead
        breakdown.awaiting_environment_s += passed_s * environments_lead * len(self._in_environment)
        breakdown.at_max_running_s += passed_s * fleet.full / count
        breakdown.out_of_memory_s += passed_s * (fleet.out_of_memory / count if self._queued else 0.0)
        breakdown.pull_s += passed_s * fleet.pulling / count
        breakdown.running_s += passed_s * fleet.running / count
        breakdown.kv_s += passed_s * fleet.kv_tokens / count

    # -- events and commands -------------------------------------------------------------------------------------

    def _apply_event(self, event: Event) -> None:  # noqa: PLR0912, PLR0915  one case per event
        match event:
            case GroupsArrived():
                for group in event.groups:
                    self._prompts[group.group] = group.prompt_tokens
                    first = group.group * self._group_size
                    self._queued.update(TrajectoryId(first + i) for i in range(self._group_size))
            case EvaluationRequested():
                for group in event.groups:
                    self._prompts[group.group] = group.prompt_tokens
                    self._queued.add(TrajectoryId(group.group * self._group_size))
            case RunResumed():
                for resumed in event.groups:
                    self._prompts[resumed.group] = resumed.prompt_tokens
                    for member in resumed.members:
                        if not member.sampled and not member.scored:
                            self._queued.add(member.trajectory)
                            self._tokens[member.trajectory] = member.tokens
            case InstanceJoined():
                instance = TrackedInstance(
                    event.instance, event.kv_capacity, event.max_running, self._first_length, self._now
                )
                self._instances[event.instance] = instance
                self._fleet.count(instance, 1)
            case InstanceLost():
                lost = self._instances.pop(event.instance, None)
                if lost is not None:
                    self._fleet.count(lost, -1)
                    for trajectory, state in lost.running.items():
                        del self._instance_of[trajectory]
                        self._tokens[trajectory] = state.delivered_tokens
                        self._queued.add(trajectory)
            case InstanceReported():
                self._apply_report(event)
            case TrajectorySampled():
                self._end_turn(event)
            case TrajectoryInterrupted():
                if self._leave(event.trajectory, event.route_number, event):
                    self._tokens[event.trajectory] = event.tokens
                    self._queued.add(event.trajectory)
            case TrajectoryFailed():
                earlier = self._instance_of.get(event.trajectory)
                delivered_tokens = 0 if earlier is None else earlier.running[event.trajectory].delivered_tokens
                if self._leave(event.trajectory, event.route_number, None):
                    self._tokens[event.trajectory] = delivered_tokens
                    self._queued.add(event.trajectory)
            case EnvironmentStepped():
                self._end_environment_step(event.trajectory, event.route_number, event.tokens)
            case EnvironmentFailed():
                self._end_environment_step(event.trajectory, event.route_number, 0)
            case TrajectoryScored():
                self._scoring.discard(event.trajectory)
                self._in_environment.pop(event.trajectory, None)
            case PullFinished() if event.instance in self._instances:
                self._set_pulling(self._instances[event.instance], pulling=False)
            case VersionPublished():
                self._training = False
                if not self.finished_steps:  # processes have warmed up
                    self._warmup_samples, self._samples = self._samples, []
                    self._until_sample = self._sample_every = 1
                self._step.steps = 1
                self.finished_steps.append(self._step)
                self._step = StepTimes()

    def _apply_command(self, command: Command) -> None:  # noqa: PLR0912  one case per command
        match command:
            case Route():
                instance = self._instances.get(command.instance)
                self._queued.discard(command.trajectory)
                if instance is not None:
                    self._enter(instance, command)
            case Abort():
                self._leave(command.trajectory, None, None)
            case Score():
                self._queued.discard(command.trajectory)
                self._tokens.pop(command.trajectory, None)
                self._scoring.add(command.trajectory)
            case StepEnvironment():
                self._queued.discard(command.trajectory)
                self._in_environment[command.trajectory] = command.route_number
            case Pull() if command.instance in self._instances:
                self._set_pulling(self._instances[command.instance], pulling=True)
            case SetDraftLength() if command.instance in self._instances:
                instance = self._instances[command.instance]
                instance.draft_length, instance.length_changes = command.length, instance.length_changes + 1
            case Train():
                self._training = True
                for trajectory in command.trajectories:
                    self._cached_on.pop(trajectory, None)
                    self._prompts.pop(GroupId(trajectory // self._group_size), None)
            case Discard():
                for ending in command.endings:
                    self._drop(ending.trajectory)
            case FinishEvaluation():
                for group in [group for group in self._prompts if is_evaluation(group)]:
                    del self._prompts[group]
                    self._drop(TrajectoryId(group * self._group_size))

    def _drop(self, trajectory: TrajectoryId) -> None:
        """Remove a discarded trajectory."""
        self._leave(trajectory, None, None)
        self._queued.discard(trajectory)
        self._scoring.discard(trajectory)
        self._in_environment.pop(trajectory, None)
        self._cached_on.pop(trajectory, None)
        self._tokens.pop(trajectory, None)

    def _end_turn(self, event: TrajectorySampled) -> None:
        instance = self._instance_of.get(event.trajectory)
        if self._leave(event.trajectory, event.route_number, event) and instance is not None:
            self._cached_on[event.trajectory] = instance.name, instance.pulls, event.tokens

    def _end_environment_step(self, trajectory: TrajectoryId, route_number: int, tokens: int) -> None:
        """Queue a trajectory after its environment step. tokens: its length now; 0 if the environment failed."""
        if self._in_environment.get(trajectory) != route_number:
            return
        del self._in_environment[trajectory]
        self._tokens[trajectory] = tokens
        self._queued.add(trajectory)
        if not tokens:
            self._cached_on.pop(trajectory, None)

    def _set_pulling(self, instance: TrackedInstance, *, pulling: bool) -> None:
        if self._on_pull == "adapter":
            return  # running requests and their caches are not affected
        self._fleet.count(instance, -1)
        instance.advance_to(self._now)
        instance.pulling = pulling
        instance.pulls += pulling
        if not pulling and self._on_pull == "interrupt":
            instance.prefilled += instance.kv_tokens
        self._fleet.count(instance, 1)

    def _enter(self, instance: TrackedInstance, command: Route) -> None:
        self._leave(command.trajectory, None, None)
        self._fleet.count(instance, -1)
        instance.advance_to(self._now)
        tokens = self._tokens.pop(command.trajectory, 0)
        prompt_tokens = self._prompts.get(GroupId(command.trajectory // self._group_size), 0)
        instance.running[command.trajectory] = RunningTrajectory(
            route_number=command.route_number, routed_s=self._now, tokens_at_route=tokens, delivered_tokens=tokens,
            tokens=tokens, steps=instance.steps, prompt_tokens=prompt_tokens, running_s=instance.running_s,
            kv_s=instance.kv_s, pull_s=instance.pull_s, prefilled=instance.prefilled,
        )  # fmt: skip
        instance.kv_tokens += prompt_tokens + tokens
        cached_on, pulls, cached = self._cached_on.get(command.trajectory, ("", 0, 0))
        is_cached = cached_on == instance.name and pulls == instance.pulls
        instance.prefilled += max(0, tokens - cached) if is_cached else prompt_tokens + tokens
        self._instance_of[command.trajectory] = instance
        self._fleet.count(instance, 1)

    def _leave(
        self,
        trajectory: TrajectoryId,
        route_number: int | None,
        sampled: TrajectorySampled | TrajectoryInterrupted | None,
    ) -> bool:
        """Remove a trajectory from its instance, and add a sample if its tokens are known.

        Returns False if the trajectory is on no instance, or under another route number. route_number: None for any.
        """
        instance = self._instance_of.get(trajectory)
        if instance is None or route_number not in (None, instance.running[trajectory].route_number):
            return False
        self._fleet.count(instance, -1)
        instance.advance_to(self._now)
        state = instance.running.pop(trajectory)
        instance.kv_tokens -= state.prompt_tokens + instance.tokens(state)
        del self._instance_of[trajectory]
        self._fleet.count(instance, 1)
        if sampled is not None and sampled.tokens > state.tokens_at_route:
            self._add_response_sample(instance, state, sampled, evaluated=is_evaluation(trajectory))
        return True

    def _add_response_sample(
        self,
        instance: TrackedInstance,
        state: RunningTrajectory,
        sampled: TrajectorySampled | TrajectoryInterrupted,
        *,
        evaluated: bool,
    ) -> None:
        tokens = sampled.tokens - state.tokens_at_route
        steps = max(1, tokens - sampled.accepted_tokens)
        self._sampled_drafts.count(self._first_length, steps, sampled.drafted_tokens, sampled.accepted_tokens)
        passed_s = self._now - state.routed_s
        seconds = passed_s - (instance.pull_s - state.pull_s)
        self._step.tokens += 0 if evaluated else tokens
        if seconds <= 0:
            return
        token_s = seconds / tokens
        instance.token_s = (
            token_s
            if instance.token_s == math.inf
            else instance.token_s + TOKEN_S_WEIGHT * (token_s - instance.token_s)
        )
        running, kv_tokens = (instance.running_s - state.running_s) / passed_s, (instance.kv_s - state.kv_s) / passed_s
        computed = running * (
            1.0 + self._cost.verify_share * sampled.drafted_tokens / steps
        )  # assumes that the other requests have equally long drafts
        speed = self._step.speeds.setdefault(instance.name, Speed())
        speed.measured_s += seconds
        speed.expected_s += self._cost.mean_step_s(computed, kv_tokens) * steps
        speed.responses += 1
        self._until_sample -= 1
        if not self._until_sample:
            self._until_sample = self._sample_every
            prefilled = instance.prefilled - state.prefilled
            self._samples.append(Sample(computed, kv_tokens, seconds, steps, prefilled, instance.name))
            if len(self._samples) > MAX_SAMPLES:
                self._samples = self._samples[::2]
                self._sample_every *= 2

    def _apply_report(self, event: InstanceReported) -> None:
        instance = self._instances.get(event.instance)
        if instance is None:
            return
        self._fleet.count(instance, -1)
        instance.advance_to(self._now)
        if event.steps is not None:
            self._add_step_sample(instance, event.steps)
        for trajectory, tokens in event.progress:
            state = instance.running.get(trajectory)
            if state is not None and tokens >= state.tokens_at_route:
                instance.kv_tokens += tokens - instance.tokens(state)
                state.tokens, state.steps = tokens, instance.steps
        for trajectory, tokens in event.delivered:
            state = instance.running.get(trajectory)
            if state is not None:
                state.delivered_tokens = max(state.delivered_tokens, tokens)
        self._fleet.count(instance, 1)

    def _add_step_sample(self, instance: TrackedInstance, stats: DecodeStats) -> None:
        """Add a sample of the steps since the instance's previous report, if it decoded all the time between them."""
        now = ReportSums(
            self._now, instance.length_changes, instance.pulls, instance.running_s, instance.kv_s, instance.prefilled
        )
        before, instance.reported = instance.reported, now
        if before is None or before.length_changes != now.length_changes:
            return
        self._reported_drafts.add(stats, instance.draft_length)
        passed_s, sampled_tokens = now.updated_s - before.updated_s, stats.tokens - stats.accepted_tokens
        running_s, kv_s = now.running_s - before.running_s, now.kv_s - before.kv_s
        if before.pulls != now.pulls or instance.pulling or stats.seconds < MIN_BUSY_SHARE * passed_s or not passed_s:
            return
        running = running_s / passed_s
        if sampled_tokens >= MIN_STEPS * running > 0:
            computed = running * (1.0 + self._cost.verify_share * stats.drafted_tokens / sampled_tokens)
            prefilled = now.prefilled - before.prefilled
            self._step_samples.append(
                Sample(computed, kv_s / passed_s, stats.seconds, sampled_tokens / running, prefilled, instance.name)
            )


def _fit_responses(rows: npt.NDArray[np.float64]) -> Fit:
    points = _averaged(rows)
    share = fit_steps(points).delay_s * len(rows) / float(rows[:, 2].sum())
    if share > MAX_DELAY_SHARE:  # with responses of one length, delays cannot be told from decoding
        points = [replace(point, ended=0.0) for point in points]
    else:  # while messages travel an instance runs fewer than the coordinator has there
        rows[:, :2] *= 1 - share
        points = _averaged(rows)
    return fit_steps(points)


def _averaged(rows: npt.NDArray[np.float64]) -> list[StepPoint]:
    """Average samples in bins (see LEVELS); too few bins: one point per sample. rows: [N, 5] samples."""
    running = np.maximum(1, np.rint(rows[:, 0])).astype(int)
    levels = [running == n for n in np.unique(running)]
    if len(levels) > LEVELS:
        levels = [np.isin(np.arange(len(rows)), part) for part in np.array_split(np.argsort(running), LEVELS)]
    points = []
    for level in levels:
        level_rows = rows[level]
        for part in np.array_split(level_rows[np.argsort(level_rows[:, 1], kind="stable")], PARTS):
            by_length = part[np.argsort(part[:, 3], kind="stable")]
            points += [_mean_point(too_few) for too_few in np.array_split(by_length, LENGTHS) if len(too_few)]
    return points if len(points) >= MIN_POINTS else [_mean_point(row[None]) for row in rows]


def _mean_point(rows: npt.NDArray[np.float64]) -> StepPoint:
    computed, kv_tokens, seconds, steps, prefilled = rows.T
    return StepPoint(
        running=max(1, round(float(np.average(computed, weights=seconds)))),
        kv_tokens=float(np.average(kv_tokens, weights=seconds)),
        step_s=float(seconds.sum() / steps.sum()),
        prefilled=float(prefilled.sum() / steps.sum()),
        ended=len(rows) / float(steps.sum()),
    )

"""Where the time of a run's steps goes, from its events and commands: what the trainer waits for, how full the
instances are, how long a token takes on each. Pure.

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
from staleflow.pipeline.profiling.draft_stats import DraftsUsed
from staleflow.pipeline.profiling.fit import FEWEST, Fit, StepPoint, fit_steps
from staleflow.pipeline.profiling.latencies import Latencies
from staleflow.pipeline.profiling.step_times import Speed, StepTimes, slow_instances, sum_steps
from staleflow.pipeline.profiling.tracked_instances import AtReport, FleetCounts, Sampling, TrackedInstance
from staleflow.stores.trajectory import GroupId, InstanceId, TrajectoryId, is_evaluation
from staleflow.tasks.emulation.cost_model import CostModel

SAMPLES_KEPT = 4096
"""Sampled responses kept for the fit; of more, every second, fourth, ... is kept."""
LEVELS, PARTS, LENGTHS = 32, 2, 4
"""Decode steps are averaged over responses that ran beside equally many, in so many levels; each level in so many parts
by KV tokens; and each part in so many by length, which tells decoding from delays."""
MOST_DELAY = 0.3
"""Share of a response's time that may be delay of its messages; where a fit says more, it is not believed."""
LEAST = 0.01
"""Least share of a decode step that does not depend on the KV cache."""
WARM_ENOUGH = 64
"""Responses since the end of the first training step that are enough to fit without those before."""
FEWEST_STEPS, BUSY = 3, 0.9
"""Decode steps between two reports from which on they say what one takes, and the share of the time that they must
have been under way."""
RECENT = 0.1
"""Weight of the latest response in an instance's seconds per token."""


class Sample(NamedTuple):
    """A sampled response, or a part of many: what a step of the instance computed on average, and what it took.
    computed: tokens, drafted ones included. steps: decode steps, each of one token and those that were drafted and
    accepted. prefilled: tokens that the instance prefilled meanwhile, its own included."""

    computed: float
    kv_tokens: float
    seconds: float
    steps: float
    prefilled: float
    instance: InstanceId


class TimeTracker:
    """Watches one run. members: trajectories of a group. on_pull: the job's rollout.on_pull, which says what loading
    weights does to what an instance runs. first_length: tokens that an instance drafts until it is told otherwise. The
    loads of its steps so far are in `loads`."""

    def __init__(self, cost: CostModel, members: int, *, on_pull: str = "keep", first_length: int = 0) -> None:
        self._cost = cost
        self._on_pull = on_pull
        self._members = members
        self._first_length = first_length
        self._now = 0.0
        self._training = False
        self._instances: dict[InstanceId, TrackedInstance] = {}
        self._fleet = FleetCounts()
        self._prompts: dict[GroupId, int] = {}
        self._tokens: dict[TrajectoryId, int] = {}  # of those off their instance, and not at its end
        self._on: dict[TrajectoryId, TrackedInstance] = {}
        self._queued: set[TrajectoryId] = set()
        self._scoring: set[TrajectoryId] = set()
        self._acting: dict[TrajectoryId, int] = {}  # and their route number
        # Where the latest turn was sampled, how often that instance had pulled by then, and the tokens it may hold.
        self._homes: dict[TrajectoryId, tuple[InstanceId, int, int]] = {}
        self._step = StepTimes()
        self._samples: list[Sample] = []
        self._steps: deque[Sample] = deque(maxlen=SAMPLES_KEPT)  # between two reports of an instance
        self._early: list[Sample] = []
        self._skip = self._every = 1
        self.loads: list[StepTimes] = []
        self.latencies = Latencies()
        self._reported_drafts, self._sampled_drafts = DraftsUsed(), DraftsUsed()

    def observe(self, now: float, event: Event, commands: Iterable[Command]) -> None:
        """Take in an event, when it was handled, and the commands that followed."""
        commands = tuple(commands)
        if isinstance(event, RunResumed):
            self._forget(now)
        self._pass_to(now)
        self._happened(event)
        for command in commands:
            self._ordered(command)
        self.latencies.observe(now, event, commands)

    def start(self, now: float) -> None:
        """Let time begin at `now`; what was before does not count."""
        self._now = now

    def _forget(self, now: float) -> None:
        """Forget what was in flight in a run that ended without a word."""
        self._now, self._training = now, False
        self._instances, self._fleet = {}, FleetCounts()
        for held in (self._prompts, self._tokens, self._on, self._queued, self._scoring, self._acting, self._homes):
            held.clear()
        self._step = StepTimes()

    def fit(self) -> Fit | None:
        """The cost model and delay that fit the sampled responses, so that all of them together take as long as they
        did; None if there are too few. Those of slow instances are left out."""
        slow, _ = self.slow
        samples = self._samples if len(self._samples) >= WARM_ENOUGH else [*self._early, *self._samples]
        rows = np.asarray([sample[:-1] for sample in samples if sample.instance not in slow], np.float64)
        if len(rows) < FEWEST:
            return None
        parts = np.asarray([part[:-1] for part in self._steps if part.instance not in slow], np.float64)
        if len(parts) >= WARM_ENOUGH:
            return self._fit_reports(parts, rows)
        fit = _fit_responses(rows)
        if fit.model.compute_s(1) <= 0:  # all ran under one load, which only its KV tokens explain
            fit = replace(fit, model=replace(fit.model, k4=LEAST * float(rows[:, 2].sum() / rows[:, 3].sum())))
        computed, kv_tokens, seconds, steps, prefilled = rows.T
        foretold_s = fit.model.steps_s(computed, kv_tokens) * steps + fit.model.prefill * prefilled + fit.delay_s
        factor = float(seconds.sum() / foretold_s.sum())
        model = replace(fit.model.times(factor), verify_share=self._cost.verify_share)  # steps of a run do not tell
        return replace(fit, model=model, delay_s=fit.delay_s * factor)

    def _fit_reports(self, parts: npt.NDArray[np.float64], rows: npt.NDArray[np.float64]) -> Fit:
        """The fit to what instances reported of their steps, which they do in a job that drafts: with drafts where few
        run and none where many do, responses as a whole ran beside much the same. What these took longer is delay."""
        fit = fit_steps([replace(point, ended=0.0) for point in _averaged(parts)])
        computed, kv_tokens, seconds, steps, prefilled = rows.T
        foretold_s = fit.model.steps_s(computed, kv_tokens) * steps + fit.model.prefill * prefilled
        delay_s = max(0.0, float((seconds - foretold_s).mean()))
        model = replace(fit.model, verify_share=self._cost.verify_share)  # steps of a run do not tell
        return replace(fit, model=model, delay_s=delay_s if delay_s <= MOST_DELAY * seconds.mean() else 0.0)

    @property
    def drafts(self) -> DraftsUsed:
        """What became of drafts: as instances reported, or where they did not, in journals of before, as responses tell
        in which nobody decided about drafts."""
        return self._reported_drafts if self._reported_drafts.steps else self._sampled_drafts

    @property
    def num_instances(self) -> int:
        """Instances that have sampled something in the run so far."""
        return len(sum_steps(self.loads).speeds)

    @property
    def slow(self) -> tuple[list[InstanceId], float]:
        """The slow instances of the run so far; see `slow_instances`."""
        return slow_instances(sum_steps(self.loads).speeds)

    # -- time ----------------------------------------------------------------------------------------------------

    def _pass_to(self, now: float) -> None:
        passed_s, self._now = max(0.0, now - self._now), max(now, self._now)
        fleet, count = self._fleet, max(1, self._fleet.instances)
        part = self._step.training if self._training else self._step.waiting
        part.total_s += passed_s
        others = fleet.running + len(self._queued)
        part.scoring_s += passed_s * (0 < len(self._scoring) >= others + len(self._acting))
        acting = 0 < len(self._acting) >= others + len(self._scoring)
        part.environment_s += passed_s * acting
        part.awaiting_environment_s += passed_s * acting * len(self._acting)
        part.at_max_running_s += passed_s * fleet.full / count
        part.out_of_memory_s += passed_s * (fleet.out_of_memory / count if self._queued else 0.0)
        part.idle_s += passed_s * fleet.idle / count
        part.pull_s += passed_s * fleet.pulling / count
        part.running_s += passed_s * fleet.running / count
        part.kv_s += passed_s * fleet.kv_tokens / count

    # -- events and commands -------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:  # noqa: PLR0912, PLR0915  one case per event
        match event:
            case GroupsArrived():
                for group in event.groups:
                    self._prompts[group.group] = group.prompt_tokens
                    first = group.group * self._members
                    self._queued.update(TrajectoryId(first + i) for i in range(self._members))
            case EvaluationRequested():
                for group in event.groups:
                    self._prompts[group.group] = group.prompt_tokens
                    self._queued.add(TrajectoryId(group.group * self._members))
            case RunResumed():
                for found in event.groups:
                    self._prompts[found.group] = found.prompt_tokens
                    for member in found.members:
                        if not member.sampled and not member.scored:
                            self._queued.add(member.trajectory)
                            self._tokens[member.trajectory] = member.tokens
            case InstanceJoined():
                one = TrackedInstance(
                    event.instance, event.kv_capacity, event.max_running, self._first_length, self._now
                )
                self._instances[event.instance] = one
                self._fleet.count(one, 1)
            case InstanceLost():
                lost = self._instances.pop(event.instance, None)
                if lost is not None:
                    self._fleet.count(lost, -1)
                    for trajectory, held in lost.running.items():
                        del self._on[trajectory]
                        self._tokens[trajectory] = held.delivered_tokens
                        self._queued.add(trajectory)
            case InstanceReported():
                self._reported(event)
            case TrajectorySampled():
                self._end_turn(event)
            case TrajectoryInterrupted():
                if self._leave(event.trajectory, event.route_number, event):
                    self._tokens[event.trajectory] = event.tokens
                    self._queued.add(event.trajectory)
            case TrajectoryFailed():
                on = self._on.get(event.trajectory)
                delivered_tokens = 0 if on is None else on.running[event.trajectory].delivered_tokens
                if self._leave(event.trajectory, event.route_number, None):
                    self._tokens[event.trajectory] = delivered_tokens
                    self._queued.add(event.trajectory)
            case EnvironmentStepped():
                self._hear_environment(event.trajectory, event.route_number, event.tokens)
            case EnvironmentFailed():
                self._hear_environment(event.trajectory, event.route_number, 0)
            case TrajectoryScored():
                self._scoring.discard(event.trajectory)
                self._acting.pop(event.trajectory, None)
            case PullFinished() if event.instance in self._instances:
                self._set_pulling(self._instances[event.instance], pulling=False)
            case VersionPublished():
                self._training = False
                if not self.loads:  # processes have warmed up
                    self._early, self._samples = self._samples, []
                    self._skip = self._every = 1
                self._step.steps = 1
                self.loads.append(self._step)
                self._step = StepTimes()

    def _ordered(self, command: Command) -> None:  # noqa: PLR0912  one case per command
        match command:
            case Route():
                one = self._instances.get(command.instance)
                self._queued.discard(command.trajectory)
                if one is not None:
                    self._enter(one, command)
            case Abort():
                self._leave(command.trajectory, None, None)
            case Score():
                self._queued.discard(command.trajectory)
                self._tokens.pop(command.trajectory, None)
                self._scoring.add(command.trajectory)
            case StepEnvironment():
                self._queued.discard(command.trajectory)
                self._acting[command.trajectory] = command.route_number
            case Pull() if command.instance in self._instances:
                self._set_pulling(self._instances[command.instance], pulling=True)
            case SetDraftLength() if command.instance in self._instances:
                one = self._instances[command.instance]
                one.draft_length, one.told = command.length, one.told + 1
            case Train():
                self._training = True
                for trajectory in command.trajectories:
                    self._homes.pop(trajectory, None)
                    self._prompts.pop(GroupId(trajectory // self._members), None)
            case Discard():
                for ending in command.endings:
                    self._drop(ending.trajectory)
            case FinishEvaluation():
                for group in [group for group in self._prompts if is_evaluation(group)]:
                    del self._prompts[group]
                    self._drop(TrajectoryId(group * self._members))

    def _drop(self, trajectory: TrajectoryId) -> None:
        """Forget a trajectory that has ended without being trained on."""
        self._leave(trajectory, None, None)
        self._queued.discard(trajectory)
        self._scoring.discard(trajectory)
        self._acting.pop(trajectory, None)
        self._homes.pop(trajectory, None)
        self._tokens.pop(trajectory, None)

    def _end_turn(self, event: TrajectorySampled) -> None:
        on = self._on.get(event.trajectory)
        if self._leave(event.trajectory, event.route_number, event) and on is not None:
            self._homes[event.trajectory] = on.name, on.pulls, event.tokens

    def _hear_environment(self, trajectory: TrajectoryId, route_number: int, tokens: int) -> None:
        """Queue a trajectory that has so many tokens now; 0 if its environment failed."""
        if self._acting.get(trajectory) != route_number:
            return
        del self._acting[trajectory]
        self._tokens[trajectory] = tokens
        self._queued.add(trajectory)
        if not tokens:
            self._homes.pop(trajectory, None)

    def _set_pulling(self, one: TrackedInstance, *, pulling: bool) -> None:
        if self._on_pull == "adapter":
            return  # it goes on as before, and what it has cached stays of use
        self._fleet.count(one, -1)
        one.pass_to(self._now)
        one.pulling = pulling
        one.pulls += pulling
        if not pulling and self._on_pull == "interrupt":
            one.prefilled += one.kv_tokens
        self._fleet.count(one, 1)

    def _enter(self, one: TrackedInstance, command: Route) -> None:
        self._leave(command.trajectory, None, None)
        self._fleet.count(one, -1)
        one.pass_to(self._now)
        tokens = self._tokens.pop(command.trajectory, 0)
        prompt_tokens = self._prompts.get(GroupId(command.trajectory // self._members), 0)
        one.running[command.trajectory] = Sampling(
            route_number=command.route_number, since=self._now, tokens_before=tokens, delivered_tokens=tokens,
            tokens=tokens, steps=one.steps, prompt_tokens=prompt_tokens, running_s=one.running_s, kv_s=one.kv_s,
            pull_s=one.pull_s, prefilled=one.prefilled,
        )  # fmt: skip
        one.kv_tokens += prompt_tokens + tokens
        home, pulls, cached = self._homes.get(command.trajectory, ("", 0, 0))
        stays = home == one.name and pulls == one.pulls
        one.prefilled += max(0, tokens - cached) if stays else prompt_tokens + tokens
        self._on[command.trajectory] = one
        self._fleet.count(one, 1)

    def _leave(
        self,
        trajectory: TrajectoryId,
        route_number: int | None,
        sampled: TrajectorySampled | TrajectoryInterrupted | None,
    ) -> bool:
        """Take a trajectory off its instance, and note how long its tokens took if they are known. False if it is not
        there under that route number. route_number: None for any."""
        one = self._on.get(trajectory)
        if one is None or route_number not in (None, one.running[trajectory].route_number):
            return False
        self._fleet.count(one, -1)
        one.pass_to(self._now)
        held = one.running.pop(trajectory)
        one.kv_tokens -= held.prompt_tokens + one.tokens(held)
        del self._on[trajectory]
        self._fleet.count(one, 1)
        if sampled is not None and sampled.tokens > held.tokens_before:
            self._sampled(one, held, sampled, evaluated=is_evaluation(trajectory))
        return True

    def _sampled(
        self,
        one: TrackedInstance,
        held: Sampling,
        sampled: TrajectorySampled | TrajectoryInterrupted,
        *,
        evaluated: bool,
    ) -> None:
        tokens = sampled.tokens - held.tokens_before
        steps = max(1, tokens - sampled.accepted_tokens)
        self._sampled_drafts.count(self._first_length, steps, sampled.drafted_tokens, sampled.accepted_tokens)
        passed_s = self._now - held.since
        seconds = passed_s - (one.pull_s - held.pull_s)
        self._step.tokens += 0 if evaluated else tokens
        if seconds <= 0:
            return
        token_s = seconds / tokens
        one.token_s = token_s if one.token_s == math.inf else one.token_s + RECENT * (token_s - one.token_s)
        running, kv_tokens = (one.running_s - held.running_s) / passed_s, (one.kv_s - held.kv_s) / passed_s
        computed = running * (
            1.0 + self._cost.verify_share * sampled.drafted_tokens / steps
        )  # the others draft as it does
        speed = self._step.speeds.setdefault(one.name, Speed())
        speed.measured_s += seconds
        speed.expected_s += self._cost.mean_step_s(computed, kv_tokens) * steps
        speed.responses += 1
        self._skip -= 1
        if not self._skip:
            self._skip = self._every
            prefilled = one.prefilled - held.prefilled
            self._samples.append(Sample(computed, kv_tokens, seconds, steps, prefilled, one.name))
            if len(self._samples) > SAMPLES_KEPT:
                self._samples = self._samples[::2]
                self._every *= 2

    def _reported(self, event: InstanceReported) -> None:
        one = self._instances.get(event.instance)
        if one is None:
            return
        self._fleet.count(one, -1)
        one.pass_to(self._now)
        if event.steps is not None:
            self._taken(one, event.steps)
        for trajectory, tokens in event.progress:
            held = one.running.get(trajectory)
            if held is not None and tokens >= held.tokens_before:
                one.kv_tokens += tokens - one.tokens(held)
                held.tokens, held.steps = tokens, one.steps
        for trajectory, tokens in event.delivered:
            held = one.running.get(trajectory)
            if held is not None:
                held.delivered_tokens = max(held.delivered_tokens, tokens)
        self._fleet.count(one, 1)

    def _taken(self, one: TrackedInstance, taken: DecodeStats) -> None:
        """Note what an instance's steps since its report before took, if it drafted and decoded all the time."""
        now = AtReport(self._now, one.told, one.pulls, one.running_s, one.kv_s, one.prefilled)
        before, one.reported = one.reported, now
        if before is None or before.told != now.told:
            return
        self._reported_drafts.add(taken, one.draft_length)
        passed_s, gained = now.at - before.at, taken.tokens - taken.accepted_tokens
        running_s, kv_s = now.running_s - before.running_s, now.kv_s - before.kv_s
        if before.pulls != now.pulls or one.pulling or taken.seconds < BUSY * passed_s or not passed_s:
            return
        running = running_s / passed_s
        if gained >= FEWEST_STEPS * running > 0:
            computed = running * (1.0 + self._cost.verify_share * taken.drafted_tokens / gained)
            prefilled = now.prefilled - before.prefilled
            self._steps.append(Sample(computed, kv_s / passed_s, taken.seconds, gained / running, prefilled, one.name))


def _fit_responses(rows: npt.NDArray[np.float64]) -> Fit:
    points = _averaged(rows)
    share = fit_steps(points).delay_s * len(rows) / float(rows[:, 2].sum())
    if share > MOST_DELAY:  # responses of one length, say: then nothing tells delays from decoding
        points = [replace(point, ended=0.0) for point in points]
    else:  # while messages travel an instance runs fewer than the coordinator has there
        rows[:, :2] *= 1 - share
        points = _averaged(rows)
    return fit_steps(points)


def _averaged(rows: npt.NDArray[np.float64]) -> list[StepPoint]:
    """Mean decode steps of responses whose steps computed equally many tokens, of alike KV tokens and length; if these
    are too few, one of each response. rows: [N, 5] samples."""
    running = np.maximum(1, np.rint(rows[:, 0])).astype(int)
    levels = [running == n for n in np.unique(running)]
    if len(levels) > LEVELS:
        levels = [np.isin(np.arange(len(rows)), part) for part in np.array_split(np.argsort(running), LEVELS)]
    points = []
    for level in levels:
        alike = rows[level]
        for part in np.array_split(alike[np.argsort(alike[:, 1], kind="stable")], PARTS):
            by_length = part[np.argsort(part[:, 3], kind="stable")]
            points += [_mean_point(few) for few in np.array_split(by_length, LENGTHS) if len(few)]
    return points if len(points) >= FEWEST else [_mean_point(row[None]) for row in rows]


def _mean_point(rows: npt.NDArray[np.float64]) -> StepPoint:
    computed, kv_tokens, seconds, steps, prefilled = rows.T
    return StepPoint(
        running=max(1, round(float(np.average(computed, weights=seconds)))),
        kv_tokens=float(np.average(kv_tokens, weights=seconds)),
        step_s=float(seconds.sum() / steps.sum()),
        prefilled=float(prefilled.sum() / steps.sum()),
        ended=len(rows) / float(steps.sum()),
    )

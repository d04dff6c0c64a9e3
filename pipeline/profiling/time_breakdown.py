"""Time breakdown of a run's steps from its events and commands: what the trainer waits for, how full the instances are,
and how long a token takes on each. Pure.

Runs, simulations and journals have the same events and commands, so the same numbers come out of all three. Seconds are
the coordinator's: those of the cost model in a simulated or emulated run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from staleflow.pipeline.coordination import commands, events
from staleflow.pipeline.profiling.fit import CostModelFit
from staleflow.pipeline.profiling.latencies import LatencyTracker
from staleflow.pipeline.profiling.step_samples import DraftStats, StepSample, StepSamples
from staleflow.pipeline.profiling.step_times import (
    InstanceCounts,
    InstanceSpeed,
    InstanceSums,
    RunningTrajectory,
    StepTimes,
    TrackedInstance,
    find_slow_instances,
    sum_steps,
)
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import GroupId, InstanceId, TrajectoryId, is_evaluation
from staleflow.tasks.emulation.cost_model import CostModel

MIN_STEPS, MIN_BUSY_SHARE = 3, 0.9
"""Decode steps between two reports, and the share of that time spent in them, needed to measure a step from them."""
TOKEN_S_WEIGHT = 0.1
"""Weight of the latest response in the moving average of an instance's seconds per token."""


class TimeTracker:
    """Time breakdown of one run, updated with each event.

    Args:
        cost_model: Cost model that measured speeds are compared with.
        group_size: Trajectories of a group.
        on_pull: The job's rollout.on_pull: what loading weights does to running requests.
        max_draft_length: Maximum draft length of the job.

    Attributes:
        finished_steps: Times of each finished training step.
        latency_tracker: Latencies of everything but decoding.
    """

    def __init__(
        self, cost_model: CostModel, group_size: int, *, on_pull: str = "keep", max_draft_length: int = 0
    ) -> None:
        self._cost_model = cost_model
        self._on_pull = on_pull
        self._group_size = group_size
        self._reset_in_flight(0.0)
        self._samples = StepSamples()
        self.finished_steps: list[StepTimes] = []
        self.latency_tracker = LatencyTracker()
        self._reported_draft_stats = DraftStats(max_draft_length)
        self._sampled_draft_stats = DraftStats(max_draft_length)

    def observe(self, now: float, event: events.Event, new_commands: Iterable[commands.Command]) -> None:
        """Update from an event handled at `now`, and the commands that followed."""
        new_commands = tuple(new_commands)
        if isinstance(event, events.RunResumed):
            self._reset_in_flight(now)
        self._advance_to(now)
        self._apply_event(event)
        for command in new_commands:
            self._apply_command(command)
        self.latency_tracker.observe(now, event, new_commands)

    def start(self, now: float) -> None:
        """Start measuring at `now` seconds on the coordinator's clock."""
        self._now = now

    def _reset_in_flight(self, now: float) -> None:
        """Begin without anything in flight: at first, and when a killed run is resumed."""
        self._now, self._is_training = now, False
        self._instances: dict[InstanceId, TrackedInstance] = {}
        self._instance_counts = InstanceCounts()
        self._prompt_tokens: dict[GroupId, int] = {}
        self._num_live: dict[GroupId, int] = {}  # trajectories of a group that have not been discarded
        self._tokens: dict[TrajectoryId, int] = {}  # of live trajectories that are on no instance
        self._instance_of: dict[TrajectoryId, TrackedInstance] = {}
        self._queued: set[TrajectoryId] = set()
        self._scoring: set[TrajectoryId] = set()
        self._in_environment: dict[TrajectoryId, int] = {}  # and their route number
        # (instance, its number of pulls then, cached tokens) of each trajectory's latest turn.
        self._cached_turns: dict[TrajectoryId, tuple[InstanceId, int, int]] = {}
        self._current_step = StepTimes()

    def fit(self) -> CostModelFit | None:
        """Fit the cost model and the delay of messages to the samples; None if there are too few. Slow instances are
        left out."""
        return self._samples.fit(self._cost_model.verify_share, self.slow_instances[0])

    @property
    def draft_stats(self) -> DraftStats:
        """Draft statistics from instances' reports, or from sampled responses if there are none (constant draft
        length)."""
        return self._reported_draft_stats if self._reported_draft_stats.num_steps else self._sampled_draft_stats

    @property
    def num_instances(self) -> int:
        """Number of instances that have finished a response."""
        return len(sum_steps(self.finished_steps).speeds)

    @property
    def slow_instances(self) -> tuple[list[InstanceId], float]:
        """Slow instances of the run so far, and their factor; see `find_slow_instances`."""
        return find_slow_instances(sum_steps(self.finished_steps).speeds)

    # -- time ----------------------------------------------------------------------------------------------------

    def _advance_to(self, now: float) -> None:
        elapsed_s, self._now = max(0.0, now - self._now), max(now, self._now)
        counts, num_instances = self._instance_counts, max(1, self._instance_counts.num_instances)
        times = self._current_step.training if self._is_training else self._current_step.waiting
        times.total_s += elapsed_s
        num_sampling = counts.num_running + len(self._queued)
        times.scoring_s += elapsed_s * (0 < len(self._scoring) >= num_sampling + len(self._in_environment))
        environments_dominate = 0 < len(self._in_environment) >= num_sampling + len(self._scoring)
        times.environment_s += elapsed_s * environments_dominate
        times.environment_trajectory_seconds += elapsed_s * environments_dominate * len(self._in_environment)
        times.at_max_running_s += elapsed_s * counts.num_full / num_instances
        times.out_of_memory_s += elapsed_s * (counts.num_out_of_memory / num_instances if self._queued else 0.0)
        times.pull_s += elapsed_s * counts.num_pulling / num_instances
        times.trajectory_seconds += elapsed_s * counts.num_running / num_instances
        times.kv_token_seconds += elapsed_s * counts.kv_tokens / num_instances

    # -- events and commands -------------------------------------------------------------------------------------

    def _apply_event(self, event: events.Event) -> None:  # noqa: PLR0912, PLR0915  one case per event
        match event:
            case events.GroupsArrived():
                for group in event.groups:
                    self._prompt_tokens[group.group] = group.prompt_tokens
                    self._num_live[group.group] = self._group_size
                    first = group.group * self._group_size
                    self._queued.update(TrajectoryId(first + i) for i in range(self._group_size))
            case events.EvaluationRequested():
                for group in event.groups:
                    self._prompt_tokens[group.group] = group.prompt_tokens
                    self._queued.add(TrajectoryId(group.group * self._group_size))
            case events.RunResumed():
                for resumed_group in event.groups:
                    self._prompt_tokens[resumed_group.group] = resumed_group.prompt_tokens
                    self._num_live[resumed_group.group] = len(resumed_group.members)
                    for member in resumed_group.members:
                        if not member.sampled and not member.scored:
                            self._queued.add(member.trajectory)
                            self._tokens[member.trajectory] = member.tokens
            case events.InstanceJoined():
                sums = InstanceSums(self._now)
                instance = TrackedInstance(event.instance, event.kv_capacity, event.max_running, sums)
                self._instances[event.instance] = instance
                self._instance_counts.add(instance, 1)
            case events.InstanceLost():
                lost_instance = self._instances.pop(event.instance, None)
                if lost_instance is not None:
                    self._instance_counts.add(lost_instance, -1)
                    for trajectory, state in lost_instance.running.items():
                        del self._instance_of[trajectory]
                        self._tokens[trajectory] = state.delivered_tokens
                        self._queued.add(trajectory)
            case events.InstanceReported():
                self._apply_report(event)
            case events.TrajectorySampled():
                self._end_turn(event)
            case events.TrajectoryInterrupted():
                if self._remove_from_instance(event.trajectory, event.route_number, event) is not None:
                    self._tokens[event.trajectory] = event.tokens
                    self._queued.add(event.trajectory)
            case events.TrajectoryFailed():
                if (failed_state := self._remove_from_instance(event.trajectory, event.route_number, None)) is not None:
                    self._tokens[event.trajectory] = failed_state.delivered_tokens
                    self._queued.add(event.trajectory)
            case events.EnvironmentStepped():
                self._end_environment_step(event.trajectory, event.route_number, event.tokens)
            case events.EnvironmentFailed():
                self._end_environment_step(event.trajectory, event.route_number, 0)
            case events.TrajectoryScored():
                self._scoring.discard(event.trajectory)
                self._in_environment.pop(event.trajectory, None)
                self._cached_turns.pop(event.trajectory, None)
            case events.PullFinished() if event.instance in self._instances:
                self._set_pulling(self._instances[event.instance], pulling=False)
            case events.VersionPublished():
                self._is_training = False
                if not self.finished_steps:  # processes were still warming up
                    self._samples.end_warmup()
                self._current_step.num_steps = 1
                self.finished_steps.append(self._current_step)
                self._current_step = StepTimes()

    def _apply_command(self, command: commands.Command) -> None:
        match command:
            case commands.Route():
                instance = self._instances.get(command.instance)
                self._queued.discard(command.trajectory)
                if instance is not None:
                    self._add_to_instance(instance, command)
            case commands.Abort():
                self._remove_from_instance(command.trajectory, None, None)
            case commands.Score():
                self._queued.discard(command.trajectory)
                self._tokens.pop(command.trajectory, None)
                self._scoring.add(command.trajectory)
            case commands.StepEnvironment():
                self._queued.discard(command.trajectory)
                self._in_environment[command.trajectory] = command.route_number
            case commands.Pull() if command.instance in self._instances:
                self._set_pulling(self._instances[command.instance], pulling=True)
            case commands.Train():
                self._is_training = True
                ids = np.fromiter(command.trajectories, np.int64, len(command.trajectories))
                self._remove_groups({*(ids // self._group_size).tolist()})
            case commands.Discard():
                for ending in command.endings:
                    self._discard(ending)
            case commands.FinishEvaluation():
                for group in [group for group in self._prompt_tokens if is_evaluation(group)]:
                    del self._prompt_tokens[group]
                    self._remove_trajectory(TrajectoryId(group * self._group_size))

    def _remove_groups(self, groups: Collection[GroupId]) -> None:
        """Remove groups that were trained, or of which all trajectories were discarded."""
        for group in groups:
            self._prompt_tokens.pop(group, None)
            self._num_live.pop(group, None)

    def _discard(self, ending: Ending) -> None:
        self._remove_trajectory(ending.trajectory)
        if ending.group in self._num_live:
            self._num_live[ending.group] -= 1
            if not self._num_live[ending.group]:
                self._remove_groups([ending.group])

    def _remove_trajectory(self, trajectory: TrajectoryId) -> None:
        """Remove a discarded trajectory."""
        self._remove_from_instance(trajectory, None, None)
        self._queued.discard(trajectory)
        self._scoring.discard(trajectory)
        self._in_environment.pop(trajectory, None)
        self._cached_turns.pop(trajectory, None)
        self._tokens.pop(trajectory, None)

    def _end_turn(self, event: events.TrajectorySampled) -> None:
        instance = self._instance_of.get(event.trajectory)
        state = self._remove_from_instance(event.trajectory, event.route_number, event)
        if state is not None and instance is not None:
            self._cached_turns[event.trajectory] = instance.name, instance.sums.num_pulls, event.tokens

    def _end_environment_step(self, trajectory: TrajectoryId, route_number: int, tokens: int) -> None:
        """Queue a trajectory after its environment step. tokens: its length now; 0 if the environment failed."""
        if self._in_environment.get(trajectory) != route_number:
            return
        del self._in_environment[trajectory]
        self._tokens[trajectory] = tokens
        self._queued.add(trajectory)
        if not tokens:
            self._cached_turns.pop(trajectory, None)

    def _set_pulling(self, instance: TrackedInstance, *, pulling: bool) -> None:
        if self._on_pull == "adapter":
            return  # running requests and their caches are not affected
        self._instance_counts.add(instance, -1)
        instance.advance_to(self._now)
        instance.is_pulling = pulling
        instance.sums.num_pulls += pulling
        if not pulling and self._on_pull == "interrupt":
            instance.sums.prefilled_tokens += instance.kv_tokens
        self._instance_counts.add(instance, 1)

    def _add_to_instance(self, instance: TrackedInstance, command: commands.Route) -> None:
        self._remove_from_instance(command.trajectory, None, None)
        self._instance_counts.add(instance, -1)
        instance.advance_to(self._now)
        tokens = self._tokens.pop(command.trajectory, 0)
        prompt_tokens = self._prompt_tokens.get(GroupId(command.trajectory // self._group_size), 0)
        instance.running[command.trajectory] = RunningTrajectory(
            route_number=command.route_number, tokens_at_route=tokens, delivered_tokens=tokens, tokens_at_report=tokens,
            steps_at_report=instance.decode_steps, prompt_tokens=prompt_tokens, sums_at_route=instance.sums.copy(),
        )  # fmt: skip
        instance.kv_tokens += prompt_tokens + tokens
        cached_instance, num_pulls, cached_tokens = self._cached_turns.get(command.trajectory, ("", 0, 0))
        is_cached = cached_instance == instance.name and num_pulls == instance.sums.num_pulls
        instance.sums.prefilled_tokens += max(0, tokens - cached_tokens) if is_cached else prompt_tokens + tokens
        self._instance_of[command.trajectory] = instance
        self._instance_counts.add(instance, 1)

    def _remove_from_instance(
        self,
        trajectory: TrajectoryId,
        route_number: int | None,
        event: events.TrajectorySampled | events.TrajectoryInterrupted | None,
    ) -> RunningTrajectory | None:
        """Remove a trajectory from its instance, and add a sample if its tokens are known.

        Returns what was removed; None if the trajectory is on no instance, or under another route number. route_number:
        None for any.
        """
        instance = self._instance_of.get(trajectory)
        if instance is None or route_number not in (None, instance.running[trajectory].route_number):
            return None
        self._instance_counts.add(instance, -1)
        instance.advance_to(self._now)
        state = instance.running.pop(trajectory)
        instance.kv_tokens -= state.prompt_tokens + instance.estimate_tokens(state)
        del self._instance_of[trajectory]
        self._instance_counts.add(instance, 1)
        if event is not None and event.tokens > state.tokens_at_route:
            self._add_response_sample(instance, state, event)
        return state

    def _add_response_sample(
        self,
        instance: TrackedInstance,
        state: RunningTrajectory,
        event: events.TrajectorySampled | events.TrajectoryInterrupted,
    ) -> None:
        tokens = event.tokens - state.tokens_at_route
        steps = max(1, tokens - event.accepted_tokens)
        self._sampled_draft_stats.add_steps(steps, event.drafted_tokens, event.accepted_tokens)
        passed = instance.sums.since(state.sums_at_route)
        seconds = passed.time_s - passed.pull_s
        self._current_step.num_tokens += 0 if is_evaluation(event.trajectory) else tokens
        if seconds <= 0:
            return
        token_s = seconds / tokens
        instance.token_s = (
            token_s
            if instance.token_s == math.inf
            else instance.token_s + TOKEN_S_WEIGHT * (token_s - instance.token_s)
        )
        running, kv_tokens = passed.trajectory_seconds / passed.time_s, passed.kv_token_seconds / passed.time_s
        computed_tokens = running * (
            1.0 + self._cost_model.verify_share * event.drafted_tokens / steps
        )  # assumes that the other requests have equally long drafts
        speed = self._current_step.speeds.setdefault(instance.name, InstanceSpeed())
        speed.measured_s += seconds
        speed.expected_s += self._cost_model.step_s(max(computed_tokens, 1.0), kv_tokens) * steps
        speed.num_responses += 1
        self._samples.add_response(
            StepSample(computed_tokens, kv_tokens, seconds, steps, passed.prefilled_tokens, instance.name)
        )

    def _apply_report(self, event: events.InstanceReported) -> None:
        instance = self._instances.get(event.instance)
        if instance is None:
            return
        self._instance_counts.add(instance, -1)
        instance.advance_to(self._now)
        if event.steps is not None:
            self._add_step_sample(instance, event.steps)
        for trajectory, tokens in event.progress:
            state = instance.running.get(trajectory)
            if state is not None and tokens >= state.tokens_at_route:
                instance.kv_tokens += tokens - instance.estimate_tokens(state)
                state.tokens_at_report, state.steps_at_report = tokens, instance.decode_steps
        for trajectory, tokens in event.delivered:
            state = instance.running.get(trajectory)
            if state is not None:
                state.delivered_tokens = max(state.delivered_tokens, tokens)
        self._instance_counts.add(instance, 1)

    def _add_step_sample(self, instance: TrackedInstance, stats: events.DecodeStats) -> None:
        """Add a sample of the steps since the instance's previous report, if it decoded all the time between them."""
        previous_sums, instance.sums_at_report = instance.sums_at_report, instance.sums.copy()
        if previous_sums is None:
            return
        passed = instance.sums.since(previous_sums)
        if stats.drafts:
            self._reported_draft_stats.add_steps(
                stats.tokens - stats.accepted_tokens, stats.drafted_tokens, stats.accepted_tokens
            )
        elapsed_s, sampled_tokens = passed.time_s, stats.tokens - stats.accepted_tokens
        if passed.num_pulls or instance.is_pulling or stats.seconds < MIN_BUSY_SHARE * elapsed_s or not elapsed_s:
            return
        running = passed.trajectory_seconds / elapsed_s
        if sampled_tokens >= MIN_STEPS * running > 0:
            computed_tokens = running * (1.0 + self._cost_model.verify_share * stats.drafted_tokens / sampled_tokens)
            kv_tokens, steps = passed.kv_token_seconds / elapsed_s, sampled_tokens / running
            self._samples.add_report(
                StepSample(computed_tokens, kv_tokens, stats.seconds, steps, passed.prefilled_tokens, instance.name)
            )

"""Simulates a job in virtual time: executes the coordinator's commands on simulated instances, and reports the events.

Events are discrete, on one heap. All random numbers are derived from the job's seed, so the same job gives the same
trace. The coordinator is that of a real run, created by the same function from the same job; nothing is decided here.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from staleflow.pipeline.config import factories
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import commands, events
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.pipeline.simulator.analysis import InstanceTrace, Trace, TrainedStep
from staleflow.pipeline.simulator.simulated_environments import (
    EnvironmentEvent,
    SimulatedEnvironments,
    SimulatedEvaluations,
)
from staleflow.stores.errors import RunStuck
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import (
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
    is_evaluation,
    outcome_key,
)
from staleflow.tasks.emulation.batch_simulator import SimulatedBatch, WorkTotals
from staleflow.tasks.emulation.workload import Turn, Workload
from staleflow.tasks.settings.seeds import Stream, generator

STUCK_TICKS = 100
"""Ticks without pending work after which the run counts as stuck; some decisions take a few ticks."""


@dataclass(slots=True)
class SimulatedInstance:
    """A simulated instance."""

    id: InstanceId
    index: int
    engine: SimulatedBatch
    trace: InstanceTrace
    version: PolicyVersion
    wake_number: int = 0
    """Number of the heap entry that is to advance it next; entries with smaller numbers are not valid any longer."""
    is_alive: bool = True
    reported_work: WorkTotals = field(default_factory=WorkTotals)
    """Total work of the instance at its latest report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCost:
    """Cost of one response. Fields as in TrainedStep."""

    tokens: int
    min_prefill_tokens: int
    context_tokens: float
    alone_s: float
    """Seconds to sample it on an instance of its own, with the time of its tools."""


class SimulatedRun:
    """One job in virtual time. observe: called with every event and the commands that followed."""

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        *,
        validate_every_event: bool = False,
        observe: Callable[[float, events.Event, list[commands.Command]], None] | None = None,
    ) -> None:
        self._config = config
        self._simulation = config.simulation
        self._workload = workload
        self._cost = config.rollout.cost
        self._cost_alone = factories.job_cost_model_at(config, 1)
        self._observe = observe
        self._members_per_group = config.members_started_per_group
        self._has_environment = config.has_environment  # which may look a user's file up
        self.coordinator: Coordinator = factories.make_coordinator(config, validate_every_event=validate_every_event)
        self._fault_rng = generator(config.seed, Stream.FAULTS)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None], bool]] = []
        self._num_pending = 0  # entries of the heap that are neither ticks nor faults
        self._num_scheduled = 0
        self._instances: dict[InstanceId, SimulatedInstance] = {}
        self._changed_instances: dict[InstanceId, SimulatedInstance] = {}
        self._tokens: dict[TrajectoryId, int] = {}
        self._env_tokens: dict[TrajectoryId, int] = {}  # observation tokens since the latest turn
        # Length of running responses when they were last delivered to the trajectory server.
        self._delivered: dict[InstanceId, dict[TrajectoryId, int]] = {}
        self._delivered_s = 0.0
        self._next_group = 0
        self._quiet_ticks = 0
        self._environments = SimulatedEnvironments(
            config,
            workload,
            schedule_after=lambda seconds, action: self._schedule(self._now + seconds, action),
            on_result=self._on_environment_event,
        )
        self._evaluations = SimulatedEvaluations(config, workload)
        self._tracker = TimeTracker(
            self._cost, self._members_per_group, on_pull=config.rollout.on_pull,
            max_draft_length=config.rollout.engine.speculation.num_speculative_tokens,
        )  # fmt: skip
        self.trace = Trace(step_times=self._tracker.finished_steps)

    def run(self) -> Trace:
        """Run all steps. Raises RunStuck, which says what the job waits for, if nothing more can happen."""
        for index in range(self._config.rollout.instances):
            self._join(index, attempt=0)
        self._schedule(self._simulation.report_s, self._tick, recurring=True)
        if self._simulation.mean_loss_interval_s:
            self._schedule(
                self._fault_rng.exponential(self._simulation.mean_loss_interval_s),
                self._lose_random_instance,
                recurring=True,
            )
        self._handle_if_any(self._evaluations.request_after_publish(0))
        while not self.coordinator.is_finished or self._evaluations.is_pending:
            time_s, _, action, recurring = heapq.heappop(self._heap)
            self._num_pending -= not recurring
            self._now = max(self._now, time_s)
            action()
            self._reschedule()
        self._handle(events.StopRequested(why="all steps are trained"))
        self._close()
        return self.trace

    # -- time ----------------------------------------------------------------------------------------------------

    def _schedule(self, at_s: float, action: Callable[[], None], *, recurring: bool = False) -> None:
        """Schedule an action. recurring: whether it is a tick or a fault, which occurs whether or not work is
        pending."""
        self._num_scheduled += 1
        self._num_pending += not recurring
        heapq.heappush(self._heap, (at_s, self._num_scheduled, action, recurring))

    def _emit_after(self, seconds: float, event: events.Event) -> None:
        self._schedule(self._now + seconds, lambda: self._handle(event))

    def _handle(self, event: events.Event) -> None:
        self._decide(event)
        while self.coordinator.has_more_decisions:
            self._decide(events.DecisionsContinued())

    def _decide(self, event: events.Event) -> None:
        new_commands = self.coordinator.handle(event, self._now)
        self.trace.num_events += 1
        self._tracker.observe(self._now, event, new_commands)
        if self._observe is not None:
            self._observe(self._now, event, new_commands)
        for command in new_commands:
            name = type(command).__name__
            self.trace.command_counts[name] = self.trace.command_counts.get(name, 0) + 1
            self._execute(command)

    def _handle_if_any(self, event: events.Event | None) -> None:
        if event is not None:
            self._handle(event)

    def _publish(self, version: int) -> None:
        self._handle(events.VersionPublished(version=PolicyVersion(version)))
        self._handle_if_any(self._evaluations.request_after_publish(version))

    def _tick(self) -> None:
        self._quiet_ticks = 0 if self._num_pending else self._quiet_ticks + 1
        if self._quiet_ticks > STUCK_TICKS:
            raise RunStuck(f"nothing more can happen: {self.coordinator.explain_waiting()}")
        delivers = 0 < self._config.rollout.delivery_interval_s <= self._now - self._delivered_s
        self._delivered_s = self._now if delivers else self._delivered_s
        for instance in list(self._instances.values()):
            if instance.engine.num_requests:
                progress = tuple((TrajectoryId(t), n) for t, n in instance.engine.progress(self._now))
                steps = (
                    self._decode_stats(instance)
                    if self._config.rollout.engine.speculation.num_speculative_tokens
                    else None
                )
                delivered = progress if delivers else ()
                self._handle(
                    events.InstanceReported(instance=instance.id, progress=progress, delivered=delivered, steps=steps)
                )
                if delivers:
                    self._delivered[instance.id] = dict(progress)
            instance.trace.max_kept_tokens = max(instance.trace.max_kept_tokens, instance.engine.kept_tokens)
        self._handle(events.Tick())
        self._schedule(self._now + self._simulation.report_s, self._tick, recurring=True)

    def _decode_stats(self, instance: SimulatedInstance) -> events.DecodeStats:
        """Decode steps of an instance since the last call."""
        before, now = instance.reported_work, instance.engine.work_until(self._now)
        instance.reported_work = now
        return events.DecodeStats(
            running=instance.engine.num_decoding,
            kv_tokens=instance.engine.kv_tokens,
            seconds=now.decode_s + now.prefill_s + now.pull_s - before.decode_s - before.prefill_s - before.pull_s,
            tokens=now.sampled_tokens - before.sampled_tokens,
            drafts=round(now.num_drafts - before.num_drafts),
            drafted_tokens=round(now.drafted_tokens - before.drafted_tokens),
            accepted_tokens=round(now.accepted_tokens - before.accepted_tokens),
        )

    # -- commands --------------------------------------------------------------------------------------------

    def _execute(self, command: commands.Command) -> None:
        match command:
            case _ if isinstance(command, commands.InstanceCommand):
                # Before the message arrives, because the trajectory may end before that.
                if isinstance(command, commands.Route):
                    self._environments.begin_turn(command.trajectory)
                if self._simulation.message_s:
                    self._schedule(self._now + self._simulation.message_s, lambda: self._execute_on_instance(command))
                else:
                    self._execute_on_instance(command)
            case commands.FetchPrompts():
                groups = range(self._next_group, self._next_group + command.num_groups)
                self._next_group = groups.stop
                draws = command.draws or [(0, -1)] * command.num_groups
                new = tuple(
                    NewGroup(group=GroupId(g), prompt_tokens=self._workload.prompt_tokens(g), source=source, task=task)
                    for g, (source, task) in zip(groups, draws, strict=True)
                )
                self._emit_after(self._simulation.fetch_prompts_s, events.GroupsArrived(groups=new))
            case commands.Score():
                reward = self._workload.reward(*self._workload_index(command.trajectory))
                self._emit_after(
                    self._simulation.reward_s, events.TrajectoryScored(trajectory=command.trajectory, reward=reward)
                )
            case commands.StepEnvironment():
                self._environments.step(command, self._tokens[command.trajectory])
            case commands.CloseEnvironment():
                self._environments.close_environment(command.trajectory)
            case commands.Train():
                self._train(command)
            case commands.FinishEvaluation():
                self.trace.evaluations.append((int(command.version), self._now, command.abandoned))
                self._drop_evaluation()
                self._schedule(
                    self._now, lambda: self._handle_if_any(self._evaluations.end(abandoned=command.abandoned))
                )
            case commands.Discard():
                for ending in command.endings:
                    reason = outcome_key(ending.fate, ending.reason)
                    self.trace.ending_counts[reason] = self.trace.ending_counts.get(reason, 0) + 1
                    self._tokens.pop(ending.trajectory, None)
                    self._env_tokens.pop(ending.trajectory, None)
                    self._environments.end_episode(ending.trajectory)

    def _execute_on_instance(self, command: commands.InstanceCommand) -> None:
        instance = self._instances.get(command.instance)
        if instance is None:  # lost, and reported as such
            return
        self._advance(instance)
        self._changed_instances[instance.id] = instance
        match command:
            case commands.Route():
                self._sample(instance, command)
            case commands.Abort():
                instance.engine.remove(self._now, command.trajectory)
            case commands.ReleaseCache():
                instance.engine.release_cache(command.trajectory)
            case commands.Interrupt():
                removed_request = instance.engine.remove(self._now, command.trajectory)
                if removed_request is not None:
                    self._tokens[command.trajectory] = removed_request.tokens
                    self._emit_after(
                        max(0.0, instance.engine.clock - self._now) + self._simulation.message_s,
                        events.TrajectoryInterrupted(
                            trajectory=command.trajectory,
                            route_number=removed_request.route_number,
                            tokens=removed_request.tokens,
                            **removed_request.drafts.counts(),
                        ),
                    )
            case commands.Sleep():
                idle_s = max(0.0, instance.engine.clock - self._now)
                self._emit_after(
                    idle_s + self._simulation.switch_s + self._simulation.message_s,
                    events.InstanceSlept(instance=instance.id, step=command.step),
                )
            case commands.Pull():
                is_slow = self._fault_rng.random() < self._simulation.slow_pull_share
                seconds = self._simulation.pull_s * (self._simulation.slow_pull_factor if is_slow else 1.0)
                if self._config.num_served_versions:  # loaded beside the versions being served
                    loaded_s = self._now + seconds
                else:
                    keep_cache = self._config.rollout.on_pull == "keep"
                    loaded_s = instance.engine.load(self._now, seconds, keep_cache=keep_cache)
                instance.version = command.version
                self._emit_after(
                    loaded_s - self._now + self._simulation.message_s,
                    events.PullFinished(instance=instance.id, version=command.version),
                )

    def _workload_index(self, trajectory: TrajectoryId) -> tuple[int, int]:
        """(group, member) of a trajectory's response in the workload."""
        return divmod(abs(trajectory), self._members_per_group)

    def _drop_evaluation(self) -> None:
        """Count the tokens of an ended evaluation, and drop its trajectories."""
        for trajectory in [t for t in self._tokens if is_evaluation(t)]:
            self.trace.evaluated_tokens += self._response_cost(trajectory, self._tokens.pop(trajectory)).tokens
            self._env_tokens.pop(trajectory, None)
            self._environments.end_episode(trajectory)

    def _sample(self, instance: SimulatedInstance, command: commands.Route) -> None:
        group, member = self._workload_index(command.trajectory)
        tokens = self._tokens.get(command.trajectory, 0)
        turns = self._workload.turns(group, member)
        if self._has_environment:
            turns = (Turn(tokens + self._environments.remaining_tokens(command.trajectory, tokens)),)
        instance.engine.submit(
            self._now,
            command.trajectory,
            command.route_number,
            self._workload.prompt_tokens(group),
            tokens,
            turns,
            num_env_tokens=self._env_tokens.pop(command.trajectory, 0),
        )

    def _on_environment_event(self, event: EnvironmentEvent) -> None:
        match event:
            case events.EnvironmentStepped():
                self._env_tokens[event.trajectory] = event.tokens - self._tokens[event.trajectory]
                self._tokens[event.trajectory] = event.tokens
            case events.EnvironmentFailed():
                del self._tokens[event.trajectory]
        self._handle(event)

    def _train(self, command: commands.Train) -> None:
        responses = [self._response_cost(t, self._tokens.pop(t)) for t in command.trajectories]
        tokens, min_prefill_tokens = sum(r.tokens for r in responses), sum(r.min_prefill_tokens for r in responses)
        seconds = train_seconds(self._config, tokens + min_prefill_tokens)
        step = TrainedStep(
            step=command.step,
            ready_s=self._now,
            finished_s=self._now + seconds,
            tokens=tokens,
            min_prefill_tokens=min_prefill_tokens,
            context_tokens=sum(r.context_tokens for r in responses),
            longest_tokens=max(r.tokens for r in responses),
            longest_s=max(r.alone_s for r in responses),
            staleness=dict(Counter(command.step - v for v in command.versions)),
        )
        self.trace.steps.append(step)
        reason = Fate.CONSUMED.value
        self.trace.ending_counts[reason] = self.trace.ending_counts.get(reason, 0) + len(responses)
        self._schedule(self._now + seconds, lambda: self._publish(command.step + 1))

    def _response_cost(self, trajectory: TrajectoryId, tokens: int) -> ResponseCost:
        """The cost of a response of `tokens` tokens, tool output included, on an instance of its own."""
        group, member = self._workload_index(trajectory)
        context = prompt = self._workload.prompt_tokens(group)
        sampled = tools = 0
        context_tokens = alone_s = 0.0
        for turn in self._workload.turns(group, member):
            remaining_tokens = prompt + tokens - context
            if remaining_tokens <= 0:  # the episode ended early because the response was at its limit
                break
            count = min(turn.tokens, remaining_tokens)
            observation_tokens = min(turn.tool_tokens, remaining_tokens - count)
            context_tokens += context * count + count * (count - 1) / 2
            alone_s += self._cost_alone.decode_s(1, context, count) + turn.tool_s
            sampled += count
            tools += observation_tokens
            context += count + observation_tokens
        return ResponseCost(
            tokens=sampled, min_prefill_tokens=prompt + tools, context_tokens=context_tokens, alone_s=alone_s
        )

    # -- instances -----------------------------------------------------------------------------------------------

    def _join(self, index: int, attempt: int) -> None:
        engine = self._config.rollout.engine
        cost = factories.instance_cost_model(self._config, index)
        name = InstanceId(f"rollout-{index}" + (f".{attempt}" if attempt else ""))
        version = self.coordinator.ledger.version
        instance = SimulatedInstance(
            id=name,
            index=index,
            engine=SimulatedBatch(
                cost,
                kv_capacity=engine.kv_tokens,
                max_running=engine.max_running,
                draft_settings=factories.draft_settings(self._config),
            ),
            trace=InstanceTrace(name=name, joined_s=self._now),
            version=version,
        )
        instance.engine.clock = self._now
        self._instances[name] = instance
        self.trace.instances.append(instance.trace)
        self._handle(
            events.InstanceJoined(
                instance=name, version=version, kv_capacity=engine.kv_tokens, max_running=engine.max_running
            )
        )

    def _lose_random_instance(self) -> None:
        if self._instances:
            instance = list(self._instances.values())[int(self._fault_rng.integers(len(self._instances)))]
            running = {t for t, _ in instance.engine.progress(self._now)}
            delivered = self._delivered.pop(instance.id, {})
            self._tokens |= {t: max(n, self._tokens.get(t, 0)) for t, n in delivered.items() if t in running}
            self._remove_instance(instance)
            self.trace.instance_losses += 1
            attempt = self.trace.instance_losses
            self._handle(events.InstanceLost(instance=instance.id, why="drawn at random"))
            self._schedule(self._now + self._simulation.replace_s, lambda: self._join(instance.index, attempt))
        self._schedule(
            self._now + self._fault_rng.exponential(self._simulation.mean_loss_interval_s),
            self._lose_random_instance,
            recurring=True,
        )

    def _remove_instance(self, instance: SimulatedInstance) -> None:
        del self._instances[instance.id]
        self._changed_instances.pop(instance.id, None)
        instance.is_alive = False
        instance.trace.lost_s = self._now
        instance.trace.work = instance.engine.work_until(self._now)

    def _advance(self, instance: SimulatedInstance) -> None:
        """Advance an instance to the current time; each finished response becomes a separate event."""
        for ended in instance.engine.advance(self._now):
            self._tokens[TrajectoryId(ended.trajectory)] = ended.tokens
            self._emit_after(
                self._simulation.message_s,
                events.TrajectorySampled(
                    trajectory=TrajectoryId(ended.trajectory),
                    route_number=ended.route_number,
                    tokens=ended.tokens,
                    **ended.drafts.counts(),
                ),
            )

    def _advance_scheduled(self, instance: SimulatedInstance, wake_number: int) -> None:
        if instance.is_alive and wake_number == instance.wake_number:
            self._advance(instance)
            self._changed_instances[instance.id] = instance

    def _reschedule(self) -> None:
        """Replace the next scheduled event of every changed instance."""
        for instance in self._changed_instances.values():
            instance.wake_number += 1
            next_s = instance.engine.next_change_s()
            if next_s < math.inf:
                self._schedule(next_s, partial(self._advance_scheduled, instance, instance.wake_number))
        self._changed_instances.clear()

    def _close(self) -> None:
        for instance in self._instances.values():
            instance.trace.work = instance.engine.work_until(self._now)
        self.trace.finished_s = self._now
        self.trace.refusals = self.coordinator.snapshot().refusals


def train_seconds(config: RunConfig, tokens: int) -> float:
    """Seconds of a training step over `tokens` tokens, prompts included; in turns, until the trainer has freed the
    GPUs."""
    simulation = config.simulation
    return simulation.train_s + simulation.train_s_per_token * tokens + config.shares_gpus * simulation.switch_s

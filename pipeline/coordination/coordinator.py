"""Decides which commands follow from an event. Has no side effects.

`handle(event, now)` is the only method that changes the state, and it returns all commands. There is no clock, no input
and no output, and random numbers come only from the seeded generators of rules, so a recorded list of events gives the
same commands again. Strategies propose; the coordinator checks their proposals against the protocol and counts every
refusal with its reason. `CoordinatorState` holds what it knows, and `CommandIssuer` turns each decision into commands.

Commands count as executed when they are issued. A report that was sent before a command arrived can therefore
contradict the state, so reports never change which instance runs a trajectory. Only commands and the answers to them
do. An answer of an instance, and an observation or failure of an environment, carries the route number of its routing;
if that is not the latest, the answer is late and ignored. A reward counts if the trajectory waits for one.
"""

from __future__ import annotations

from typing import assert_never

from staleflow.pipeline.coordination import events
from staleflow.pipeline.coordination.command_issuer import CommandIssuer
from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.coordination.decision_log import CoordinatorInspection, DecisionLog, format_sampled_tokens
from staleflow.pipeline.coordination.evaluation_pinning import PinPlanner
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.moves import MovePlanner
from staleflow.pipeline.coordination.phases import Phase, Transition
from staleflow.pipeline.coordination.pulls import choose_pulls
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.strategy_set import StrategySet
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, GroupId, InstanceId, parse_outcome_key

MAX_ROUTES_PER_EVENT = 64
"""Number of trajectories that may be routed after one event, so that a full queue does not hold up the driver's event
loop: 3 to 5 ms with 1,024 instances."""
MAX_PULLS_PER_EVENT = 512
"""Number of instances that may pull a version after one event, for the same reason."""


class Coordinator(CoordinatorInspection):
    """Makes the decisions of one run. validate_every_event: whether to check all invariants of the state after every
    event (O(live trajectories))."""

    _state: CoordinatorState

    def __init__(
        self,
        ledger: StalenessLedger,
        strategies: StrategySet,
        forecast: LengthForecast,
        *,
        validate_every_event: bool = False,
    ) -> None:
        state = CoordinatorState(
            ledger,
            strategies.mixture,
            serves_many_versions=strategies.serves_many_versions,
            shares_gpus=strategies.shares_gpus,
        )
        super().__init__(state, forecast, DecisionLog())
        self._strategies = strategies
        self._validate_every_event = validate_every_event
        self._is_stopped = False
        self.has_more_decisions = False
        """Whether the latest event reached the limit of routes or pulls, so that DecisionsContinued must follow."""
        self._num_events = 0
        self._route_planner = RoutePlanner(
            self._state, strategies.admission, strategies.routing, strategies.affinity, forecast
        )
        self._pin_planner = PinPlanner(self._state, self._route_planner, strategies.evaluation_share)
        self._move_planner = MovePlanner(
            self._state, strategies.migration, strategies.stragglers, forecast, strategies.step_costs
        )
        self._issuer = CommandIssuer(self._state, forecast, self._decision_log)

    def handle(  # noqa: PLR0912, PLR0915  one case per event
        self,
        event: events.Event,
        now: float,
        max_routes: int = MAX_ROUTES_PER_EVENT,
        max_pulls: int = MAX_PULLS_PER_EVENT,
    ) -> list[Command]:
        """Decide the commands that follow from `event`, received at `now` seconds. Raises `ProtocolViolation` with the
        story of the trajectory.

        At most `max_routes` trajectories are routed, and `max_pulls` instances pull before any is; if more might,
        `has_more_decisions` is set.
        """
        self._num_events += 1
        self.has_more_decisions = False
        self._decision_log.now = now
        self._decision_log.cause = f"{type(event).__name__}#{self._num_events}"
        self._state.now = now
        try:
            match event:  # the most frequent events first
                case events.InstanceReported():
                    if (instance := self._state.fleet.get(event.instance)) is not None:
                        self._state.record_progress(instance, event.progress, event.delivered)
                case events.TrajectorySampled():
                    self._on_sampled(event)
                case events.TrajectoryScored():
                    self._on_scored(event)
                case events.EnvironmentStepped():
                    self._on_environment_stepped(event)
                case events.TrajectoryInterrupted():
                    self._on_interrupted(event)
                case events.GroupsArrived():
                    self._decision_log.note_all(self._state.add_groups(event.groups), "arrived")
                case events.Tick():
                    self._on_tick()
                case events.DecisionsContinued():
                    pass
                case events.PullFinished():
                    self._on_pull_finished(event)
                case events.InstanceSlept():
                    if event.step == self._issuer.pending_step:
                        self._state.finish_sleep(event.instance)
                case events.VersionPublished():
                    self._state.publish(event.version)
                case events.TrajectoryFailed():
                    self._on_failed(event)
                case events.EnvironmentFailed():
                    self._on_environment_failed(event)
                case events.InstanceJoined():
                    self._state.add_instance(event.instance, event.version, event.kv_capacity, event.max_running)
                case events.InstanceLost():
                    self._remove_instance(event.instance, event.why)
                case events.InstanceLeaving():
                    self._on_instance_leaving(event)
                case events.RunResumed():
                    self._on_run_resumed(event)
                case events.EvaluationRequested():
                    members = self._state.begin_evaluation(event.evaluation, event.groups)
                    self._decision_log.note_all(members, f"arrived for evaluation {event.evaluation}")
                case events.StopRequested():
                    self._on_stop_requested()
                case _:
                    assert_never(event)
            if not self._is_stopped:
                self._plan(max_routes, max_pulls)
            if self._validate_every_event:
                self.validate()
        except ProtocolViolation as violation:
            trajectory_id = getattr(event, "trajectory", None)
            story = "" if trajectory_id is None else "\n" + "\n".join(self.story(trajectory_id))
            self._issuer.pop_commands()  # those of a failed event are not executed
            raise ProtocolViolation(f"{violation} (while handling {event}){story}") from violation
        return self._issuer.pop_commands()

    # -- handling events -----------------------------------------------------------------------------------------

    def _on_run_resumed(self, event: events.RunResumed) -> None:
        self._state.resume(event.step, {parse_outcome_key(key): count for key, count in event.num_ended})
        if self._state.mixture is not None:
            self._state.mixture.restore(event.sources, event.num_groups, event.groups)
        for group in event.groups:
            is_complete = self._state.restore_group(
                group, Phase.IN_ENVIRONMENT if self._strategies.has_environments else Phase.SCORING
            )
            for member in group.members:
                self._decision_log.note(member.trajectory, f"restored with {member.tokens} tokens")
            if is_complete:
                self._filter_or_occupy(group.group)
                continue
            for member in group.members:
                if member.sampled and not member.scored:
                    trajectory = self._state.live_trajectories[member.trajectory]
                    if self._strategies.has_environments:
                        self._issuer.step_environment(trajectory, "sent to its environment again")
                    else:
                        self._issuer.score(trajectory, "scored again")

    def _on_instance_leaving(self, event: events.InstanceLeaving) -> None:
        """Interrupt the trajectories of an instance, which continue elsewhere with the tokens they have."""
        instance = self._state.fleet.get(event.instance)
        for trajectory in () if instance is None else self._state.drain(instance):
            self._issuer.interrupt(trajectory, event.instance, f"{event.instance} leaves")

    def _on_sampled(self, event: events.TrajectorySampled) -> None:
        trajectory = self._state.get_in_phase(Phase.RUNNING, event.trajectory, event.route_number)
        if trajectory is None:
            return
        if self._strategies.has_environments:
            self._state.finish_turn(trajectory, event.tokens)
            self._issuer.step_environment(
                trajectory, f"turn {trajectory.num_turns + 1} sampled, {format_sampled_tokens(event)}"
            )
            return
        self._state.finish_sampling(trajectory, event.tokens)
        if not trajectory.is_evaluation:  # evaluations sample differently, often greedily
            self.forecast.observe(trajectory.group, event.tokens)
        self._issuer.score(trajectory, f"sampled, {format_sampled_tokens(event)}")

    def _on_interrupted(self, event: events.TrajectoryInterrupted) -> None:
        trajectory = self._state.get_in_phase(Phase.RUNNING, event.trajectory, event.route_number)
        if trajectory is None:
            return
        is_empty_turn = event.tokens <= trajectory.turn_start_tokens  # which cannot be scored
        if is_empty_turn or not trajectory.is_being_truncated:
            self._state.requeue_interrupted(trajectory, event.tokens)
            self._decision_log.note(trajectory.id, f"interrupted at {format_sampled_tokens(event)}")
        elif self._strategies.has_environments:
            self._state.finish_turn(trajectory, event.tokens, truncated=True)
            self._issuer.step_environment(trajectory, f"truncated at {format_sampled_tokens(event)}", truncated=True)
        else:
            self._state.finish_sampling(trajectory, event.tokens, truncated=True)
            self._issuer.score(trajectory, f"truncated at {format_sampled_tokens(event)}")

    def _on_failed(self, event: events.TrajectoryFailed) -> None:
        trajectory = self._state.get_in_phase(Phase.RUNNING, event.trajectory, event.route_number)
        if trajectory is not None:
            self._retry(trajectory, Transition.FAILED, f"failed: {event.error}")

    def _on_environment_stepped(self, event: events.EnvironmentStepped) -> None:
        trajectory = self._state.get_in_phase(Phase.IN_ENVIRONMENT, event.trajectory, event.route_number)
        if trajectory is not None:
            self._decision_log.note(trajectory.id, f"observation of {event.tokens - trajectory.tokens} tokens")
            self._state.add_observation(trajectory, event.tokens)

    def _on_environment_failed(self, event: events.EnvironmentFailed) -> None:
        trajectory = self._state.get_in_phase(Phase.IN_ENVIRONMENT, event.trajectory, event.route_number)
        if trajectory is not None:
            self._issuer.release_cache(trajectory.id, self._state.pop_cached_instance(trajectory))
            num_failures = self._state.restart_episode(trajectory, is_lost=event.lost)
            self._decision_log.note(trajectory.id, f"environment failed: {event.error}")
            if num_failures > self._strategies.max_failures:
                self._abort_queued(trajectory, AbortReason.ENVIRONMENT_FAILED)

    def _on_scored(self, event: events.TrajectoryScored) -> None:
        trajectory = self._state.live_trajectories.get(event.trajectory)
        if trajectory is None or trajectory.phase not in {Phase.SCORING, Phase.IN_ENVIRONMENT}:
            return
        if trajectory.phase is Phase.IN_ENVIRONMENT:
            if not trajectory.is_evaluation:  # without environments `_on_sampled` does this
                if not trajectory.is_last_turn_truncated:
                    self.forecast.observe(trajectory.group, trajectory.tokens)
                self.forecast.sampled_token_share.observe(trajectory.tokens, trajectory.observation_tokens)
            self._issuer.release_cache(trajectory.id, self._state.pop_cached_instance(trajectory))
        is_complete = self._state.record_reward(trajectory, None if event.error else event.reward)
        self._decision_log.note(trajectory.id, f"reward {event.reward:g}" + (f", {event.error}" if event.error else ""))
        if trajectory.is_evaluation and self._state.end_evaluation_trajectory(trajectory):
            self._issuer.finish_evaluation()
        if is_complete:
            self._filter_or_occupy(trajectory.group)

    def _filter_or_occupy(self, group: GroupId) -> None:
        """Make a complete group available to the trainer, or filter it if it is not worth training on."""
        members = self.ledger.live_groups[group].completed
        rewards = [r for m in members if (r := self._state.live_trajectories[m].reward) is not None]
        if self._state.mixture is not None:
            self._state.mixture.record_rewards(group, rewards)
        drop_reason = self._strategies.filtering.drop_reason(rewards)
        if drop_reason is not None:
            self._issuer.discard(self._state.filter(group, drop_reason))
        else:
            self._issuer.discard(self._state.occupy(group))
            self.forecast.remove_group(group)

    def _on_pull_finished(self, event: events.PullFinished) -> None:
        instance = self._state.fleet.get(event.instance)
        if instance is None or event.version < instance.version:
            return
        evaluation = self._state.evaluation
        if event.version > instance.version and evaluation is not None and instance.id in evaluation.pinned_instances:
            self._issuer.finish_evaluation(abandoned=True)
        self._state.finish_pull(instance, event.version)

    def _on_stop_requested(self) -> None:
        self._is_stopped = True
        if self._state.evaluation is not None:
            self._issuer.stop(self._state.close_evaluation()[1])
        self._issuer.discard(self._state.abort_all(AbortReason.RUN_ENDED))

    def _on_tick(self) -> None:
        self._state.flag_timed_decisions()
        if not self._is_stopped and not self._state.trainer_has_gpus:
            for move in self._move_planner.plan_truncations():
                self._issuer.move(move)
            for move in self._move_planner.plan_migrations():
                self._issuer.move(move)

    # -- decisions -----------------------------------------------------------------------------------------------

    def _plan(self, max_routes: int, max_pulls: int) -> None:
        """Make the decisions that may come out differently after the event, in the order of their dependencies."""
        if self._state.pop_batch_changed():
            self._consume_batch()
        self._issuer.start_pending_step()
        self._state.unpin_idle_instances()
        if candidates := self._state.pop_pull_candidates():
            pulls = choose_pulls(self._state, self._strategies.synchronization, candidates)
            for num_pulls, instance in enumerate(pulls):
                if num_pulls == max_pulls:
                    self.has_more_decisions = True
                    self._state.flag_timed_decisions()
                    return
                self._issuer.pull(instance)
        if self._state.pop_admission_changed():
            self._fetch_prompts()
        if not self._state.trainer_has_gpus and self._state.pop_routing_changed():
            self._pin_instances()
            self._route_queue(max_routes)

    def _consume_batch(self) -> None:
        """Consume the next step's batch if it is ready. If GPUs are shared, a running evaluation must end first, since
        all instances are put to sleep."""
        if self._state.is_training or not self.ledger.is_batch_ready():
            return
        if self._state.shares_gpus and self._state.evaluation is not None:
            return
        self._issuer.consume_batch()

    def _pin_instances(self) -> None:
        """Pin instances for the running evaluation; abandon it if no instance can finish it."""
        for instance in self._pin_planner.choose_instances_to_pin():
            if self._pin_planner.must_pull(instance):
                self._issuer.pull(instance)
            self._state.pin(instance)
        if self._pin_planner.cannot_finish:
            self._issuer.finish_evaluation(abandoned=True)

    def _fetch_prompts(self) -> None:
        num_free = self._strategies.admission.num_startable(self.ledger)
        num_groups = num_free - len(self._state.unreserved_groups) - self._state.num_requested_groups
        if num_groups > 0 and len(self._state.fleet):
            self._issuer.fetch_prompts(num_groups)

    def _route_queue(self, max_routes: int) -> None:
        """Route queued trajectories level by level, oldest version first.

        A level is left at its first trajectory that no instance has room for: the ones behind it need the same version,
        and few of them are shorter. Later levels are still tried, so that free memory is used.
        """
        queue, num_routed = self._state.queue, 0
        blocked_levels: set[int] = set()
        # Routing the first member of a new group can create a level for its siblings, so look for the lowest each time.
        while True:
            level = next((level for level in queue.levels() if level not in blocked_levels), None)
            if level is None:
                return
            if num_routed == max_routes:  # before a rule with random numbers is called, so that it is called once
                self.has_more_decisions = True
                self._state.flag_routing()
                return
            trajectory = queue.head(level)
            planner = self._pin_planner if trajectory.is_evaluation else self._route_planner
            choice = planner.choose_instance(trajectory)
            if isinstance(choice, str):
                is_new = self._state.record_refusal(trajectory, choice)
                self._decision_log.count_refusal(trajectory.id, choice, is_new=is_new)
                blocked_levels.add(level)
            else:
                self._issuer.route(trajectory, choice)
                num_routed += 1

    def _remove_instance(self, instance_id: InstanceId, reason: str) -> None:
        """Remove a lost instance, and retry its trajectories elsewhere."""
        instance = self._state.fleet.get(instance_id)
        if instance is not None:
            for trajectory_id in tuple(instance.trajectories):
                trajectory = self._state.live_trajectories.get(trajectory_id)
                if trajectory is not None:  # a sibling's last attempt may have ended it
                    self._retry(trajectory, Transition.INSTANCE_LOST, f"{instance_id} was lost: {reason}")
            self._state.remove_instance(instance)

    def _retry(self, trajectory: LiveTrajectory, transition: Transition, note: str) -> None:
        """Queue a trajectory again, or abort it after too many failures."""
        num_failures = self._state.requeue_failed(trajectory, transition)
        self._decision_log.note(trajectory.id, note)
        if num_failures > self._strategies.max_failures:
            self._abort_queued(trajectory, AbortReason.ENGINE_FAILED)

    def _abort_queued(self, trajectory: LiveTrajectory, reason: AbortReason) -> None:
        """Abort a queued trajectory, and its group if too few members are left."""
        if not trajectory.is_evaluation:
            self._issuer.discard(self._state.abort(trajectory.group, reason, trajectory.id))
            return
        self._decision_log.note(trajectory.id, f"aborted: {reason.value}")
        self._issuer.release_cache(trajectory.id, self._state.pop_cached_instance(trajectory))
        if trajectory.num_turns > 0:
            self._issuer.close_environment(trajectory.id)
        if self._state.end_evaluation_trajectory(trajectory):
            self._issuer.finish_evaluation()

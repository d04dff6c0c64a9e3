"""Decides which commands follow from an event. Has no side effects.

`handle(event, now)` is the only way in and its list of commands the only way out; there is no clock, no randomness and
no input or output, so a recorded list of events gives the same commands again. Strategies propose, the coordinator
checks what they propose against the protocol, and counts every refusal with its reason. What it knows is in
`CoordinatorState`, which alone changes it: here are only events, decisions and commands.

Commands are taken to have landed the moment they are given. A report that was sent before a command landed can
therefore contradict the state; membership (what runs where) is changed by commands and by answers to them, never by
reports, and answers carry the route number of the routing they belong to, so late ones are recognised and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from staleflow.pipeline.coordination.commands import (
    Abort,
    CloseEnvironment,
    Command,
    Discard,
    FetchPrompts,
    FinishEvaluation,
    Interrupt,
    Pull,
    ReleaseCache,
    Route,
    Score,
    SetDraftLength,
    Sleep,
    StepEnvironment,
    Train,
)
from staleflow.pipeline.coordination.decision_log import DecisionLog, tokens_sampled
from staleflow.pipeline.coordination.discarded import DiscardedTrajectory
from staleflow.pipeline.coordination.draft_lengths import DraftLengths
from staleflow.pipeline.coordination.evaluation_pinning import EvaluationPinning
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    EnvironmentStepped,
    EvaluationRequested,
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceSlept,
    PullFinished,
    RoutingContinued,
    RunResumed,
    StopRequested,
    Tick,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.inspection import CoordinatorInspection
from staleflow.pipeline.coordination.moves import Move, MovePlanner
from staleflow.pipeline.coordination.phases import Phase, Transition
from staleflow.pipeline.coordination.pulls import Pulls
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.strategy_set import StrategySet
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, InstanceId, TrajectoryId

MAX_ROUTES = 128
"""Trajectories that one event may route, so that a full queue does not hold up the driver's event loop: about 6 ms with
1,024 instances."""


class Coordinator(CoordinatorInspection):
    """The decisions of one run. validate_each: whether to check all invariants of the state after every event
    (O(live))."""

    def __init__(
        self,
        ledger: StalenessLedger,
        strategies: StrategySet,
        forecast: LengthForecast,
        drafts: DraftLengths,
        *,
        validate_each: bool = False,
    ) -> None:
        state = CoordinatorState(ledger, strategies.mixture, side_by_side=strategies.adapters, turns=strategies.turns)
        super().__init__(state, forecast, DecisionLog())
        self._drafts = drafts
        self._strategies = strategies
        self._validate_each = validate_each
        self._stopped = False
        self.has_more_routes = False
        """Whether the last event stopped routing at its limit: RoutingContinued should follow."""
        self._num_events = 0
        self._planner = RoutePlanner(
            self._state, strategies.admission, strategies.routing, strategies.affinity, forecast
        )
        self._pinning = EvaluationPinning(self._state, self._planner, strategies.evaluation_share)
        self._pulls = Pulls(self._state, strategies.synchronization)
        self._move_planner = MovePlanner(
            self._state, strategies.migration, strategies.stragglers, forecast, strategies.costs
        )
        self._waiting_step: Train | None = None
        """The step whose batch is consumed, until all instances sleep."""
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float, max_routes: int = MAX_ROUTES) -> list[Command]:  # noqa: PLR0912, PLR0915  one case per event
        """Decide the commands that follow from `event`, received at `now` seconds. Raises `ProtocolViolation` with the
        story of the trajectory.

        At most `max_routes` trajectories are routed; if more might be, `has_more_routes` is set.
        """
        self._num_events += 1
        self.has_more_routes = False
        self._history.now = now
        self._history.cause = f"{type(event).__name__}#{self._num_events}"
        self._state.start_event(now)
        self._commands = []
        try:
            match event:  # the most frequent events first
                case InstanceReported():
                    self._on_instance_reported(event)
                case TrajectorySampled():
                    self._on_sampled(event)
                case TrajectoryScored():
                    self._on_scored(event)
                case EnvironmentStepped():
                    self._on_environment_stepped(event)
                case TrajectoryInterrupted():
                    self._on_interrupted(event)
                case GroupsArrived():
                    self._on_groups_arrived(event)
                case Tick():
                    self._on_tick()
                case RoutingContinued():
                    pass
                case PullFinished():
                    self._on_pull_finished(event)
                case InstanceSlept():
                    self._on_instance_slept(event)
                case VersionPublished():
                    self._on_version_published(event)
                case TrajectoryFailed():
                    self._on_failed(event)
                case EnvironmentFailed():
                    self._on_environment_failed(event)
                case InstanceJoined():
                    self._on_instance_joined(event)
                case InstanceLost():
                    self._lose_instance(event.instance, event.why)
                case InstanceLeaving():
                    self._on_instance_leaving(event)
                case RunResumed():
                    self._on_run_resumed(event)
                case EvaluationRequested():
                    for member in self._state.begin_evaluation(event.evaluation, event.groups):
                        self._history.note(member, f"arrived for evaluation {event.evaluation}")
                case StopRequested():
                    self._on_stop_requested()
                case _:
                    assert_never(event)
            if not self._stopped:
                self._plan(max_routes)
            if self._validate_each:
                self.validate()
        except ProtocolViolation as violation:
            subject = getattr(event, "trajectory", None)
            story = "" if subject is None else "\n" + "\n".join(self.story(subject))
            raise ProtocolViolation(f"{violation} (while handling {event}){story}") from violation
        return self._commands

    # -- what happened -------------------------------------------------------------------------------------------

    def _on_run_resumed(self, event: RunResumed) -> None:
        parted = ((key.partition(":"), count) for key, count in event.num_ended)
        self._state.resume(event.step, {(Fate(fate), AbortReason(why)): n for (fate, _, why), n in parted})
        if self._state.mixture is not None:
            self._state.mixture.restore(event.sources, event.num_groups, event.groups)
        for group in event.groups:
            complete = self._state.restore_group(
                group, Phase.IN_ENVIRONMENT if self._strategies.environments else Phase.SCORING
            )
            for member in group.members:
                self._history.note(member.trajectory, f"taken up with {member.tokens} tokens")
            if complete:
                self._filter_or_occupy(group.group)
                continue
            for member in group.members:
                if member.sampled and not member.scored:
                    live = self._state.live[member.trajectory]
                    if self._strategies.environments:
                        self._step_environment(live, "answered again")
                    else:
                        self._score(live, "scored again")

    def _on_groups_arrived(self, event: GroupsArrived) -> None:
        for member in self._state.add_groups(event.groups):
            self._history.note(member, "arrived")

    def _on_instance_joined(self, event: InstanceJoined) -> None:
        if self._state.fleet.get(event.instance) is not None:  # it restarted before its end was noticed
            self._lose_instance(event.instance, "it joined anew")
        self._state.join(event.instance, event.version, event.kv_capacity, event.max_running)

    def _on_instance_leaving(self, event: InstanceLeaving) -> None:
        """Interrupt what runs on an instance: it goes on elsewhere from the tokens it has."""
        instance = self._state.fleet.get(event.instance)
        if instance is None:
            return
        for live in self._state.drain(instance):
            self._interrupt(live, event.instance, f"{event.instance} leaves")

    def _on_instance_reported(self, event: InstanceReported) -> None:
        instance = self._state.fleet.get(event.instance)
        if instance is None:
            return
        self._state.record_progress(instance, event.progress, event.delivered)
        if event.steps is not None:
            self._drafts.observe(event.instance, instance.draft_length, event.steps)

    def _on_sampled(self, event: TrajectorySampled) -> None:
        live = self._state.running(event.trajectory, event.route_number)
        if live is None:
            return
        if self._strategies.environments:
            self._state.finish_turn(live, event.tokens)
            self._step_environment(live, f"turn {live.turns + 1} sampled, {tokens_sampled(event)}")
            return
        self._state.finish_sampling(live, event.tokens)
        if not live.is_eval:  # by other rules: greedily, say
            self.forecast.observe(live.group, event.tokens)
        self._score(live, f"sampled, {tokens_sampled(event)}")

    def _on_interrupted(self, event: TrajectoryInterrupted) -> None:
        live = self._state.running(event.trajectory, event.route_number)
        if live is None:
            return
        if live.truncating and event.tokens > 0 and self._strategies.environments:
            self._state.finish_turn(live, event.tokens, truncated=True)
            self._step_environment(live, f"cut off at {tokens_sampled(event)}", truncated=True)
        elif live.truncating and event.tokens > 0:
            self._state.finish_sampling(live, event.tokens, truncated=True)
            self._score(live, f"cut off at {tokens_sampled(event)}")
        else:
            self._state.interrupt(live, event.tokens)
            self._history.note(live.id, f"interrupted at {tokens_sampled(event)}")

    def _on_failed(self, event: TrajectoryFailed) -> None:
        live = self._state.running(event.trajectory, event.route_number)
        if live is not None:
            self._retry(live, Transition.FAILED, f"failed: {event.error}")

    def _on_environment_stepped(self, event: EnvironmentStepped) -> None:
        live = self._state.in_environment(event.trajectory, event.route_number)
        if live is not None:
            self._history.note(live.id, f"answered, {event.tokens - live.tokens} tokens given")
            self._state.answer(live, event.tokens)

    def _on_environment_failed(self, event: EnvironmentFailed) -> None:
        live = self._state.in_environment(event.trajectory, event.route_number)
        if live is not None:
            self._release_cache(live.id, self._state.pop_cached_instance(live))
            attempts = self._state.restart(live)
            self._history.note(live.id, f"environment failed: {event.error}")
            if attempts > self._strategies.max_attempts:
                self._end_queued(live, AbortReason.ENVIRONMENT_FAILED)

    def _on_scored(self, event: TrajectoryScored) -> None:
        live = self._state.live.get(event.trajectory)
        if live is None or live.phase not in {Phase.SCORING, Phase.IN_ENVIRONMENT}:
            return
        if live.phase is Phase.IN_ENVIRONMENT:
            if not live.is_eval:  # of the others, sampling has told
                if not live.truncated:
                    self.forecast.observe(live.group, live.tokens)
                self.forecast.episodes.observe(live.tokens, live.given_tokens)
            self._release_cache(live.id, self._state.pop_cached_instance(live))
        complete = self._state.score(live, None if event.error else event.reward)
        self._history.note(live.id, f"reward {event.reward:g}" + (f", {event.error}" if event.error else ""))
        if live.is_eval and self._state.end_eval_trajectory(live):
            self._finish_evaluation()
        if complete:
            self._filter_or_occupy(live.group)

    def _filter_or_occupy(self, group: GroupId) -> None:
        """Have a complete group wait for the trainer, unless it is not worth training on."""
        members = self.ledger.entries[group].completed
        rewards = [r for m in members if (r := self._state.live[m].reward) is not None]
        if self._state.mixture is not None:
            self._state.mixture.record_rewards(group, rewards)
        drop_reason = self._strategies.filtering.drop_reason(rewards)
        if drop_reason is not None:
            self._discard(self._state.filter(group, drop_reason))
        else:
            self._discard(self._state.occupy(group))

    def _on_pull_finished(self, event: PullFinished) -> None:
        instance = self._state.fleet.get(event.instance)
        if instance is not None and event.version == instance.version:
            self._state.finish_pull(instance)

    def _on_instance_slept(self, event: InstanceSlept) -> None:
        if self._waiting_step is not None and event.step == self._waiting_step.step:
            self._state.finish_sleep(event.instance)

    def _on_version_published(self, event: VersionPublished) -> None:
        self._state.publish(event.version)
        self._drafts.step_finished()

    def _on_stop_requested(self) -> None:
        self._stopped = True
        if self._state.evaluation is not None:
            self._stop(self._state.close_evaluation()[1])
        self._discard(self._state.abort_all(AbortReason.RUN_ENDED))

    def _on_tick(self) -> None:
        self._state.pass_time()
        self._drafts.replan(self._state.fleet)
        if not self._stopped and not self._state.trainer_turn:
            for move in self._move_planner.plan_truncations():
                self._move(move)
            for move in self._move_planner.plan_migrations():
                self._move(move)

    # -- what to do ----------------------------------------------------------------------------------------------

    def _plan(self, max_routes: int) -> None:
        """Decide anew what may come out differently by now: each decision after those that bear on it."""
        if self._state.pop_batch_changed():
            self._consume()
        self._train()
        self._state.unpin_idle()
        if loads := self._state.pop_load_changes():
            self._synchronize(loads)
        if self._state.pop_room_changed():
            self._fetch_prompts()
        if not self._state.trainer_turn and self._state.pop_routing_changed():
            self._pin_instances()
            self._route(max_routes)
        self._set_draft_lengths()

    def _consume(self) -> None:
        """Take the next step's batch, if it is ready. In turns all instances are put to sleep then; an evaluation ends
        before."""
        if self._state.training or not self.ledger.ready():
            return
        if self._state.turns and self._state.evaluation is not None:
            return
        batch = self._state.consume()
        for member in batch.members:
            self._history.note(member, f"consumed by step {batch.step}")
        for group in batch.groups:
            self.forecast.forget(group)
        cause = self._history.cause
        self._waiting_step = Train(step=batch.step, trajectories=batch.members, versions=batch.versions, cause=cause)
        if self._state.turns:
            self._put_to_sleep(batch.step)
        self._train()
        self._discard(batch.surplus)

    def _put_to_sleep(self, step: int) -> None:
        for instance in self._state.fleet:
            if not instance.asleep:
                for live in self._state.sleep(instance):
                    self._interrupt(live, instance.instance, f"{instance.instance} sleeps during step {step}")
                self._commands.append(Sleep(instance=instance.instance, step=step, cause=self._history.cause))

    def _train(self) -> None:
        """Have the batch trained that was taken, once no instance is awake."""
        if self._waiting_step is not None and not self._state.falling_asleep:
            self._commands.append(self._waiting_step)
            self._waiting_step = None

    def _synchronize(self, loads: Iterable[Instance]) -> None:
        for instance in self._pulls.due(loads):
            self._pull(instance)

    def _pull(self, instance: Instance) -> None:
        self._state.start_pull(instance)
        self._commands.append(Pull(instance=instance.instance, version=instance.version, cause=self._history.cause))

    def _pin_instances(self) -> None:
        """Have as many instances as an evaluation may have sample for it; give it up if none can."""
        for instance in self._pinning.choose_pins():
            if self._pinning.must_pull(instance):
                self._pull(instance)
            self._state.pin(instance)
        if self._pinning.cannot_finish:
            self._finish_evaluation(abandoned=True)

    def _fetch_prompts(self) -> None:
        num_free = self._strategies.admission.num_reservable(self.ledger)
        num_groups = num_free - len(self._state.unreserved_groups) - self._state.groups_requested
        if num_groups > 0 and len(self._state.fleet):
            draws = self._state.draw(num_groups)
            self._commands.append(FetchPrompts(num_groups=num_groups, draws=draws, cause=self._history.cause))

    def _route(self, max_routes: int) -> None:
        """Serve the queue level by level, oldest promises first. A level stops at its first trajectory that finds no
        instance: most of those behind it, of the same version, would find none either. A shorter one might, and so
        might one of a later level, which is asked all the same: memory that is free is used."""
        num_routed = 0
        queue = self._state.queue
        blocked: set[int] = set()
        # Sending the first member of a fresh group opens a level for its siblings: always continue with the lowest.
        while True:
            level = next((level for level in queue.levels() if level not in blocked), None)
            if level is None:
                return
            if num_routed == max_routes:  # before a rule is asked: one with random numbers must be asked once
                self.has_more_routes = True
                self._state.continue_routing()
                return
            live = queue.head(level)
            choice = self._pinning.choose_instance(live) if live.is_eval else self._planner.choose_instance(live)
            if isinstance(choice, str):
                self._history.refused(live.id, choice, again=not self._state.refuse(live, choice))
                blocked.add(level)
            else:
                self._send(live, choice)
                num_routed += 1

    def _set_draft_lengths(self) -> None:
        for row, length in self._drafts.choose_changes(self._state.fleet):
            instance = self._state.fleet[row]
            self._state.set_draft_length(instance, length)
            self._commands.append(SetDraftLength(instance=instance.instance, length=length, cause=self._history.cause))

    def _send(self, live: LiveTrajectory, instance: Instance) -> None:
        # What is kept is taken over where it is routed to; elsewhere it stays, in case a later turn returns.
        self._state.pop_cached_instance(live)
        self._state.send(live, instance)
        self._history.note(live.id, f"routed to {instance.instance} at version {instance.version}")
        self._commands.append(
            Route(
                trajectory=live.id,
                route_number=live.route_number,
                instance=instance.instance,
                version=live.v_traj,
                cause=self._history.cause,
            )
        )

    def _score(self, live: LiveTrajectory, note: str) -> None:
        self._history.note(live.id, note)
        self._commands.append(Score(trajectory=live.id, cause=self._history.cause))

    def _step_environment(self, live: LiveTrajectory, note: str, *, truncated: bool = False) -> None:
        self._history.note(live.id, note)
        self._state.step_environment(live)
        self._commands.append(
            StepEnvironment(
                trajectory=live.id,
                route_number=live.route_number,
                truncated=truncated,
                cause=self._history.cause,
            )
        )

    def _move(self, move: Move) -> None:
        """Take a trajectory off its instance, to continue elsewhere or to be scored as it is."""
        live = move.live
        self._state.start_move(live, move.target)
        self._interrupt(live, move.source.instance, move.why)

    def _interrupt(self, live: LiveTrajectory, instance: InstanceId, note: str) -> None:
        self._history.note(live.id, note)
        self._commands.append(
            Interrupt(trajectory=live.id, route_number=live.route_number, instance=instance, cause=self._history.cause)
        )

    def _lose_instance(self, name: InstanceId, why: str) -> None:
        """Queue what ran on an instance that is gone, as far as it may be retried."""
        instance = self._state.fleet.get(name)
        if instance is not None:
            for member in tuple(instance.trajectories):
                live = self._state.live.get(member)
                if live is not None:  # a sibling's last attempt may have ended it
                    self._retry(live, Transition.INSTANCE_LOST, f"{name} was lost: {why}")
            self._state.remove_instance(instance)
            self._drafts.remove(name)

    def _retry(self, live: LiveTrajectory, transition: Transition, note: str) -> None:
        """Queue a trajectory once more, or give it up after too many attempts."""
        attempts = self._state.fail(live, transition)
        self._history.note(live.id, note)
        if attempts > self._strategies.max_attempts:
            self._end_queued(live, AbortReason.ENGINE_FAILED)

    def _end_queued(self, live: LiveTrajectory, reason: AbortReason) -> None:
        """End a queued trajectory, and its group if too few are left."""
        if not live.is_eval:
            self._discard(self._state.abort(live.group, reason, live.id))
            return
        self._history.note(live.id, f"given up: {reason.value}")
        if self._state.end_eval_trajectory(live):
            self._finish_evaluation()

    def _finish_evaluation(self, *, abandoned: bool = False) -> None:
        """End the running evaluation, and summarize it."""
        evaluation, unpinned = self._state.close_evaluation()
        self._stop(unpinned)
        self._commands.append(
            FinishEvaluation(
                evaluation=evaluation.number,
                version=evaluation.evaluated_version,
                failed=tuple(evaluation.failed),
                abandoned=abandoned,
                cause=self._history.cause,
            )
        )

    def _discard(self, ended: tuple[DiscardedTrajectory, ...]) -> None:
        """Stop those that still run, and tell the store how all of them ended."""
        self._stop(ended)
        if ended:
            endings, versions = tuple(t.ending for t in ended), tuple(t.v_traj for t in ended)
            self._commands.append(Discard(endings=endings, versions=versions, cause=self._history.cause))

    def _stop(self, ended: tuple[DiscardedTrajectory, ...]) -> None:
        """Stop what still runs or acts of trajectories that have ended."""
        cause = self._history.cause
        for trajectory in ended:
            ending = trajectory.ending
            if trajectory.running_on is not None:
                self._commands.append(
                    Abort(
                        trajectory=ending.trajectory,
                        route_number=trajectory.route_number,
                        instance=trajectory.running_on,
                        cause=cause,
                    )
                )
            self._release_cache(ending.trajectory, trajectory.cached_on)
            if trajectory.environment_open:
                self._commands.append(CloseEnvironment(trajectory=ending.trajectory, cause=cause))
            self.forecast.forget(ending.group)
            self._history.note(ending.trajectory, f"{ending.fate.value}: {ending.reason.value}")

    def _release_cache(self, trajectory: TrajectoryId, cached_on: InstanceId | None) -> None:
        if cached_on is not None:
            self._commands.append(ReleaseCache(trajectory=trajectory, instance=cached_on, cause=self._history.cause))

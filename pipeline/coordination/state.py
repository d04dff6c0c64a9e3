"""The coordinator's state. This is the only module that changes it. Pure.

Everyone may read; the verbs of `CoordinatorState` are the only writers of trajectories, fleet, queue and ledger. Each
verb is one thing that was decided or has happened. It keeps the invariants that invariants.py states, and notes by
itself which decisions may now come out differently: the coordinator asks with `take_..._change` before it decides anew,
and asking clears the note. A verb that the phases or the ledger refuse raises `ProtocolViolation` and changes nothing.

The state is speculative: a command is taken to have landed the moment it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType

from staleflow.pipeline.coordination.discarded import DiscardedTrajectory, TrainBatch
from staleflow.pipeline.coordination.evaluations import MutableEvaluations, RunningEvaluation
from staleflow.pipeline.coordination.events import NewGroup
from staleflow.pipeline.coordination.fleet import Fleet, Instance, MutableFleet
from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.coordination.phases import Phase, Transition, next_phase
from staleflow.pipeline.coordination.replan_flags import ReplanFlags
from staleflow.pipeline.coordination.running_means import RunningMeans, TruncationCounts
from staleflow.pipeline.coordination.trajectories import LiveTrajectory, restored_members
from staleflow.pipeline.coordination.work_queue import EVALUATION, UNRESERVED, MutableWorkQueue, WorkQueue
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.staleness.ledger_entries import Ending, EntryState
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
    is_evaluation,
)


class CoordinatorState(ReplanFlags):
    """Trajectories, instances, queued work and the ledger of one run."""

    def __init__(
        self,
        ledger: StalenessLedger,
        mixture: Mixture | None = None,
        *,
        side_by_side: bool = False,
        turns: bool = False,
    ) -> None:
        """side_by_side: see Fleet. turns: see StrategySet."""
        self._live: dict[TrajectoryId, LiveTrajectory] = {}
        self._fleet = MutableFleet(side_by_side=side_by_side)
        super().__init__(self._fleet)
        self._queue = MutableWorkQueue()
        # The same, for reading.
        self.ledger = ledger
        self.live: Mapping[TrajectoryId, LiveTrajectory] = MappingProxyType(self._live)
        self.fleet: Fleet = self._fleet
        self.queue: WorkQueue = self._queue
        self.mixture = mixture
        self._evaluations = MutableEvaluations(self._fleet)
        self.running_means = RunningMeans()
        self.truncations = TruncationCounts()
        self._now = 0.0
        self._fresh_groups: set[GroupId] = set()  # no member was routed yet
        self._groups_drawn = 0  # asked for and not arrived
        self._training = False
        self._idle_since: float | None = 0.0  # None while a step is being trained
        self._published_s = 0.0
        self.turns = turns
        self._falling_asleep: set[InstanceId] = set()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Time of the event being handled, in seconds."""
        return self._now

    @property
    def training(self) -> bool:
        """Whether a step is being trained."""
        return self._training

    @property
    def evaluation(self) -> RunningEvaluation | None:
        """The running evaluation; None if there is none."""
        return self._evaluations.current

    @property
    def trainer_turn(self) -> bool:
        """Whether the GPUs shared by trainer and instances are, or are becoming, the trainer's: all instances sleep."""
        return self.turns and self._training

    @property
    def falling_asleep(self) -> Set[InstanceId]:
        """Instances that were ordered to sleep and have not confirmed it."""
        return self._falling_asleep

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer has been waiting for its next batch; 0 while it trains."""
        return 0.0 if self._idle_since is None else self._now - self._idle_since

    @property
    def unreserved_groups(self) -> Set[GroupId]:
        """Groups that have arrived and have no reservation."""
        return self._fresh_groups

    @property
    def groups_requested(self) -> int:
        """Number of groups that were requested and have not arrived."""
        return self._groups_drawn

    def level(self, group: GroupId) -> int:
        """The queue level of a group's members."""
        if is_evaluation(group):
            return EVALUATION
        version = self.ledger.entries[group].version
        return UNRESERVED if version < 0 else version

    def running(self, trajectory: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        """The running trajectory that an instance's event is about; None if the event is late."""
        return self._in_phase(Phase.RUNNING, trajectory, route_number)

    def in_environment(self, trajectory: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        """The trajectory in its environment that an event is about; None if the event is late."""
        return self._in_phase(Phase.IN_ENVIRONMENT, trajectory, route_number)

    def _in_phase(self, phase: Phase, trajectory: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        live = self._live.get(trajectory)
        return live if live is not None and live.phase is phase and live.route_number == route_number else None

    # -- the run -------------------------------------------------------------------------------------------------

    def start_event(self, now: float) -> None:
        """Set the time of the event that the following calls belong to."""
        self._now = now

    def pass_time(self) -> None:
        """Set the flags of decisions that depend on time alone: deadlines, and pulls."""
        self._routing_changed = self._all_loads_changed = True

    def continue_routing(self) -> None:
        """Set the flag of routing: the queue was not served to its end."""
        self._routing_changed = True

    def resume(self, step: int, num_ended: Mapping[tuple[Fate, AbortReason], int]) -> None:
        """Continue a run that has published version `step`. Its groups in flight are added afterwards."""
        self.ledger.resume(step, num_ended)
        self._idle_since = self._published_s = self._now

    def publish(self, version: PolicyVersion) -> None:
        """Record that the current training step has finished."""
        self.ledger.publish(version)
        self._training, self._idle_since = False, self._now
        self.running_means.interval_s.add(self._now - self._published_s)
        self._published_s = self._now
        self._batch_changed = self._room_changed = self._routing_changed = self._all_loads_changed = True

    # -- groups --------------------------------------------------------------------------------------------------

    def draw(self, num_groups: int) -> tuple[tuple[int, int], ...]:
        """Count groups as requested. Returns (source, task) of each; empty without a mixture."""
        self._groups_drawn += num_groups
        return () if self.mixture is None else self.mixture.draw(num_groups)

    def add_groups(self, groups: Iterable[NewGroup]) -> list[TrajectoryId]:
        """Queue all members of groups that have arrived. Returns their ids."""
        added: list[TrajectoryId] = []
        for new in groups:
            members = self.ledger.start(new.group)
            self._groups_drawn -= 1
            if self.mixture is not None:
                self.mixture.count_arrived(new.group, new.source, new.task)
            self.running_means.prompt_tokens.add(new.prompt_tokens)
            self._fresh_groups.add(new.group)
            for member in members:
                live = LiveTrajectory(id=member, group=new.group, prompt_tokens=new.prompt_tokens, since=self._now)
                self._live[member] = live
                self._enqueue(live)
            added += members
        self._routing_changed = True
        return added

    def restore_group(self, stored: GroupInFlight, sampled: Phase) -> bool:
        """Restore a group of a stored run, with its reservation. Returns True if it has all members it needs. sampled:
        phase of members whose turn has ended."""
        self.ledger.start(stored.group, [member.trajectory for member in stored.members])
        self.running_means.prompt_tokens.add(stored.prompt_tokens)
        complete = False
        for member in sorted(stored.members, key=lambda member: member.version):
            if member.version >= 0:
                self.ledger.reserve(stored.group, member.trajectory, member.version)
        if self.ledger.entries[stored.group].state is EntryState.QUEUED:
            self._fresh_groups.add(stored.group)
        for live in restored_members(stored, sampled, self._now):
            self._live[live.id] = live
            if live.phase is Phase.DONE:
                complete = self.ledger.complete(live.group, live.id)
            elif live.phase is Phase.QUEUED:
                self._enqueue(live)
        self._batch_changed = self._room_changed = self._routing_changed = True
        return complete

    def occupy(self, group: GroupId) -> tuple[DiscardedTrajectory, ...]:
        """Make a complete group available to the trainer. Returns the trajectories that became surplus."""
        return self._end(self.ledger.occupy(group))

    def filter(self, group: GroupId, reason: AbortReason) -> tuple[DiscardedTrajectory, ...]:
        """Discard a complete group that is not worth training on."""
        return self._end(self.ledger.filter(group, reason))

    def abort(self, group: GroupId, reason: AbortReason, member: TrajectoryId) -> tuple[DiscardedTrajectory, ...]:
        """Abort a member, and its group if too few are left."""
        return self._end(self.ledger.abort(group, reason, member))

    def abort_all(self, reason: AbortReason) -> tuple[DiscardedTrajectory, ...]:
        """Abort everything in flight."""
        return self._end([e for group in tuple(self.ledger.entries) for e in self.ledger.abort(group, reason)])

    def consume(self) -> TrainBatch:
        """Give the next step its batch."""
        consumption = self.ledger.consume(self.ledger.next_step)
        self._training, self._idle_since = True, None
        if self.mixture is not None:
            self.mixture.count_trained(consumption.groups)
        self.truncations.step_consumed(len(consumption.members))
        versions = tuple(self._live[member].v_traj for member in consumption.members)
        for member in consumption.members:
            live = self._live.pop(member)
            live.phase = next_phase(live.phase, Transition.CONSUMED)
        self._room_changed = self._routing_changed = True
        return TrainBatch(
            step=consumption.step,
            groups=consumption.groups,
            members=consumption.members,
            versions=versions,
            surplus=self._end(consumption.surplus),
        )

    # -- evaluations ---------------------------------------------------------------------------------------------

    def begin_evaluation(self, number: int, groups: Iterable[NewGroup]) -> list[TrajectoryId]:
        """Queue the trajectories of an evaluation. Returns their ids."""
        lives = self._evaluations.begin(number, groups, self.ledger.members_started, self._now)
        for live in lives:
            self._live[live.id] = live
            self._enqueue(live)
        self._routing_changed = True
        return [live.id for live in lives]

    def pin(self, instance: Instance) -> None:
        """Pin an instance to the version it serves, to sample for the running evaluation."""
        self._evaluations.pin(instance)

    def unpin_idle(self) -> None:
        """Unpin the instances that have nothing more to sample for the evaluation, so that they pull again."""
        self._loads_changed |= {instance.instance: instance for instance in self._evaluations.unpin_idle()}

    def end_eval_trajectory(self, live: LiveTrajectory) -> bool:
        """Record that an evaluation trajectory has ended: scored, or, if it is queued, aborted. Returns True if it was
        the last."""
        queued = live.phase is Phase.QUEUED
        if queued:
            live.phase = next_phase(live.phase, Transition.GIVEN_UP)
            self._queue.remove(live, live.level)
        del self._live[live.id]
        return self._evaluations.end(live, scored=not queued)

    def close_evaluation(self) -> tuple[RunningEvaluation, tuple[DiscardedTrajectory, ...]]:
        """End the running evaluation. Returns it, and its trajectories that were still in flight."""
        evaluation, step = self._evaluations.close(), self.ledger.next_step
        self._all_loads_changed = self._batch_changed = True  # in turns, the step may have waited for it
        return evaluation, self._end(
            Ending(trajectory=i, group=self._live[i].group, fate=Fate.ABORTED, reason=AbortReason.RUN_ENDED, step=step)
            for i in sorted(evaluation.members)
        )

    # -- trajectories --------------------------------------------------------------------------------------------

    def send(self, live: LiveTrajectory, instance: Instance) -> None:
        """Route a queued trajectory to an instance, and reserve an entry for its group if it has none."""
        phase = next_phase(live.phase, Transition.ROUTED)
        level = self.level(live.group)
        if live.is_eval:
            live.v_traj = instance.version
        elif live.v_traj < 0:
            self.ledger.reserve(live.group, live.id, instance.version)
            live.v_traj = instance.version
            self._fresh_groups.discard(live.group)
        self._queue.remove(live, live.level)
        self._finish_move(live)
        live.route_number += 1
        live.instance, live.refused = instance.instance, ""
        live.phase, live.since = phase, self._now
        self._fleet.add(instance, live.id, live.kv_tokens)
        if self.level(live.group) != level:
            self._change_level(live.group)

    def refuse(self, live: LiveTrajectory, why: str) -> bool:
        """Leave a trajectory in the queue. Returns True if the reason has changed."""
        changed = live.refused != why
        live.refused = why
        return changed

    def start_move(self, live: LiveTrajectory, target: Instance | None) -> None:
        """Mark a running trajectory as being taken off its instance, to continue at `target`, or to be scored with the
        tokens it has if `target` is None."""
        source = self._fleet.get(live.instance)
        if source is None or live.leaving:
            raise ProtocolViolation(f"{live.id} is moved while it is {live.phase.value}, or on its way already")
        live.moved_at = self.ledger.version
        if target is None:
            live.truncating = True
            self.truncations.add(1)
        else:
            live.target = target.instance
            self._fleet.start_move(source, target)

    def finish_sampling(self, live: LiveTrajectory, tokens: int, *, truncated: bool = False) -> None:
        """Take a trajectory off its instance to be scored with its `tokens` tokens."""
        phase = next_phase(live.phase, Transition.TRUNCATED if truncated else Transition.SAMPLED)
        self._evaluations.sampled(live)
        self._leave_instance(live)
        self._finish_move(live)
        if live.truncating and not truncated:  # it ended by itself before it could be cut off
            self.truncations.add(-1)
        live.tokens = live.delivered_tokens = tokens
        live.truncating = False
        live.phase, live.since = phase, self._now

    def finish_turn(self, live: LiveTrajectory, tokens: int, *, truncated: bool = False) -> None:
        """Take a trajectory off its instance so that its environment replies to the turn that ends at `tokens`."""
        phase = next_phase(live.phase, Transition.TURN_SAMPLED)
        source = self._fleet.get(live.instance)
        assert source is not None
        live.cached_on, live.cached_version = source.instance, source.version
        self._leave_instance(live)
        self._finish_move(live)
        if live.truncating and not truncated:  # it ended by itself before it could be cut off: the next turn may be
            self.truncations.add(-1)
            live.moved_at = -1
        live.tokens = live.delivered_tokens = tokens
        live.truncating, live.truncated = False, truncated
        live.phase, live.since = phase, self._now

    def step_environment(self, live: LiveTrajectory) -> None:
        """Record that a turn was sent to the environment."""
        live.turns += 1

    def answer(self, live: LiveTrajectory, tokens: int) -> None:
        """Queue a trajectory for its next turn, after an observation. tokens: its length now."""
        phase = next_phase(live.phase, Transition.ENVIRONMENT_STEPPED)
        live.given_tokens += tokens - live.tokens
        live.phase, live.since = phase, self._now
        live.tokens = live.delivered_tokens = tokens
        self._enqueue(live)
        self._routing_changed = True

    def restart(self, live: LiveTrajectory) -> int:
        """Queue a trajectory whose environment failed, with only its prompt. Returns its number of failures."""
        live.phase, live.since = next_phase(live.phase, Transition.RESTARTED), self._now
        live.tokens = live.delivered_tokens = live.turns = live.given_tokens = 0
        live.attempts += 1
        self._enqueue(live)
        self._routing_changed = True
        return live.attempts

    def interrupt(self, live: LiveTrajectory, tokens: int) -> None:
        """Take a trajectory off its instance, and queue it with its `tokens` tokens."""
        self._requeue(live, Transition.INTERRUPTED, tokens)
        live.delivered_tokens = tokens

    def fail(self, live: LiveTrajectory, transition: Transition) -> int:
        """Queue a trajectory that failed or whose instance was lost, with its delivered tokens. Returns its number of
        failures."""
        self._requeue(live, transition, live.delivered_tokens)
        live.attempts += 1
        return live.attempts

    def pop_cached_instance(self, live: LiveTrajectory) -> InstanceId | None:
        """Clear the instance that may have a trajectory's context cached; returns it if the cache may still be
        there."""
        instance, live.cached_on = self._fleet.with_cache(live.cached_on, live.cached_version), None
        return instance.instance if instance is not None else None

    def score(self, live: LiveTrajectory, reward: float | None) -> bool:
        """Record the reward of a trajectory, None if it has none. Returns True if its group now has all members it
        needs."""
        phase = next_phase(live.phase, Transition.SCORED)
        if live.phase is Phase.IN_ENVIRONMENT:
            self._evaluations.sampled(live)
        complete = not live.is_eval and self.ledger.complete(live.group, live.id)
        live.reward = reward
        live.phase, live.since = phase, self._now
        self._batch_changed |= complete
        return complete

    # -- instances -----------------------------------------------------------------------------------------------

    def join(self, instance: InstanceId, version: PolicyVersion, kv_capacity: int, max_running: int) -> None:
        """Add an instance that runs nothing. If it restarted under its id, moves may already be on their way to it."""
        arriving = sum(live.target == instance for live in self._live.values())
        self._fleet.join(instance, version, kv_capacity, max_running, in_transit=arriving, asleep=self.turns)
        self._room_changed = self._routing_changed = self._all_loads_changed = True

    def drain(self, instance: Instance) -> list[LiveTrajectory]:
        """Exclude an instance from routing. Returns the trajectories on it that are not being taken off yet."""
        self._fleet.drain(instance)
        return self._running_on(instance)

    def sleep(self, instance: Instance) -> list[LiveTrajectory]:
        """Mark an instance as asleep. Returns the trajectories on it that are not being taken off yet."""
        self._fleet.start_sleep(instance)
        self._falling_asleep.add(instance.instance)
        return self._running_on(instance)

    def finish_sleep(self, instance: InstanceId) -> None:
        """Record that an instance has freed its GPUs."""
        self._falling_asleep.discard(instance)

    def _running_on(self, instance: Instance) -> list[LiveTrajectory]:
        running = (self._live[member] for member in instance.trajectories)
        return [live for live in running if not live.leaving]

    def remove_instance(self, instance: Instance) -> None:
        """Remove an instance, after all its trajectories were queued or aborted."""
        self._fleet.remove_instance(instance)
        self._evaluations.remove(instance.instance)
        self._loads_changed.pop(instance.instance, None)
        self._falling_asleep.discard(instance.instance)

    def record_progress(
        self,
        instance: Instance,
        progress: Iterable[tuple[TrajectoryId, int]],
        delivered: Iterable[tuple[TrajectoryId, int]] = (),
    ) -> None:
        """Record the (trajectory, tokens) of a report, and how many of the tokens are delivered. A report may be older
        than the latest routing, so only trajectories that still run here count, and numbers never decrease."""
        grown = 0
        for member, tokens in progress:
            if member in instance.trajectories:
                live = self._live[member]
                if tokens > live.tokens:
                    grown += tokens - live.tokens
                    live.tokens = tokens
        for member, tokens in delivered:
            if member in instance.trajectories:
                live = self._live[member]
                grown += max(0, tokens - live.tokens)
                live.tokens = max(tokens, live.tokens)
                live.delivered_tokens = max(tokens, live.delivered_tokens)
        self._fleet.grow(instance, grown)

    def set_draft_length(self, instance: Instance, length: int) -> None:
        self._fleet.set_draft_length(instance, length)

    def start_pull(self, instance: Instance) -> None:
        """Mark an instance as serving the published version, which it is about to load."""
        self._fleet.start_pull(instance, self.ledger.version)
        self._routing_changed = True

    def finish_pull(self, instance: Instance) -> None:
        """Record that an instance has loaded the version it is marked with."""
        self._fleet.finish_pull(instance)
        self._loads_changed[instance.instance] = instance
        self._routing_changed |= self.evaluation is not None  # which may have waited for it

    # -- inside --------------------------------------------------------------------------------------------------

    def _enqueue(self, live: LiveTrajectory) -> None:
        live.level = self.level(live.group)
        self._queue.append(live, live.level)

    def _change_level(self, group: GroupId) -> None:
        """A group got its promise, or an older version: its queued members move to the level of that version."""
        for member in sorted(self.ledger.entries[group].waiting):
            live = self._live[member]
            if live.phase is Phase.QUEUED:
                self._queue.remove(live, live.level)
                self._enqueue(live)

    def _requeue(self, live: LiveTrajectory, transition: Transition, tokens: int) -> None:
        phase = next_phase(live.phase, transition)
        self._leave_instance(live)
        if (
            live.truncating
        ):  # it left for another reason, or with nothing to score: it may be cut off in its next attempt
            self.truncations.add(-1)
            live.truncating, live.moved_at = False, -1
        live.tokens = tokens
        live.phase, live.since = phase, self._now
        self._enqueue(live)

    def _leave_instance(self, live: LiveTrajectory) -> None:
        """Take a running trajectory off its instance. Before its tokens change: they are counted there as they are."""
        instance = self._fleet.get(live.instance)
        assert instance is not None
        self._fleet.remove(instance, live.id, live.kv_tokens)
        if live.target is not None:
            self._fleet.finish_move(instance)
        live.instance = None
        self._loads_changed[instance.instance] = instance
        self._routing_changed = True

    def _finish_move(self, live: LiveTrajectory) -> None:
        """Count a trajectory as no longer on its way, wherever it ended up."""
        target, live.target = self._fleet.get(live.target), None
        if target is not None:
            self._fleet.finish_move(target)

    def _end(self, endings: Iterable[Ending]) -> tuple[DiscardedTrajectory, ...]:
        """Take trajectories that the ledger has ended out of everything else."""
        ended: list[DiscardedTrajectory] = []
        endings = list(endings)
        if self.mixture is not None:
            # Backwards: the first ending of a group is that of the member that ended it.
            self.mixture.count_ended(
                {e.group: (e.fate, e.reason) for e in reversed(endings) if e.group not in self.ledger.entries}
            )
        for ending in endings:
            live = self._live.pop(ending.trajectory)
            ended.append(
                DiscardedTrajectory(
                    ending=ending,
                    v_traj=live.v_traj,
                    route_number=live.route_number,
                    running_on=live.instance,
                    cached_on=self.pop_cached_instance(live),
                    environment_open=live.turns > 0 and live.phase is not Phase.DONE,
                )
            )
            phase = next_phase(live.phase, Transition.GIVEN_UP)
            if live.phase is Phase.QUEUED:
                self._queue.remove(live, live.level)
            elif live.phase is Phase.RUNNING:
                self._leave_instance(live)
            self._finish_move(live)
            self._fresh_groups.discard(live.group)
            live.phase = phase
        if ended:  # a step may have waited for one of them
            self._batch_changed = self._room_changed = self._routing_changed = True
        return tuple(ended)

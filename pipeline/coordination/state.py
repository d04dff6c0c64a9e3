"""The coordinator's state, and the only methods that change it. Pure.

The methods of `CoordinatorState` are the only writers of trajectories, fleet, queue and ledger. Each records one
decision or one event, keeps the invariants of invariants.py, and sets the flags of the decisions that may now come out
differently (`ReplanFlags`): the coordinator reads each flag with a `pop_..._changed` method, which clears it. If a
trajectory's phase or the ledger does not allow a change, the method raises `ProtocolViolation` and changes nothing.

The state is speculative: commands count as executed when they are issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from staleflow.pipeline.coordination.evaluations import Evaluations, RunningEvaluation
from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.coordination.phases import Phase, Transition, next_phase
from staleflow.pipeline.coordination.state_counts import ReplanFlags, RunningMeans, TruncationCounts
from staleflow.pipeline.coordination.trajectories import DiscardedTrajectory, LiveTrajectory, restore_members
from staleflow.pipeline.coordination.work_queue import EVALUATION, UNRESERVED, WorkQueue
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, NewGroup
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.staleness.ledger_groups import Consumption, Ending
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
    """Trajectories, instances, queued work and the ledger of one run, with the methods that change them."""

    def __init__(
        self,
        ledger: StalenessLedger,
        mixture: Mixture | None = None,
        *,
        serves_many_versions: bool = False,
        shares_gpus: bool = False,
    ) -> None:
        """serves_many_versions: see Fleet. shares_gpus: see StrategySet."""
        self.fleet = Fleet(serves_many_versions=serves_many_versions)
        super().__init__(self.fleet)
        self.live_trajectories: dict[TrajectoryId, LiveTrajectory] = {}
        self.num_in_phase: Counter[Phase] = Counter()
        """Number of live trajectories in each phase."""
        self.queue = WorkQueue()
        self.ledger = ledger
        self.mixture = mixture
        self._evaluations = Evaluations(self.fleet)
        self.running_means = RunningMeans()
        self.truncations = TruncationCounts()
        self.now = 0.0
        """Time of the event being handled, in seconds."""
        self.unreserved_groups: set[GroupId] = set()
        """Groups that have arrived and have no reservation, since no member was routed yet."""
        self.num_requested_groups = 0
        """Number of groups that were requested and have not arrived."""
        self.is_training = False
        """Whether a step is being trained."""
        self._trainer_idle_since: float | None = 0.0
        """Seconds; None while a step is being trained."""
        self._published_at_s = 0.0
        """Time of the latest `publish` or `resume`, in seconds."""
        self.shares_gpus = shares_gpus
        self.pending_sleeps: set[InstanceId] = set()
        """Instances that were ordered to sleep and have not confirmed it."""

    @property
    def evaluation(self) -> RunningEvaluation | None:
        """The running evaluation; None if there is none."""
        return self._evaluations.running

    @property
    def trainer_has_gpus(self) -> bool:
        """Whether the trainer uses the GPUs that it shares with the instances, which then all sleep or will soon."""
        return self.shares_gpus and self.is_training

    @property
    def trainer_waited_s(self) -> float:
        """Seconds that the trainer has been waiting for its next batch; 0 while it trains."""
        return 0.0 if self._trainer_idle_since is None else self.now - self._trainer_idle_since

    def queue_level(self, group: GroupId) -> int:
        """Return the queue level of a group's members."""
        if is_evaluation(group):
            return EVALUATION
        version = self.ledger.live_groups[group].version
        return UNRESERVED if version < 0 else version

    def get_in_phase(self, phase: Phase, trajectory_id: TrajectoryId, route_number: int) -> LiveTrajectory | None:
        """Return the trajectory of an event of its instance or environment; None if the event is late."""
        trajectory = self.live_trajectories.get(trajectory_id)
        if trajectory is None or trajectory.phase is not phase or trajectory.route_number != route_number:
            return None
        return trajectory

    # -- the run -------------------------------------------------------------------------------------------------

    def flag_timed_decisions(self) -> None:
        """Set the flags of the decisions that may change with time alone: routing, and pulls."""
        self._routing_changed = self._all_may_pull = True

    def flag_routing(self) -> None:
        """Set the flag of routing, because the queue has trajectories that were not tried."""
        self._routing_changed = True

    def resume(self, step: int, num_ended: Mapping[tuple[Fate, AbortReason], int]) -> None:
        """Continue a run that has published version `step`. Its groups in flight are added afterwards."""
        self.ledger.resume(step, num_ended)
        self._trainer_idle_since = self._published_at_s = self.now

    def publish(self, version: PolicyVersion) -> None:
        """Record that the current training step has finished."""
        self.ledger.publish(version)
        self.is_training, self._trainer_idle_since = False, self.now
        self.running_means.publish_interval_s.add(self.now - self._published_at_s)
        self._published_at_s = self.now
        self._batch_changed = self._admission_changed = self._routing_changed = self._all_may_pull = True

    # -- groups --------------------------------------------------------------------------------------------------

    def request_groups(self, num_groups: int) -> tuple[tuple[int, int], ...]:
        """Count groups as requested. Returns (source, task) of each; empty without a mixture."""
        self.num_requested_groups += num_groups
        return () if self.mixture is None else self.mixture.draw(num_groups)

    def add_groups(self, groups: Iterable[NewGroup]) -> list[TrajectoryId]:
        """Queue all members of groups that have arrived. Returns their ids."""
        trajectory_ids: list[TrajectoryId] = []
        for group in groups:
            members = self.ledger.start(group.group)
            self.num_requested_groups -= 1
            if self.mixture is not None:
                self.mixture.count_arrived(group.group, group.source, group.task)
            self.running_means.prompt_tokens.add(group.prompt_tokens)
            self.unreserved_groups.add(group.group)
            for member in members:
                trajectory = LiveTrajectory(
                    id=member, group=group.group, prompt_tokens=group.prompt_tokens, phase_since_s=self.now
                )
                self._add(trajectory)
            trajectory_ids += members
        self._routing_changed = True
        return trajectory_ids

    def restore_group(self, group: GroupInFlight, sampled_phase: Phase) -> bool:
        """Restore a group of a stored run, with its reservation. Returns True if it has all members it needs.
        sampled_phase: phase of members whose turn has ended."""
        self.ledger.start(group.group, [member.trajectory for member in group.members])
        self.running_means.prompt_tokens.add(group.prompt_tokens)
        is_complete = False
        for member in sorted(group.members, key=lambda member: member.version):
            if member.version >= 0:
                self.ledger.reserve(group.group, member.trajectory, member.version)
        if not self.ledger.live_groups[group.group].is_reserved:
            self.unreserved_groups.add(group.group)
        for trajectory in restore_members(group, sampled_phase, self.now):
            self._add(trajectory)
            if trajectory.phase is Phase.DONE:
                is_complete = self.ledger.complete(trajectory.group, trajectory.id)
        self._batch_changed = self._admission_changed = self._routing_changed = True
        return is_complete

    def occupy(self, group: GroupId) -> tuple[DiscardedTrajectory, ...]:
        """Make a complete group available to the trainer. Only the ledger keeps its members. Returns the trajectories
        that became surplus."""
        trained_members = self.ledger.live_groups[group].completed[: self.ledger.group_size]
        discarded_trajectories = self._remove_ended(self.ledger.occupy(group))
        for member in trained_members:
            trajectory = self.live_trajectories.pop(member)
            self._enter_phase(trajectory, next_phase(trajectory.phase, Transition.OCCUPIED))
        return discarded_trajectories

    def filter(self, group: GroupId, reason: AbortReason) -> tuple[DiscardedTrajectory, ...]:
        """Discard a complete group that is not worth training on."""
        return self._remove_ended(self.ledger.filter(group, reason))

    def abort(self, group: GroupId, reason: AbortReason, member: TrajectoryId) -> tuple[DiscardedTrajectory, ...]:
        """Abort a member, and its group if too few are left."""
        return self._remove_ended(self.ledger.abort(group, reason, member))

    def abort_all(self, reason: AbortReason) -> tuple[DiscardedTrajectory, ...]:
        """Abort all trajectories in flight, and those that wait for the trainer."""
        finished_groups = self.ledger.finished_groups()
        for group, (members, versions) in finished_groups.items():
            for member, version in zip(members, versions, strict=True):
                self._add(LiveTrajectory(id=member, group=group, prompt_tokens=0, phase=Phase.DONE, v_traj=version))
        groups = (*finished_groups, *self.ledger.live_groups)
        return self._remove_ended([ending for group in groups for ending in self.ledger.abort(group, reason)])

    def consume(self) -> tuple[Consumption, tuple[DiscardedTrajectory, ...]]:
        """Consume the batch of the next step. Returns it, and the trajectories that became surplus."""
        batch = self.ledger.consume(self.ledger.next_step)
        self.is_training, self._trainer_idle_since = True, None
        if self.mixture is not None:
            self.mixture.count_trained(batch.groups)
        self.truncations.count_consumed(len(batch.members))
        self._admission_changed = self._routing_changed = True
        return batch, self._remove_ended(batch.surplus)

    # -- evaluations ---------------------------------------------------------------------------------------------

    def begin_evaluation(self, number: int, groups: Iterable[NewGroup]) -> list[TrajectoryId]:
        """Queue the trajectories of an evaluation. Returns their ids."""
        trajectories = self._evaluations.begin(number, groups, self.ledger.members_started_per_group, self.now)
        for trajectory in trajectories:
            self._add(trajectory)
        self._routing_changed = True
        return [trajectory.id for trajectory in trajectories]

    def pin(self, instance: Instance) -> None:
        """Pin an instance to the version it serves, to sample for the running evaluation."""
        self._evaluations.pin(instance)

    def unpin_idle_instances(self) -> None:
        """Unpin the instances that have nothing more to sample for the evaluation, so that they pull again."""
        self._pull_candidates |= {instance.id: instance for instance in self._evaluations.unpin_idle_instances()}

    def end_evaluation_trajectory(self, trajectory: LiveTrajectory) -> bool:
        """Record that an evaluation trajectory has ended: scored, or, if it is queued, aborted. Returns True if it was
        the last."""
        is_queued = trajectory.phase is Phase.QUEUED
        if is_queued:
            self.queue.remove(trajectory, trajectory.queue_level)
        self._enter_phase(trajectory, next_phase(trajectory.phase, Transition.DISCARDED))
        del self.live_trajectories[trajectory.id]
        return self._evaluations.end_trajectory(trajectory, has_score=not is_queued)

    def close_evaluation(self) -> tuple[RunningEvaluation, tuple[DiscardedTrajectory, ...]]:
        """End the running evaluation. Returns it, and its trajectories that were still in flight."""
        evaluation, step = self._evaluations.close(), self.ledger.next_step
        self._all_may_pull = self._batch_changed = True  # with shared GPUs the step may have waited for it
        return evaluation, self._remove_ended(
            Ending(
                trajectory=member,
                group=self.live_trajectories[member].group,
                fate=Fate.ABORTED,
                reason=AbortReason.RUN_ENDED,
                step=step,
            )
            for member in sorted(evaluation.members)
        )

    # -- trajectories --------------------------------------------------------------------------------------------

    def route(self, trajectory: LiveTrajectory, instance: Instance) -> None:
        """Route a queued trajectory to an instance, and reserve an entry for its group if it has none."""
        phase = next_phase(trajectory.phase, Transition.ROUTED)
        previous_level = self.queue_level(trajectory.group)
        if trajectory.is_evaluation:
            trajectory.v_traj = instance.version
        elif trajectory.v_traj < 0:
            self.ledger.reserve(trajectory.group, trajectory.id, instance.version)
            trajectory.v_traj = instance.version
            self.unreserved_groups.discard(trajectory.group)
        self.queue.remove(trajectory, trajectory.queue_level)
        self._finish_move(trajectory)
        trajectory.route_number += 1
        trajectory.instance, trajectory.refusal = instance.id, ""
        self._enter_phase(trajectory, phase)
        self.fleet.add_trajectory(instance, trajectory.id, trajectory.kv_tokens)
        if self.queue_level(trajectory.group) != previous_level:
            self._requeue_members(trajectory.group)

    def record_refusal(self, trajectory: LiveTrajectory, reason: str) -> bool:
        """Record why a trajectory stays in the queue. Returns True if the reason has changed."""
        has_changed = trajectory.refusal != reason
        trajectory.refusal = reason
        return has_changed

    def start_move(self, trajectory: LiveTrajectory, target: Instance | None) -> None:
        """Mark a running trajectory as being taken off its instance, to continue at `target`, or to be scored with the
        tokens it has if `target` is None."""
        source = self.fleet.get(trajectory.instance)
        if source is None or trajectory.is_leaving:
            raise ProtocolViolation(f"{trajectory.id} is moved while it is {trajectory.phase.value} or already moving")
        trajectory.moved_at_version = self.ledger.version
        if target is None:
            trajectory.is_being_truncated = True
            self.truncations.add(1)
        else:
            trajectory.move_target = target.id
            self.fleet.start_move(source, target)

    def finish_sampling(self, trajectory: LiveTrajectory, tokens: int, *, truncated: bool = False) -> None:
        """Take a trajectory off its instance to be scored with its `tokens` tokens."""
        phase = next_phase(trajectory.phase, Transition.TRUNCATED if truncated else Transition.SAMPLED)
        self._evaluations.count_sampled(trajectory)
        self._leave_instance(trajectory)
        self._finish_move(trajectory)
        if trajectory.is_being_truncated and not truncated:  # it ended before it was truncated
            self.truncations.add(-1)
        trajectory.tokens = trajectory.delivered_tokens = tokens
        trajectory.is_being_truncated = False
        self._enter_phase(trajectory, phase)

    def finish_turn(self, trajectory: LiveTrajectory, tokens: int, *, truncated: bool = False) -> None:
        """Take a trajectory off its instance so that its environment replies to the turn that ends at `tokens`."""
        phase = next_phase(trajectory.phase, Transition.TURN_SAMPLED)
        source = self.fleet.get(trajectory.instance)
        assert source is not None
        trajectory.cached_instance, trajectory.cached_version = source.id, source.version
        self._leave_instance(trajectory)
        self._finish_move(trajectory)
        if trajectory.is_being_truncated and not truncated:  # it ended before; its next turn may be truncated
            self._undo_truncation(trajectory)
        trajectory.tokens = trajectory.delivered_tokens = tokens
        trajectory.is_being_truncated, trajectory.is_last_turn_truncated = False, truncated
        self._enter_phase(trajectory, phase)

    def count_turn(self, trajectory: LiveTrajectory) -> None:
        """Count a turn that was sent to the environment."""
        trajectory.num_turns += 1

    def add_observation(self, trajectory: LiveTrajectory, tokens: int) -> None:
        """Queue a trajectory for its next turn, after an observation. tokens: its length now."""
        phase = next_phase(trajectory.phase, Transition.ENVIRONMENT_STEPPED)
        trajectory.observation_tokens += tokens - trajectory.tokens
        self._enter_phase(trajectory, phase)
        trajectory.tokens = trajectory.delivered_tokens = trajectory.turn_start_tokens = tokens
        self._enqueue(trajectory)
        self._routing_changed = True

    def restart_episode(self, trajectory: LiveTrajectory, *, is_lost: bool) -> int:
        """Queue a trajectory whose environment failed or was lost, with only its prompt. Returns its number of
        failures."""
        self._enter_phase(trajectory, next_phase(trajectory.phase, Transition.RESTARTED))
        if trajectory.is_last_turn_truncated:
            self._undo_truncation(trajectory)
        trajectory.tokens = trajectory.delivered_tokens = trajectory.turn_start_tokens = 0
        trajectory.num_turns = trajectory.observation_tokens = 0
        trajectory.num_failures += not is_lost
        self._enqueue(trajectory)
        self._routing_changed = True
        return trajectory.num_failures

    def requeue_interrupted(self, trajectory: LiveTrajectory, tokens: int) -> None:
        """Take a trajectory off its instance, and queue it with its `tokens` tokens."""
        self._requeue(trajectory, Transition.INTERRUPTED, tokens)
        trajectory.delivered_tokens = tokens

    def requeue_failed(self, trajectory: LiveTrajectory, transition: Transition) -> int:
        """Queue a trajectory that failed or whose instance was lost, with its delivered tokens. Returns its number of
        failures."""
        self._requeue(trajectory, transition, trajectory.delivered_tokens)
        trajectory.num_failures += 1
        return trajectory.num_failures

    def pop_cached_instance(self, trajectory: LiveTrajectory) -> InstanceId | None:
        """Clear the instance that may have a trajectory's context cached; returns it if the cache may still be
        there."""
        instance = self.fleet.get_if_context_valid(trajectory.cached_instance, trajectory.cached_version)
        trajectory.cached_instance = None
        return instance.id if instance is not None else None

    def record_reward(self, trajectory: LiveTrajectory, reward: float | None) -> bool:
        """Record the reward of a trajectory, None if it has none. Returns True if its group now has all members it
        needs."""
        phase = next_phase(trajectory.phase, Transition.SCORED)
        if trajectory.phase is Phase.IN_ENVIRONMENT:
            self._evaluations.count_sampled(trajectory)
        is_complete = not trajectory.is_evaluation and self.ledger.complete(trajectory.group, trajectory.id)
        trajectory.reward = reward
        self._enter_phase(trajectory, phase)
        self._batch_changed |= is_complete
        return is_complete

    # -- instances -----------------------------------------------------------------------------------------------

    def add_instance(self, instance_id: InstanceId, version: PolicyVersion, kv_capacity: int, max_running: int) -> None:
        """Add an instance that runs nothing. A replacement of a lost instance has a new id."""
        self.fleet.add_instance(instance_id, version, kv_capacity, max_running, is_asleep=self.shares_gpus)
        self._admission_changed = self._routing_changed = self._all_may_pull = True

    def drain(self, instance: Instance) -> list[LiveTrajectory]:
        """Exclude an instance from routing. Returns the trajectories on it that are not leaving it yet."""
        self.fleet.drain(instance)
        return self._not_leaving(instance)

    def start_sleep(self, instance: Instance) -> list[LiveTrajectory]:
        """Mark an instance as asleep. Returns the trajectories on it that are not leaving it yet."""
        self.fleet.start_sleep(instance)
        self.pending_sleeps.add(instance.id)
        return self._not_leaving(instance)

    def finish_sleep(self, instance_id: InstanceId) -> None:
        """Record that an instance has freed its GPUs."""
        self.pending_sleeps.discard(instance_id)

    def _not_leaving(self, instance: Instance) -> list[LiveTrajectory]:
        """Trajectories on an instance that are neither moving nor being truncated."""
        running = (self.live_trajectories[member] for member in instance.trajectories)
        return [trajectory for trajectory in running if not trajectory.is_leaving]

    def remove_instance(self, instance: Instance) -> None:
        """Remove an instance, after all its trajectories were queued or aborted."""
        self.fleet.remove_instance(instance)
        self._evaluations.unpin_lost(instance.id)
        self._pull_candidates.pop(instance.id, None)
        self.pending_sleeps.discard(instance.id)

    def record_progress(
        self,
        instance: Instance,
        progress: Iterable[tuple[TrajectoryId, int]],
        delivered: Iterable[tuple[TrajectoryId, int]] = (),
    ) -> None:
        """Record the (trajectory, tokens) of a report, and how many of the tokens are delivered. A report may be older
        than the latest routing, so only trajectories that still run here count, and numbers never decrease."""
        added_tokens = 0
        for counts, are_delivered in ((progress, False), (delivered, True)):
            for member, tokens in counts:
                if member in instance.trajectories:
                    trajectory = self.live_trajectories[member]
                    added_tokens += max(0, tokens - trajectory.tokens)
                    trajectory.tokens = max(tokens, trajectory.tokens)
                    if are_delivered:
                        trajectory.delivered_tokens = max(tokens, trajectory.delivered_tokens)
        self.fleet.add_kv_tokens(instance, added_tokens)

    def start_pull(self, instance: Instance) -> None:
        """Mark an instance as serving the published version, which it is about to load."""
        self.fleet.start_pull(instance, self.ledger.version)
        self._routing_changed = True

    def finish_pull(self, instance: Instance, version: PolicyVersion) -> None:
        """Record that an instance has loaded the version it is marked with, or a newer one because no host had that
        any more."""
        self.fleet.finish_pull(instance, version)
        self._pull_candidates[instance.id] = instance
        self._routing_changed |= self.evaluation is not None  # which may have waited for it

    # -- internal ----------------------------------------------------------------------------------------------

    def _add(self, trajectory: LiveTrajectory) -> None:
        self.live_trajectories[trajectory.id] = trajectory
        self.num_in_phase[trajectory.phase] += 1
        if trajectory.phase is Phase.QUEUED:
            self._enqueue(trajectory)

    def _enter_phase(self, trajectory: LiveTrajectory, phase: Phase) -> None:
        self.num_in_phase[trajectory.phase] -= 1
        self.num_in_phase[phase] += phase is not Phase.ENDED
        trajectory.phase, trajectory.phase_since_s = phase, self.now

    def _enqueue(self, trajectory: LiveTrajectory) -> None:
        trajectory.queue_level = self.queue_level(trajectory.group)
        self.queue.append(trajectory, trajectory.queue_level)

    def _requeue_members(self, group: GroupId) -> None:
        """Move the queued members of a group to the level of its reservation, after that was made or changed."""
        for member in sorted(self.ledger.live_groups[group].unfinished):
            trajectory = self.live_trajectories[member]
            if trajectory.phase is Phase.QUEUED:
                self.queue.remove(trajectory, trajectory.queue_level)
                self._enqueue(trajectory)

    def _requeue(self, trajectory: LiveTrajectory, transition: Transition, tokens: int) -> None:
        phase = next_phase(trajectory.phase, transition)
        self._leave_instance(trajectory)
        if trajectory.is_being_truncated:  # it left for another reason, or without tokens; it may be truncated later
            self._undo_truncation(trajectory)
        trajectory.tokens = tokens
        self._enter_phase(trajectory, phase)
        self._enqueue(trajectory)

    def _undo_truncation(self, trajectory: LiveTrajectory) -> None:
        """Forget a truncation that did not end the trajectory, which may be truncated later."""
        self.truncations.add(-1)
        trajectory.is_being_truncated = trajectory.is_last_turn_truncated = False
        trajectory.moved_at_version = -1

    def _leave_instance(self, trajectory: LiveTrajectory) -> None:
        """Take a running trajectory off its instance. Call this before its number of tokens changes."""
        instance = self.fleet.get(trajectory.instance)
        assert instance is not None
        self.fleet.remove_trajectory(instance, trajectory.id, trajectory.kv_tokens)
        if trajectory.move_target is not None:
            self.fleet.finish_move(instance)
        trajectory.instance = None
        self._pull_candidates[instance.id] = instance
        self._routing_changed = True

    def _finish_move(self, trajectory: LiveTrajectory) -> None:
        """End the move of a trajectory, if it has one."""
        target, trajectory.move_target = self.fleet.get(trajectory.move_target), None
        if target is not None:
            self.fleet.finish_move(target)

    def _remove_ended(self, endings: Iterable[Ending]) -> tuple[DiscardedTrajectory, ...]:
        """Remove trajectories that the ledger has ended from queue, fleet and mixture."""
        discarded_trajectories: list[DiscardedTrajectory] = []
        endings = list(endings)
        if self.mixture is not None:
            # Backwards: the first ending of a group is that of the member that ended it.
            self.mixture.count_ended(
                {
                    ending.group: (ending.fate, ending.reason)
                    for ending in reversed(endings)
                    if not self.ledger.is_live(ending.group)
                }
            )
        for ending in endings:
            trajectory = self.live_trajectories.pop(ending.trajectory)
            discarded_trajectories.append(
                DiscardedTrajectory(
                    ending=ending,
                    v_traj=trajectory.v_traj,
                    running_instance=trajectory.instance,
                    cached_instance=self.pop_cached_instance(trajectory),
                    has_open_environment=trajectory.num_turns > 0 and trajectory.phase is not Phase.DONE,
                )
            )
            phase = next_phase(trajectory.phase, Transition.DISCARDED)
            if trajectory.phase is Phase.QUEUED:
                self.queue.remove(trajectory, trajectory.queue_level)
            elif trajectory.phase is Phase.RUNNING:
                self._leave_instance(trajectory)
            self._finish_move(trajectory)
            self.unreserved_groups.discard(trajectory.group)
            self._enter_phase(trajectory, phase)
        if discarded_trajectories:  # a step may have waited for one of them
            self._batch_changed = self._admission_changed = self._routing_changed = True
        return tuple(discarded_trajectories)

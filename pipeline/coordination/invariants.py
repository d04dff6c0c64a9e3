"""Invariants across all collections of the coordinator's state, which hold after every event. Pure."""

from __future__ import annotations

from collections import Counter

from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import InstanceId, is_evaluation


def validate(state: CoordinatorState) -> None:
    """Check all invariants. O(live trajectories). Raises `ProtocolViolation` for the first that is broken."""
    state.ledger.validate()
    state.fleet.validate()
    members = {member for entry in state.ledger.live_groups.values() for member in entry.members}
    if state.evaluation is not None:
        members |= state.evaluation.members
    if members != state.live_trajectories.keys():
        raise ProtocolViolation(
            f"ledger and coordinator differ about {sorted(members ^ state.live_trajectories.keys())[:10]}"
        )
    _validate_evaluation(state)
    for trajectory in state.live_trajectories.values():
        _validate_trajectory(state, trajectory)
    _validate_instances(state)
    num_in_phase = Counter(trajectory.phase for trajectory in state.live_trajectories.values())
    if any(num_in_phase[phase] != state.num_in_phase[phase] for phase in Phase):
        raise ProtocolViolation(f"trajectories by phase are {num_in_phase}, but {state.num_in_phase} are counted")
    unreserved_groups = {g for g, entry in state.ledger.live_groups.items() if not entry.is_reserved}
    if unreserved_groups != state.unreserved_groups:
        raise ProtocolViolation(f"unreserved groups differ: {sorted(unreserved_groups ^ state.unreserved_groups)[:10]}")
    waiting_levels = {
        t.id: (level := state.queue_level(t.group), level)
        for t in state.live_trajectories.values()
        if t.phase is Phase.QUEUED
    }
    queue_levels = {trajectory.id: (level, trajectory.queue_level) for level, trajectory in state.queue}
    if waiting_levels != queue_levels or len(state.queue) != len(queue_levels):
        raise ProtocolViolation(
            f"queued and waiting differ: {sorted(waiting_levels.items() ^ queue_levels.items())[:10]}"
        )
    if state.trainer_has_gpus and (awake := [instance.id for instance in state.fleet if not instance.is_asleep]):
        raise ProtocolViolation(f"{awake} are awake in the trainer's turn")
    if state.is_training != (state.ledger.next_step > state.ledger.version):
        raise ProtocolViolation(
            f"next step {state.ledger.next_step}, published {state.ledger.version}, but training is {state.is_training}"
        )


def _validate_trajectory(state: CoordinatorState, trajectory: LiveTrajectory) -> None:
    """Check that a trajectory agrees with its instance and, unless it is an evaluation's, with its group's entry in the
    ledger."""
    instance = state.fleet.get(trajectory.instance)
    if (trajectory.phase is Phase.RUNNING) != (instance is not None and trajectory.id in instance.trajectories):
        raise ProtocolViolation(
            f"{trajectory.id} is {trajectory.phase.value} but not listed as running on {trajectory.instance}"
        )
    if (trajectory.phase is Phase.RUNNING) != (trajectory.instance is not None):
        raise ProtocolViolation(f"{trajectory.id} is {trajectory.phase.value} on {trajectory.instance}")
    if not trajectory.is_evaluation:
        entry = state.ledger.live_groups[trajectory.group]
        if (trajectory.phase is Phase.DONE) != (trajectory.id in entry.completed):
            raise ProtocolViolation(
                f"{trajectory.id} is {trajectory.phase.value}, its group has {entry.completed} completed"
            )
        v_traj = entry.member_versions.get(trajectory.id, -1)
    else:
        v_traj = trajectory.v_traj
    if trajectory.v_traj != v_traj or (v_traj >= 0) != (trajectory.route_number > 0):
        raise ProtocolViolation(
            f"{trajectory.id} was routed {trajectory.route_number} times, with version {trajectory.v_traj}"
        )
    if not 0 <= trajectory.delivered_tokens <= trajectory.tokens:
        raise ProtocolViolation(
            f"{trajectory.id} has {trajectory.tokens} tokens, {trajectory.delivered_tokens} of them delivered"
        )
    if trajectory.is_being_truncated and trajectory.phase is not Phase.RUNNING:
        raise ProtocolViolation(f"{trajectory.id} is being truncated but {trajectory.phase.value}")
    if trajectory.move_target is not None and trajectory.phase not in {Phase.RUNNING, Phase.QUEUED}:
        raise ProtocolViolation(f"{trajectory.id} is moving to {trajectory.move_target} but {trajectory.phase.value}")


def _validate_evaluation(state: CoordinatorState) -> None:
    """Check that an evaluation is sampled under its version only, on pinned instances that serve this version."""
    evaluation = state.evaluation
    members = {trajectory.id for trajectory in state.live_trajectories.values() if trajectory.is_evaluation}
    if members != (set() if evaluation is None else evaluation.members):
        raise ProtocolViolation(
            f"the live evaluation trajectories {sorted(members)[:10]} are not those of the evaluation"
        )
    for instance in state.fleet:
        if instance.num_eval_running != sum(is_evaluation(member) for member in instance.trajectories):
            raise ProtocolViolation(
                f"{instance.id} has a wrong count of {instance.num_eval_running} evaluation trajectories"
            )
    if evaluation is None:
        return
    sampling_phases = {Phase.QUEUED, Phase.RUNNING, Phase.IN_ENVIRONMENT}
    if evaluation.num_to_sample != sum(state.live_trajectories[member].phase in sampling_phases for member in members):
        raise ProtocolViolation(
            f"evaluation {evaluation.number} has a wrong count of {evaluation.num_to_sample} trajectories to sample"
        )
    if missing_ids := [name for name in evaluation.pinned_instances if state.fleet.get(name) is None]:
        raise ProtocolViolation(f"evaluation {evaluation.number} has pinned instances that are gone: {missing_ids}")
    for member in members:
        trajectory = state.live_trajectories[member]
        serving_instance = state.fleet.get(trajectory.instance)
        if trajectory.v_traj not in {-1, evaluation.evaluated_version}:
            raise ProtocolViolation(
                f"{trajectory.id} has version {trajectory.v_traj}, but {evaluation.evaluated_version} is evaluated"
            )
        if serving_instance is not None and (
            serving_instance.version != evaluation.evaluated_version
            or serving_instance.id not in evaluation.pinned_instances
        ):
            raise ProtocolViolation(
                f"{trajectory.id} is sampled on {trajectory.instance} at version {serving_instance.version}, for an "
                f"evaluation of version {evaluation.evaluated_version}"
            )


def _validate_instances(state: CoordinatorState) -> None:
    """Check that the counts of each instance match the trajectories that it runs or that are moving to it."""
    num_moving: Counter[InstanceId] = Counter()
    for trajectory in state.live_trajectories.values():
        if trajectory.move_target is not None:
            num_moving.update(
                [trajectory.move_target]
                if trajectory.instance is None
                else [trajectory.move_target, trajectory.instance]
            )
    for instance in state.fleet:
        running = [state.live_trajectories.get(member) for member in instance.trajectories]
        if any(trajectory is None or trajectory.instance != instance.id for trajectory in running):
            raise ProtocolViolation(f"{instance.id} lists trajectories that run elsewhere or have ended")
        if instance.kv_tokens != sum(trajectory.kv_tokens for trajectory in running if trajectory is not None):
            raise ProtocolViolation(f"{instance.id} has a wrong count of {instance.kv_tokens} KV tokens")
        if instance.num_moves != num_moving[instance.id]:
            raise ProtocolViolation(
                f"{instance.id}: {instance.num_moves} moves counted, {num_moving[instance.id]} found"
            )

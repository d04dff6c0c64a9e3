"""Invariants across all collections of the coordinator's state, which hold after every event. Pure."""

from __future__ import annotations

from collections import Counter

from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger_entries import EntryState
from staleflow.stores.trajectory import InstanceId, is_evaluation


def validate(state: CoordinatorState) -> None:
    """Check all invariants. O(live). Raises `ProtocolViolation` for the first that is broken."""
    state.ledger.validate()
    state.fleet.validate()
    members = {member for entry in state.ledger.entries.values() for member in entry.members}
    if state.evaluation is not None:
        members |= state.evaluation.members
    if members != state.live.keys():
        raise ProtocolViolation(f"ledger and coordinator differ about {sorted(members ^ state.live.keys())[:10]}")
    _validate_evaluation(state)
    for live in state.live.values():
        _validate_trajectory(state, live)
    _validate_instances(state)
    unreserved = {g for g, entry in state.ledger.entries.items() if entry.state is EntryState.QUEUED}
    if unreserved != state.unreserved_groups:
        raise ProtocolViolation(f"unreserved groups differ: {sorted(unreserved ^ state.unreserved_groups)[:10]}")
    expected = {t.id: (level := state.level(t.group), level) for t in state.live.values() if t.phase is Phase.QUEUED}
    queued = {live.id: (level, live.level) for level, live in state.queue}
    if expected != queued or len(state.queue) != len(queued):
        raise ProtocolViolation(f"queued and waiting differ: {sorted(expected.items() ^ queued.items())[:10]}")
    if state.trainer_turn and (awake := [instance.instance for instance in state.fleet if not instance.asleep]):
        raise ProtocolViolation(f"{awake} are awake in the trainer's turn")
    if state.training != (state.ledger.next_step > state.ledger.version):
        raise ProtocolViolation(
            f"next step {state.ledger.next_step}, published {state.ledger.version}, but training is {state.training}"
        )


def _validate_trajectory(state: CoordinatorState, live: LiveTrajectory) -> None:
    """Check that a trajectory agrees with its instance and, unless it is an evaluation's, with its group's entry in the
    ledger."""
    instance = state.fleet.get(live.instance)
    if (live.phase is Phase.RUNNING) != (instance is not None and live.id in instance.trajectories):
        raise ProtocolViolation(f"{live.id} is {live.phase.value} but not listed as running on {live.instance}")
    if (live.phase is Phase.RUNNING) != (live.instance is not None):
        raise ProtocolViolation(f"{live.id} is {live.phase.value} on {live.instance}")
    if not live.is_eval:
        entry = state.ledger.entries[live.group]
        if (live.phase is Phase.DONE) != (live.id in entry.completed):
            raise ProtocolViolation(f"{live.id} is {live.phase.value}, its group has {entry.completed} completed")
    routed = live.route_number > 0 if live.is_eval else live.id in state.ledger.entries[live.group].routed
    if (live.v_traj >= 0) != routed or routed != (live.route_number > 0):
        raise ProtocolViolation(f"{live.id} was routed {live.route_number} times, with version {live.v_traj}")
    if not 0 <= live.delivered_tokens <= live.tokens:
        raise ProtocolViolation(f"{live.id} has {live.tokens} tokens, {live.delivered_tokens} of them delivered")
    if live.truncating and live.phase is not Phase.RUNNING:
        raise ProtocolViolation(f"{live.id} is being truncated but {live.phase.value}")
    if live.target is not None and live.phase not in {Phase.RUNNING, Phase.QUEUED}:
        raise ProtocolViolation(f"{live.id} is moving to {live.target} but {live.phase.value}")


def _validate_evaluation(state: CoordinatorState) -> None:
    """Check that all of an evaluation is sampled under its version, on pinned instances that serve this version."""
    evaluation = state.evaluation
    members = {live.id for live in state.live.values() if live.is_eval}
    if members != (set() if evaluation is None else evaluation.members):
        raise ProtocolViolation(
            f"the live evaluation trajectories {sorted(members)[:10]} are not those of the evaluation"
        )
    for instance in state.fleet:
        if instance.num_eval_running != sum(is_evaluation(member) for member in instance.trajectories):
            raise ProtocolViolation(
                f"{instance.instance} is taken to run {instance.num_eval_running} for an evaluation"
            )
    if evaluation is None:
        return
    sampling = {Phase.QUEUED, Phase.RUNNING, Phase.IN_ENVIRONMENT}
    if evaluation.to_sample != sum(state.live[member].phase in sampling for member in members):
        raise ProtocolViolation(
            f"{evaluation.to_sample} are taken to be sampled yet for evaluation {evaluation.number}"
        )
    if missing := [name for name in evaluation.pinned if state.fleet.get(name) is None]:
        raise ProtocolViolation(f"evaluation {evaluation.number} has pinned instances that are gone: {missing}")
    for member in members:
        live = state.live[member]
        target = state.fleet.get(live.instance)
        if live.v_traj not in {-1, evaluation.evaluated_version}:
            raise ProtocolViolation(
                f"{live.id} is of version {live.v_traj}, version {evaluation.evaluated_version} is evaluated"
            )
        if target is not None and (
            target.version != evaluation.evaluated_version or target.instance not in evaluation.pinned
        ):
            raise ProtocolViolation(
                f"{live.id} is sampled on {target.instance} at version {target.version}, for an evaluation of "
                f"version {evaluation.evaluated_version}"
            )


def _validate_instances(state: CoordinatorState) -> None:
    """Check that the counts of each instance match the trajectories that it runs or that are moving to it."""
    moving: Counter[InstanceId] = Counter()
    for live in state.live.values():
        if live.target is not None:
            moving.update([live.target] if live.instance is None else [live.target, live.instance])
    for instance in state.fleet:
        running = [state.live.get(member) for member in instance.trajectories]
        if any(live is None or live.instance != instance.instance for live in running):
            raise ProtocolViolation(f"{instance.instance} lists trajectories that run elsewhere or have ended")
        if instance.kv_tokens != sum(live.kv_tokens for live in running if live is not None):
            raise ProtocolViolation(f"{instance.instance} is taken to hold {instance.kv_tokens} KV tokens")
        if instance.in_transit != moving[instance.instance]:
            raise ProtocolViolation(
                f"{instance.instance}: {instance.in_transit} in transit, {moving[instance.instance]} move"
            )

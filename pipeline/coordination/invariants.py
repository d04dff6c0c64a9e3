"""The invariants that hold across all collections of the coordinator's state after every event. Pure."""

from __future__ import annotations

from collections import Counter

from pipeline.coordination.phases import Phase
from pipeline.coordination.state import CoordinatorState
from pipeline.coordination.trajectories import LiveTrajectory
from stores.errors import ProtocolViolation
from stores.ledger_entries import EntryState
from stores.trajectory import InstanceId


def validate(state: CoordinatorState) -> None:
    """State every invariant across collections. O(live); raises `ProtocolViolation` on the first broken."""
    state.ledger.validate()
    state.fleet.validate()
    held = {member for entry in state.ledger.entries.values() for member in entry.members}
    if held != state.live.keys():
        raise ProtocolViolation(f"ledger and coordinator differ about {sorted(held ^ state.live.keys())[:10]}")
    for live in state.live.values():
        _validate_trajectory(state, live)
    _validate_instances(state)
    fresh = {g for g, entry in state.ledger.entries.items() if entry.state is EntryState.QUEUED}
    if fresh != state.fresh_groups:
        raise ProtocolViolation(f"groups without a promise differ: {sorted(fresh ^ state.fresh_groups)[:10]}")
    due = {t.id: (level := state.level(t.group), level) for t in state.live.values() if t.phase is Phase.QUEUED}
    queued = {live.id: (level, live.level) for level, live in state.queue}
    if due != queued or len(state.queue) != len(queued):
        raise ProtocolViolation(f"queued and waiting differ: {sorted(due.items() ^ queued.items())[:10]}")
    if state.training != (state.ledger.next_step > state.ledger.version):
        raise ProtocolViolation(
            f"next step {state.ledger.next_step}, published {state.ledger.version}, but training is {state.training}"
        )


def _validate_trajectory(state: CoordinatorState, live: LiveTrajectory) -> None:
    """A trajectory agrees with its instance and with its group's entry in the ledger."""
    instance, entry = state.fleet.get(live.instance), state.ledger.entries[live.group]
    if (live.phase is Phase.RUNNING) != (instance is not None and live.id in instance.trajectories):
        raise ProtocolViolation(f"{live.id} is {live.phase.value} but not listed so on {live.instance}")
    if (live.phase is Phase.RUNNING) != (live.instance is not None):
        raise ProtocolViolation(f"{live.id} is {live.phase.value} on {live.instance}")
    if (live.phase is Phase.DONE) != (live.id in entry.completed):
        raise ProtocolViolation(f"{live.id} is {live.phase.value}, its group has {entry.completed} completed")
    if (live.v_traj >= 0) != (live.id in entry.routed) or (live.v_traj >= 0) != (live.epoch > 0):
        raise ProtocolViolation(f"{live.id} was routed {live.epoch} times, with version {live.v_traj}")
    if not 0 <= live.safe_tokens <= live.tokens:
        raise ProtocolViolation(f"{live.id} has {live.tokens} tokens, {live.safe_tokens} of them safe")
    if live.cut and live.phase is not Phase.RUNNING:
        raise ProtocolViolation(f"{live.id} is to be cut off but {live.phase.value}")
    if live.target is not None and live.phase not in {Phase.RUNNING, Phase.QUEUED}:
        raise ProtocolViolation(f"{live.id} is to continue at {live.target} but {live.phase.value}")


def _validate_instances(state: CoordinatorState) -> None:
    """The numbers of an instance are those of the trajectories it runs, or that are on their way."""
    moving: Counter[InstanceId] = Counter()
    for live in state.live.values():
        if live.target is not None:
            moving.update([live.target] if live.instance is None else [live.target, live.instance])
    for instance in state.fleet:
        listed = [state.live.get(member) for member in instance.trajectories]
        if any(live is None or live.instance != instance.instance for live in listed):
            raise ProtocolViolation(f"{instance.instance} lists trajectories that run elsewhere or have ended")
        if instance.kv_tokens != sum(live.kv_tokens for live in listed if live is not None):
            raise ProtocolViolation(f"{instance.instance} is taken to hold {instance.kv_tokens} KV tokens")
        if instance.in_transit != moving[instance.instance]:
            raise ProtocolViolation(
                f"{instance.instance}: {instance.in_transit} in transit, {moving[instance.instance]} move"
            )

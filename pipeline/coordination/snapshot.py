"""Immutable views of the coordinator at a moment, for display. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.stores.staleness.ledger_groups import BufferView
from staleflow.stores.trajectory import AbortReason, InstanceId, outcome_key


@dataclass(slots=True)
class InstanceView:
    """The coordinator's view of one rollout instance. Not frozen, which would take three times as long for
    thousands."""

    instance: InstanceId
    version: int
    pulling: bool
    num_running: int
    max_running: int
    kv_tokens: int
    kv_capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at a moment. Staleness has two parts with different remedies: that of trajectories in sampling, which
    slow instances increase, and that of finished ones, which wait for the trainer."""

    version: int
    next_step: int
    training: bool
    num_queued: int
    num_running: int
    num_in_environment: int
    num_scoring: int
    num_started: int
    num_live: int
    ended: dict[str, int]
    """Trajectories by "fate" or "fate:reason"."""
    staleness_in_flight: float
    """Mean of published version - v_traj over groups being sampled or scored; 0 if none."""
    staleness_in_queue: float
    """The same over finished groups that wait for the trainer."""
    buffers: tuple[BufferView, ...]
    instances: tuple[InstanceView, ...]
    refusals: dict[str, int]
    """How often routing declined, by reason."""
    evaluated_version: int = -1
    """The version that is being evaluated; -1 if none is, or none is chosen yet."""
    num_eval_in_flight: int = 0
    """Its trajectories in flight. Other numbers do not count them, except those of instances."""


def take_snapshot(state: CoordinatorState, refusals: dict[str, int]) -> Snapshot:
    """Build a snapshot of the current state. O(instances + evaluation trajectories)."""
    ledger, phases = state.ledger, state.num_in_phase.copy()
    for member in () if state.evaluation is None else state.evaluation.members:
        phases[state.live_trajectories[member].phase] -= 1
    return Snapshot(
        version=ledger.version,
        next_step=ledger.next_step,
        training=state.is_training,
        num_queued=phases[Phase.QUEUED],
        num_running=phases[Phase.RUNNING],
        num_in_environment=phases[Phase.IN_ENVIRONMENT],
        num_scoring=phases[Phase.SCORING],
        num_started=ledger.num_started,
        num_live=ledger.num_live,
        ended={
            fate.value if reason is AbortReason.NONE else outcome_key(fate, reason): n
            for (fate, reason), n in ledger.num_ended.items()
        },
        staleness_in_flight=ledger.mean_lag(finished=False),
        staleness_in_queue=ledger.mean_lag(finished=True),
        buffers=ledger.buffer_views(),
        instances=tuple(
            InstanceView(i.id, i.version, i.is_pulling, i.num_running, i.max_running, i.kv_tokens, i.kv_capacity)
            for i in state.fleet
        ),
        refusals=dict(refusals),
        evaluated_version=-1 if state.evaluation is None else state.evaluation.evaluated_version,
        num_eval_in_flight=0 if state.evaluation is None else len(state.evaluation.members),
    )


def explain_waiting(state: CoordinatorState, limit: int) -> str:
    """Explain in one paragraph what the next step waits for, for a run that makes no progress."""
    ledger = state.ledger
    if state.pending_sleeps:
        return f"step {ledger.next_step - 1} waits until {', '.join(sorted(state.pending_sleeps))} sleep"
    if state.is_training:
        return f"step {ledger.next_step - 1} is training"
    if state.evaluation is not None and ledger.version >= ledger.num_steps:
        evaluation = state.evaluation
        return f"the evaluation of version {evaluation.evaluated_version} waits for {len(evaluation.members)} responses"
    head = (
        f"step {ledger.next_step} waits for {ledger.groups_per_step - ledger.num_occupied} more of its "
        f"{ledger.groups_per_step} groups; {ledger.num_reserved} are being sampled, "
        f"{len(state.unreserved_groups)} queued, {len(state.fleet)} instances"
    )
    oldest = sorted(
        (t for t in state.live_trajectories.values() if t.phase is not Phase.DONE and not t.is_evaluation),
        key=lambda t: (state.queue_level(t.group), t.phase_since_s),
    )[:limit]
    lines = [
        f"group {t.group}, trajectory {t.id}: {t.phase.value} for {state.now - t.phase_since_s:.1f} s"
        + (f" on {t.instance}" if t.instance is not None else "")
        + f", {t.tokens} tokens, version {t.v_traj}"
        + (f", waits: {t.refusal}" if t.refusal and t.phase is Phase.QUEUED else "")
        for t in oldest
    ]
    return "\n  ".join([head, *lines])

"""The phase table: listed transitions change the phase of a trajectory; all others raise and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from staleflow.pipeline.coordination.invariants import validate
from staleflow.pipeline.coordination.phases import NEXT_PHASE, Phase, Transition, next_phase
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, GroupId, InstanceId, PolicyVersion, TrajectoryId
from tests.coordination.state_dumps import dump_state

A, B = InstanceId("a"), InstanceId("b")
PAIRS = tuple(itertools.product(Phase, Transition))
LAWFUL = 17
"""Pairs of the table. A new transition must be added here too."""

VERBS: dict[Transition, Callable[[CoordinatorState, LiveTrajectory], object]] = {
    Transition.ROUTED: lambda state, live: state.route(live, state.fleet[0]),
    Transition.SAMPLED: lambda state, live: state.finish_sampling(live, 7),
    Transition.TRUNCATED: lambda state, live: state.finish_sampling(live, 7, truncated=True),
    Transition.INTERRUPTED: lambda state, live: state.requeue_interrupted(live, 7),
    Transition.FAILED: lambda state, live: state.requeue_failed(live, Transition.FAILED),
    Transition.INSTANCE_LOST: lambda state, live: state.requeue_failed(live, Transition.INSTANCE_LOST),
    Transition.TURN_SAMPLED: lambda state, live: state.finish_turn(live, 7),
    Transition.ENVIRONMENT_STEPPED: lambda state, live: state.add_observation(live, 9),
    Transition.RESTARTED: lambda state, live: state.restart_episode(live, is_lost=False),
    Transition.SCORED: lambda state, live: state.record_reward(live, 1.0),
}
"""Methods that move one trajectory. OCCUPIED and DISCARDED follow from the ledger's answer for its group."""


WAYS = {
    Phase.RUNNING: (Transition.ROUTED,),
    Phase.IN_ENVIRONMENT: (Transition.ROUTED, Transition.TURN_SAMPLED),
    Phase.SCORING: (Transition.ROUTED, Transition.SAMPLED),
    Phase.DONE: (Transition.ROUTED, Transition.SAMPLED, Transition.SCORED),
}
"""How a trajectory gets into each phase except the first one and ENDED."""


def state_with(phase: Phase) -> tuple[CoordinatorState, LiveTrajectory]:
    """Return a state of two groups of two on two instances; the first trajectory is in `phase`."""
    state = CoordinatorState(StalenessLedger(eta=1, groups_per_step=2, group_size=2))
    state.now = 1.0
    for name in (A, B):
        state.add_instance(name, PolicyVersion(0), 1000, 8)
    state.add_groups([NewGroup(group=GroupId(g), prompt_tokens=10) for g in (0, 1)])
    live = state.live_trajectories[TrajectoryId(0)]
    for at, transition in enumerate(WAYS.get(phase, ())):
        state.now = 2.0 + at
        VERBS[transition](state, live)
    if phase is Phase.ENDED:
        state.abort(live.group, AbortReason.ENGINE_FAILED, live.id)
    assert live.phase is phase
    validate(state)
    return state, live


@pytest.mark.parametrize(("phase", "transition"), PAIRS)
def test_listed_transitions_change_the_phase_and_all_others_raise(phase: Phase, transition: Transition) -> None:
    if (phase, transition) in NEXT_PHASE:
        assert next_phase(phase, transition) is NEXT_PHASE[phase, transition] is not phase
    else:
        with pytest.raises(ProtocolViolation, match=f"is {phase.value} cannot be {transition.value}"):
            next_phase(phase, transition)


def test_the_table_matches_the_docstring() -> None:
    assert len(NEXT_PHASE) == LAWFUL
    assert not [pair for pair in NEXT_PHASE if pair[0] is Phase.ENDED]
    assert {p for p, t in NEXT_PHASE if t is Transition.DISCARDED} == set(Phase) - {Phase.ENDED}
    assert set(NEXT_PHASE.values()) == set(Phase)
    assert {t for _, t in NEXT_PHASE} == set(Transition)


@pytest.mark.parametrize(("phase", "transition"), [pair for pair in PAIRS if pair[1] in VERBS])
def test_a_rejected_transition_changes_nothing(phase: Phase, transition: Transition) -> None:
    state, live = state_with(phase)
    before = dump_state(state, live)
    if (phase, transition) in NEXT_PHASE:
        VERBS[transition](state, live)
        assert live.phase is NEXT_PHASE[phase, transition]
        assert dump_state(state, live) != before
    else:
        with pytest.raises(ProtocolViolation):
            VERBS[transition](state, live)
        assert dump_state(state, live) == before
    validate(state)


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.RUNNING])
def test_only_running_trajectories_can_be_moved(phase: Phase) -> None:
    state, live = state_with(phase)
    for target in (state.fleet[1], None):
        before = dump_state(state, live)
        with pytest.raises(ProtocolViolation, match="is moved while it is"):
            state.start_move(live, target)
        assert dump_state(state, live) == before


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.ENDED])
def test_a_stop_ends_every_phase(phase: Phase) -> None:
    state, live = state_with(phase)
    ended = state.abort_all(AbortReason.RUN_ENDED)
    assert len(ended) == 4
    assert {item.ending.trajectory: item.running_instance for item in ended}[live.id] == (
        A if phase is Phase.RUNNING else None
    )
    assert (live.phase, live.instance, len(state.live_trajectories)) == (Phase.ENDED, None, 0)
    validate(state)


def test_a_stop_counts_no_trajectory_twice() -> None:
    state, live = state_with(Phase.DONE)
    sibling = state.live_trajectories[TrajectoryId(1)]
    for transition in WAYS[Phase.DONE]:
        VERBS[transition](state, sibling)
    state.occupy(live.group)
    state.abort_all(AbortReason.RUN_ENDED)
    assert not any(state.num_in_phase.values())
    validate(state)

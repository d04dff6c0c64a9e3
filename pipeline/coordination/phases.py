"""The phases of a trajectory in flight, and what moves it from one to the next. Pure.

    QUEUED --ROUTED--> RUNNING --SAMPLED, CUT_OFF--> SCORING --SCORED--> DONE --CONSUMED--> ENDED
     ^  ^                 | |                                              ^
     |  +-----------------+ |  INTERRUPTED, FAILED, INSTANCE_LOST          |
     |                      +--TURN_SAMPLED--> ACTING --SCORED-------------+
     +-------------------------------------------+  ANSWERED, RESTARTED

A response that an environment answers is ACTING after each turn, the last one included; others are SCORING once.
GIVEN_UP leads to ENDED from every phase before it. `NEXT_PHASE` is the whole rule: a pair that is not in it is a bug,
and is refused. A late answer is no bug: the coordinator recognises it by its route number and ignores it before asking
here.
"""

from __future__ import annotations

from enum import Enum

from staleflow.stores.errors import ProtocolViolation


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    IN_ENVIRONMENT = "acting"
    """Its environment takes the step that its latest turn asks for."""
    SCORING = "scoring"
    DONE = "done"
    """Scored; waits for the rest of its group, then for the trainer."""
    ENDED = "ended"
    """No longer live."""

    __hash__ = object.__hash__  # members are singletons; the hash of Enum is a Python function, and slow


class Transition(Enum):
    """What moves a trajectory to its next phase."""

    ROUTED = "routed"
    SAMPLED = "sampled"
    TRUNCATED = "cut off"
    """Interrupted, to be scored with the tokens it has."""
    TURN_SAMPLED = "sampled for a turn"
    ENVIRONMENT_STEPPED = "answered"
    """Its environment has answered; the next turn follows."""
    RESTARTED = "restarted"
    """Its environment has failed; it begins again with its prompt."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    INSTANCE_LOST = "instance lost"
    SCORED = "scored"
    CONSUMED = "consumed"
    GIVEN_UP = "given up"
    """Aborted or filtered."""

    __hash__ = object.__hash__


NEXT_PHASE: dict[tuple[Phase, Transition], Phase] = {
    (Phase.QUEUED, Transition.ROUTED): Phase.RUNNING,
    (Phase.RUNNING, Transition.SAMPLED): Phase.SCORING,
    (Phase.RUNNING, Transition.TRUNCATED): Phase.SCORING,
    (Phase.RUNNING, Transition.TURN_SAMPLED): Phase.IN_ENVIRONMENT,
    (Phase.IN_ENVIRONMENT, Transition.ENVIRONMENT_STEPPED): Phase.QUEUED,
    (Phase.IN_ENVIRONMENT, Transition.RESTARTED): Phase.QUEUED,
    (Phase.IN_ENVIRONMENT, Transition.SCORED): Phase.DONE,
    (Phase.RUNNING, Transition.INTERRUPTED): Phase.QUEUED,
    (Phase.RUNNING, Transition.FAILED): Phase.QUEUED,
    (Phase.RUNNING, Transition.INSTANCE_LOST): Phase.QUEUED,
    (Phase.SCORING, Transition.SCORED): Phase.DONE,
    (Phase.DONE, Transition.CONSUMED): Phase.ENDED,
    (Phase.QUEUED, Transition.GIVEN_UP): Phase.ENDED,
    (Phase.RUNNING, Transition.GIVEN_UP): Phase.ENDED,
    (Phase.IN_ENVIRONMENT, Transition.GIVEN_UP): Phase.ENDED,
    (Phase.SCORING, Transition.GIVEN_UP): Phase.ENDED,
    (Phase.DONE, Transition.GIVEN_UP): Phase.ENDED,
}


def next_phase(phase: Phase, transition: Transition) -> Phase:
    """The phase that `transition` leads to from `phase`. Raises `ProtocolViolation` if it leads nowhere from there."""
    following = NEXT_PHASE.get((phase, transition))
    if following is None:
        raise ProtocolViolation(f"a trajectory that is {phase.value} cannot be {transition.value}")
    return following

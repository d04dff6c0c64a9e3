"""The phases of a trajectory in flight, and the transitions between them. Pure.

    QUEUED --ROUTED--> RUNNING --SAMPLED, TRUNCATED--> SCORING --SCORED--> DONE --OCCUPIED--> ENDED
     ^  ^                 | |                                                ^
     |  +-----------------+ |  INTERRUPTED, FAILED, INSTANCE_LOST            |
     |                      +--TURN_SAMPLED--> IN_ENVIRONMENT --SCORED-------+
     +-------------------------------------------+  ENVIRONMENT_STEPPED, RESTARTED

With an environment a trajectory is IN_ENVIRONMENT after each turn, the last one included; without, it is SCORING once.
DISCARDED leads to ENDED from every other phase. `NEXT_PHASE` has all transitions; any other is a bug, and raises. Late
events are not bugs: the coordinator recognizes them by their route number and ignores them before it uses this table.
"""

from __future__ import annotations

from enum import Enum

from staleflow.stores.errors import ProtocolViolation


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    IN_ENVIRONMENT = "acting"
    """Its environment executes a step with its latest turn."""
    SCORING = "scoring"
    DONE = "done"
    """Scored; waits for the rest of its group."""
    ENDED = "ended"
    """No longer live, or of a finished group, which only the ledger keeps until it is trained on."""

    __hash__ = object.__hash__  # members are singletons; the hash of Enum is a Python function, and slow


class Transition(Enum):
    """A change that moves a trajectory to its next phase."""

    ROUTED = "routed"
    SAMPLED = "sampled"
    TRUNCATED = "truncated"
    """Interrupted, to be scored with the tokens it has."""
    TURN_SAMPLED = "sampled for a turn"
    ENVIRONMENT_STEPPED = "answered by its environment"
    """Its environment has returned an observation; the next turn follows."""
    RESTARTED = "restarted"
    """Its environment has failed; it restarts from its prompt."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    INSTANCE_LOST = "instance lost"
    SCORED = "scored"
    OCCUPIED = "occupied"
    """Its group is complete and available to the trainer."""
    DISCARDED = "discarded"
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
    (Phase.DONE, Transition.OCCUPIED): Phase.ENDED,
    (Phase.QUEUED, Transition.DISCARDED): Phase.ENDED,
    (Phase.RUNNING, Transition.DISCARDED): Phase.ENDED,
    (Phase.IN_ENVIRONMENT, Transition.DISCARDED): Phase.ENDED,
    (Phase.SCORING, Transition.DISCARDED): Phase.ENDED,
    (Phase.DONE, Transition.DISCARDED): Phase.ENDED,
}


def next_phase(phase: Phase, transition: Transition) -> Phase:
    """Return the phase after a transition from `phase`. Raises ProtocolViolation if there is no such transition."""
    result = NEXT_PHASE.get((phase, transition))
    if result is None:
        raise ProtocolViolation(f"a trajectory that is {phase.value} cannot be {transition.value}")
    return result

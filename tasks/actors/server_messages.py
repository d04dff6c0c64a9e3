"""What the trajectory server and the driver, rollout instances and environment hosts tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import FinishReason, GroupId, PolicyVersion, Trajectory, TrajectoryId
from staleflow.tasks.rendering.task_source import Message, Record
from staleflow.tasks.sources.evaluation_items import EvaluationItem
from staleflow.tasks.sources.reward_process import ScoredResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """A drawn prompt: its group's id and its length in tokens."""

    group: GroupId
    prompt_tokens: int


class EvaluationSampling(NamedTuple):
    """How an evaluation's response is sampled. temperature: None for the engine's own."""

    greedy: bool
    temperature: float | None
    max_new_tokens: int

    @classmethod
    def of(cls, item: EvaluationItem) -> EvaluationSampling:
        """How an item is sampled."""
        return cls(item.greedy, item.of.temperature, item.of.max_new_tokens)


class EvaluatedResponse(NamedTuple):
    """What has become of an item of an evaluation. score: None if it has none. versions: that its tokens were sampled
    under."""

    tokens: int
    versions: tuple[PolicyVersion, ...]
    score: ScoredResponse | None


class Payload(NamedTuple):
    """What a live trajectory consists of so far."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    finish: FinishReason
    """UNFINISHED if sampling goes on after `sampled`; else the turn has ended by itself."""
    in_turn: int
    """How many of the last tokens belong to the present turn."""
    turn_tokens: int = 0
    """Most tokens of the present turn, if its environment has said so; else 0."""
    evaluated: EvaluationSampling | None = None
    """How an evaluation wants it sampled; None for one that is to be trained on."""
    context: tuple[int, ...] | None = None
    """What the present turn is sampled after, with what there is of it; None: after all of the above."""
    stop: StopCriteria = NO_STOP
    """What ends the present turn, if its environment has said so."""


def payload(
    t: Trajectory, turn_tokens: int, evaluated: EvaluationSampling | None, stop: StopCriteria = NO_STOP
) -> Payload:
    """What a trajectory consists of so far."""
    prompt, response = (tuple(part.tolist()) for part in (t.prompt_tokens, t.response_tokens))
    context = tuple(t.context.tolist()) if t.branches else None
    return Payload(prompt, response, t.finish, t.num_in_turn, turn_tokens, evaluated, context, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationItem:
    """What an environment says to the turn that ends a response of so many `tokens`, routed under `epoch`. replayed:
    what it said to the first turns when it took them again."""

    trajectory: TrajectoryId
    tokens: int
    epoch: int
    messages: tuple[Message, ...]
    seconds: float
    replayed: tuple[tuple[Message, ...], ...]


class ScoringItem(NamedTuple):
    """A response to be scored: its text, its length in tokens, and the epoch of its latest routing."""

    trajectory: TrajectoryId
    tokens: int
    epoch: int
    text: str
    record: Record


class RewardItem(NamedTuple):
    """The reward of a response of so many `tokens`, routed under `epoch`."""

    trajectory: TrajectoryId
    tokens: int
    epoch: int
    score: ScoredResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState:
    """What an environment host needs of a trajectory whose turn has ended. task, member, attempt, held_out: which
    episode it is. turns: their texts, the newest last. tokens: of the response so far."""

    task: GroupId
    member: int
    attempt: int
    held_out: bool = False
    record: Record
    turns: tuple[str, ...]
    tokens: int
    full: bool
    """No further turn fits: the episode ends with this one."""
    answered: bool
    """The server has the answer to the newest turn already."""
    restarted: bool
    """The trajectory begins again since then."""
    score: ScoredResponse | None
    """The reward, if the episode has ended already."""


class TurnItem(NamedTuple):
    """The turn, of this text, that ends a response of so many `tokens`, routed under `epoch`."""

    trajectory: TrajectoryId
    tokens: int
    epoch: int
    text: str


class ObservationReceipt(NamedTuple):
    """What has become of an environment's answer. tokens: of the response with it. problem: why it was not taken.
    why: more of that, for people."""

    tokens: int
    problem: Literal["", "full", "differs", "late", "not rendered"] = ""
    """late: the turn is not waiting for it any more."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableWork:
    """What a run that goes on finds. ledger: of the store's last record. groups: what is in flight as of that record,
    without what later versions have sampled; empty for a run of an earlier version, which kept none of it."""

    ledger: LedgerState
    groups: tuple[GroupInFlight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredWork:
    """What a run that goes on has taken up. responses, tokens: those that are kept. again: number of responses that had
    been begun and start again."""

    ledger: LedgerState
    responses: int = 0
    tokens: int = 0
    again: int = 0

"""Messages between the trajectory server and the driver, rollout instances, environment hosts and teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import FloatArray, GroupId, PolicyVersion, TrajectoryId
from staleflow.tasks.rendering.task_source import Message, Record
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.microbatches import Row


class EvaluatedResponse(NamedTuple):
    """The state of an evaluation's response. score: None until it is scored. versions: policy versions of its tokens.
    answer_digest: empty if scoring failed or the response has several turns."""

    num_tokens: int
    versions: tuple[PolicyVersion, ...]
    score: ScoredResponse | None
    answer_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteItem:
    """A Route command as a rollout instance receives it."""

    trajectory: TrajectoryId
    route_number: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationItem:
    """The messages of an environment after the newest turn of a response of `num_tokens` tokens, routed under
    `route_number`. replayed: messages after earlier turns, if the environment was replayed."""

    trajectory: TrajectoryId
    num_tokens: int
    route_number: int
    messages: tuple[Message, ...]
    seconds: float
    replayed: tuple[tuple[Message, ...], ...]


class ScoringItem(NamedTuple):
    """A response to be scored: its text, its length in tokens, and the route number of its latest routing."""

    trajectory: TrajectoryId
    num_tokens: int
    route_number: int
    text: str
    record: Record


class RewardItem(NamedTuple):
    """The reward of a response of `num_tokens` tokens, routed under `route_number`."""

    trajectory: TrajectoryId
    num_tokens: int
    route_number: int
    score: ScoredResponse


class TeacherItem(NamedTuple):
    """A response for a teacher."""

    trajectory: TrajectoryId
    row: Row


class TeacherLogprobs(NamedTuple):
    """[T] logprobs of a response under the reference model, nats; 0 for tokens that were not sampled."""

    trajectory: TrajectoryId
    logprobs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState:
    """The state of an episode whose turn has ended, for its environment host. group, member, attempt, held_out:
    identify the episode. turns: texts of its turns, oldest first. num_tokens: length of the response so far."""

    group: GroupId
    member: int
    attempt: int
    held_out: bool = False
    record: Record
    turns: tuple[str, ...]
    num_tokens: int
    is_full: bool
    """No further turn fits: the episode ends with this one."""
    has_observation: bool
    """The server already has the observation after the newest turn."""
    restarted: bool
    """The trajectory has been restarted since this routing."""
    score: ScoredResponse | None
    """The reward, if the episode has ended already."""

    @property
    def has_outcome(self) -> bool:
        """Whether the server already has the outcome of the newest turn's environment step."""
        return self.has_observation or self.restarted or self.score is not None


class TurnItem(NamedTuple):
    """A request for the newest turn, with this text, of a response of `num_tokens` tokens, routed under
    `route_number`."""

    trajectory: TrajectoryId
    num_tokens: int
    route_number: int
    text: str


class ObservationReceipt(NamedTuple):
    """The server's reply to an observation. num_tokens: length of the response with it. problem: kind of problem for
    which it was refused; empty if it was added. reason: the problem as a text."""

    num_tokens: int
    problem: Literal["", "full", "differs", "late", "not rendered"] = ""
    """late: the turn does not wait for an observation any more."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableWork:
    """In-flight work that a resumed run can recover. ledger: that of the store's last record. groups: groups in flight
    at that record, without tokens of later versions."""

    ledger: LedgerState
    groups: tuple[GroupInFlight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredWork:
    """In-flight work that a resumed run has recovered. num_responses, num_tokens: of trajectories with sampled tokens.
    num_restarted: responses that had tokens and restart from their prompts."""

    ledger: LedgerState
    num_responses: int = 0
    num_tokens: int = 0
    num_restarted: int = 0

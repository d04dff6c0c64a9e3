"""The coordinator's events: frozen, in the past tense, plain numbers and strings only, as stored in a journal."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.in_flight.in_flight_state import GroupInFlight, NewGroup
from staleflow.stores.trajectories.records import SourceState
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """A stored run continues from the version that step - 1 published, with these groups in flight. Must be the first
    event."""

    step: int
    num_ended: tuple[tuple[str, int], ...]
    """Trajectories of the run so far, by "fate:reason"."""
    groups: tuple[GroupInFlight, ...] = ()
    """In an order in which all fit; see `plan_resume`."""
    num_groups: int = 0
    """Groups drawn by the time of `sources`."""
    sources: tuple[SourceState, ...] = ()
    """Of a mixture: the sources' states at the stored run's last commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsArrived:
    """Prompts requested by a `FetchPrompts` have arrived."""

    groups: tuple[NewGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequested:
    """An evaluation of the published version was requested: one response to each of these prompts, whose groups have
    negative numbers and one member each. No other evaluation is running."""

    evaluation: int
    groups: tuple[NewGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """A rollout instance is ready to serve `version`, or in the layout "turns" to pull it."""

    instance: InstanceId
    version: PolicyVersion
    kv_capacity: int
    """KV tokens it can hold."""
    max_running: int
    """Trajectories it decodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost:
    """A rollout instance is lost, with the undelivered tokens of its running segments."""

    instance: InstanceId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLeaving:
    """A rollout instance should be drained. `InstanceLost` follows when it runs nothing any more."""

    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Decode steps of an instance since its previous report.

    Args:
        running: Number of requests in its current batch.
        kv_tokens: Tokens in the contexts of these requests and of those that wait for room in the batch.
        seconds: Time in which it had work, in seconds of the cost model.
        drafts: Number of times that a request's step verified draft tokens.
    """

    running: int
    kv_tokens: int
    seconds: float
    tokens: int
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReported:
    """Progress of one instance. May be older than the commands already sent to it."""

    instance: InstanceId
    progress: tuple[tuple[TrajectoryId, int], ...]
    """(trajectory, tokens sampled so far, all segments counted) of what it was running."""
    delivered: tuple[tuple[TrajectoryId, int], ...] = ()
    """(trajectory, tokens) that have come to the trajectory server since the report before; none is taken back."""
    steps: DecodeStats | None = None
    """Of a job that drafts; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySampled:
    """Sampling reached its end; the tokens are with the trajectory server. drafted_tokens, accepted_tokens: draft
    tokens verified and accepted since the trajectory was routed."""

    trajectory: TrajectoryId
    route_number: int
    tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInterrupted:
    """Sampling was interrupted; the tokens so far are with the trajectory server. drafted_tokens, accepted_tokens: as
    in `TrajectorySampled`."""

    trajectory: TrajectoryId
    route_number: int
    tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFailed:
    """The engine could not continue a trajectory."""

    trajectory: TrajectoryId
    route_number: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStepped:
    """The environment has replied to a turn, and another turn follows.

    Args:
        tokens: Length of the response with the observation, which is with the trajectory server.
        seconds: Time in the environment and in waiting for a slot; None if unknown.
    """

    trajectory: TrajectoryId
    route_number: int
    tokens: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailed:
    """The environment has failed. All of the trajectory but its prompt was dropped. lost: whether the episode was lost
    with its host instead, which does not count as a failure."""

    trajectory: TrajectoryId
    route_number: int
    error: str
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryScored:
    """A trajectory has a reward from the reward function or its episode, or `error` says why it has none. seconds: as
    in EnvironmentStepped."""

    trajectory: TrajectoryId
    reward: float
    error: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFinished:
    """An instance has loaded `version`: the one it was to pull, or a newer one if no host had that any more."""

    instance: InstanceId
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSlept:
    """An instance has freed its GPUs for the trainer's step `step`."""

    instance: InstanceId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """Training step `version` - 1 has finished: its weights can be fetched, and the commit of its batch is queued. In
    the layout "turns" the trainer has freed its GPUs."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run must end now; work in flight is aborted."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsContinued:
    """The coordinator continues to pull and to route: an earlier event has had as many pulls or routes as one event
    may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = (
    RunResumed
    | GroupsArrived
    | EvaluationRequested
    | InstanceJoined
    | InstanceLost
    | InstanceLeaving
    | InstanceReported
    | TrajectorySampled
    | TrajectoryInterrupted
    | TrajectoryFailed
    | EnvironmentStepped
    | EnvironmentFailed
    | TrajectoryScored
    | PullFinished
    | InstanceSlept
    | VersionPublished
    | StopRequested
    | DecisionsContinued
    | Tick
)

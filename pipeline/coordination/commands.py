"""The coordinator's commands. Frozen, in the imperative; `cause` names the event that led to one."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPrompts:
    """Take the next prompts from the task source."""

    num_groups: int
    cause: str
    draws: tuple[tuple[int, int], ...] = ()
    """(source, task) of each group; empty: of a run's one source the next tasks in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Sample `trajectory` on `instance`, which must serve `version` or newer when the first token is sampled; if it
    serves several, under the oldest of these."""

    trajectory: TrajectoryId
    route_number: int
    """Times this trajectory was routed: an answer to an earlier routing is ignored."""
    instance: InstanceId
    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Stop sampling and keep the tokens."""

    trajectory: TrajectoryId
    route_number: int
    instance: InstanceId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop sampling; the trajectory has ended."""

    trajectory: TrajectoryId
    route_number: int
    instance: InstanceId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCache:
    """Free what an instance keeps of a trajectory's earlier turns: nothing goes on from them."""

    trajectory: TrajectoryId
    instance: InstanceId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Load the weights of `version`; running trajectories continue under it with the tokens they have, or, where
    versions are served side by side, end under their own."""

    instance: InstanceId
    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Free the GPUs, which the trainer needs for step `step`: drop weights and caches. Nothing runs there any more; the
    next `Pull` wakes the instance."""

    instance: InstanceId
    step: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDraftLength:
    """Draft up to so many tokens for each decode step of a request; 0: none."""

    instance: InstanceId
    length: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Ask a reward worker for the reward of a trajectory."""

    trajectory: TrajectoryId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvironment:
    """Have the environment of a trajectory take the step that its latest turn asks for. cut: the turn was stopped, and
    the episode is to end with it."""

    trajectory: TrajectoryId
    route_number: int
    truncated: bool = False
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEnvironment:
    """Close the environment of a trajectory that has ended before its episode did; a step under way is cancelled."""

    trajectory: TrajectoryId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Run training step `step` on these trajectories, a group's members side by side."""

    step: int
    trajectories: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    """v_traj, one per trajectory."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Record that these trajectories ended without being trained on, and how."""

    endings: tuple[Ending, ...]
    versions: tuple[PolicyVersion, ...]
    """v_traj, one per trajectory; -1 if it was never routed."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvaluation:
    """Sum up evaluation `evaluation`, all of whose responses were sampled under `version` alone. unanswered: those that
    no engine or environment could finish. abandoned: it ended before it was complete, as no instance serves that
    version any more; what it has is no result."""

    evaluation: int
    version: PolicyVersion
    failed: tuple[TrajectoryId, ...] = ()
    abandoned: bool = False
    cause: str


Command = (
    FetchPrompts
    | Route
    | Interrupt
    | Abort
    | ReleaseCache
    | Pull
    | Sleep
    | SetDraftLength
    | Score
    | StepEnvironment
    | CloseEnvironment
    | Train
    | Discard
    | FinishEvaluation
)

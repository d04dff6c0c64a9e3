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
    """Sample `trajectory` on `instance`, under the oldest version that it serves and that is `version` or newer."""

    trajectory: TrajectoryId
    route_number: int
    """Number of times that this trajectory was routed; results of an earlier routing are ignored."""
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
    """Release the KV cache retained for a trajectory; no later turn uses it."""

    trajectory: TrajectoryId
    instance: InstanceId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Load the weights of `version`. Running trajectories continue under it, or, where versions are served side by
    side, finish under their own."""

    instance: InstanceId
    version: PolicyVersion
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Free the GPUs for the trainer's step `step`: drop weights and caches. No request runs there; the next `Pull`
    wakes the instance."""

    instance: InstanceId
    step: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDraftLength:
    """Draft up to `length` tokens per decode step of a request; 0 disables drafting."""

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
    """Step the environment with the latest turn of a trajectory. truncated: the turn was truncated, and ends the
    episode."""

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
    """Run training step `step` on these trajectories; members of a group are adjacent."""

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
    """Finish evaluation number `evaluation`, all of whose responses were sampled under `version`.

    failed: trajectories that no engine or environment could finish. abandoned: no instance serves the version any more;
    the evaluation is incomplete and has no result.
    """

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

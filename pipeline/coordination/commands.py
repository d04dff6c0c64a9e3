"""The coordinator's commands: frozen, in the imperative."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPrompts:
    """Fetch the next prompts from the task source."""

    num_groups: int
    draws: tuple[tuple[int, int], ...] = ()
    """(source, task) of each group; empty: the next tasks in order of the run's only source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Sample `trajectory` on `instance`, under the oldest version that the instance serves and that is at least
    `version`."""

    trajectory: TrajectoryId
    route_number: int
    """Number of times that this trajectory was routed; results of an earlier routing are ignored."""
    instance: InstanceId
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Stop sampling and keep the tokens."""

    trajectory: TrajectoryId
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop sampling; the trajectory has ended."""

    trajectory: TrajectoryId
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCache:
    """Drop the cached context of a trajectory, which has no further turn on the instance."""

    trajectory: TrajectoryId
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Load the weights of `version`. Running trajectories continue under it, or, if versions are served side by side,
    end under their own."""

    instance: InstanceId
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Free the GPUs for the trainer's step `step`: drop weights and caches. The instance runs no request; the next
    `Pull` wakes it."""

    instance: InstanceId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Ask a reward worker for the reward of a trajectory."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvironment:
    """Step the environment with the latest turn of a trajectory. truncated: the turn was truncated, and ends the
    episode."""

    trajectory: TrajectoryId
    route_number: int
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEnvironment:
    """Close the environment of a trajectory that ended before its episode. A running step is cancelled."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Run training step `step` on these trajectories; members of a group are adjacent, in the order of their ids."""

    step: int
    trajectories: tuple[TrajectoryId, ...]
    versions: tuple[PolicyVersion, ...]
    """v_traj, one per trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Record that these trajectories ended without being trained on, and why."""

    endings: tuple[Ending, ...]
    versions: tuple[PolicyVersion, ...]
    """v_traj, one per trajectory; -1 if it was never routed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvaluation:
    """Finish evaluation number `evaluation`, all of whose responses were sampled under `version`.

    failed: trajectories that no engine or environment could finish. abandoned: whether the evaluation has no result,
    because no instance serves the version any more.
    """

    evaluation: int
    version: PolicyVersion
    failed: tuple[TrajectoryId, ...] = ()
    abandoned: bool = False


InstanceCommand = Route | Interrupt | Abort | ReleaseCache | Pull | Sleep
"""A command that is sent to a rollout instance."""
Command = (
    InstanceCommand | FetchPrompts | Score | StepEnvironment | CloseEnvironment | Train | Discard | FinishEvaluation
)

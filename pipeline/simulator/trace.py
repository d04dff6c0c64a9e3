"""The record of a simulated run: times and counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from staleflow.pipeline.profiling.step_times import StepTimes
from staleflow.tasks.emulation.batch_simulator import WorkTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One training step."""

    step: int
    ready_s: float
    finished_s: float
    tokens: int
    """Sampled tokens of its batch."""
    prefilled: int
    """Least number of tokens its batch had to prefill: prompts and tool answers."""
    context_tokens: float
    """Sum over its sampled tokens of the KV tokens in context when each was sampled."""
    longest_tokens: int
    longest_s: float
    """Seconds its longest response takes on an instance of its own, tool calls included."""
    staleness: dict[int, int]
    """Number of trajectories by v_train - v_traj."""


@dataclass(slots=True)
class InstanceTrace:
    """One instance."""

    name: str
    joined_s: float
    lost_s: float | None = None
    work: WorkTotals = field(default_factory=WorkTotals)
    max_kept_tokens: int = 0
    """Most KV tokens held for turns to come, at any tick."""


@dataclass(slots=True)
class Trace:
    """The record of one simulated run. commands: counts by kind."""

    steps: list[TrainedStep] = field(default_factory=list)
    instances: list[InstanceTrace] = field(default_factory=list)
    commands: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Number of trajectories by fate and reason, over the whole run."""
    refusals: dict[str, int] = field(default_factory=dict)
    losses: int = 0
    finished_s: float = 0.0
    evaluations: list[tuple[int, float, bool]] = field(default_factory=list)
    """(version, second of its end, whether it was abandoned)."""
    evaluated_tokens: int = 0
    """Tokens sampled for evaluations."""
    step_times: list[StepTimes] = field(default_factory=list)
    """Where the time of each step went."""

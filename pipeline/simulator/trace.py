"""What a simulated run leaves behind: seconds and counts, as they happened. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.engines.decoding import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One training step."""

    step: int
    ready_s: float
    finished_s: float
    tokens: int
    """Sampled tokens of its batch."""
    prefilled: int
    """Tokens its batch had to prefill at least: prompts and tools' answers."""
    context_tokens: float
    """Sum over its sampled tokens of the KV tokens each was sampled with."""
    longest_tokens: int
    longest_s: float
    """Seconds its longest response takes on an instance of its own, tools counted."""
    staleness: dict[int, int]
    """Trajectories by v_train - v_traj."""


@dataclass(slots=True)
class InstanceTrace:
    """One instance. loads: (seconds, trajectories decoding) at every tick; pulls: (ordered, loaded) seconds."""

    name: str
    joined_s: float
    lost_s: float | None = None
    loads: list[tuple[float, int]] = field(default_factory=list)
    pulls: list[tuple[float, float]] = field(default_factory=list)
    work: Work = field(default_factory=Work)


@dataclass(slots=True)
class Trace:
    """One simulated run. commands: how many of each kind. buffers: (seconds, groups reserved and finished, by step)."""

    steps: list[TrainedStep] = field(default_factory=list)
    instances: list[InstanceTrace] = field(default_factory=list)
    buffers: list[tuple[float, dict[int, int], dict[int, int]]] = field(default_factory=list)
    commands: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Trajectories by fate and reason, over the whole run."""
    wasted_tokens: int = 0
    """Sampled and never trained on."""
    refusals: dict[str, int] = field(default_factory=dict)
    losses: int = 0
    finished_s: float = 0.0

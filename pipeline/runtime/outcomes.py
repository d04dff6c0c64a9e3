"""What a run leaves behind besides its store."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.coordination.snapshot import Snapshot
from pipeline.profiling.fit import Fit
from pipeline.runtime.evaluation import (
    Evaluation,
)


@dataclass(slots=True)
class Outcomes:
    """What a run leaves behind besides its store."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds, by what was going on."""
    snapshot: Snapshot | None = None
    stopped: str = ""
    """Why the run ended early; empty if it did all its steps."""
    commands: dict[str, int] = field(default_factory=dict)
    """How many of each kind the coordinator gave."""
    cost_ratio: float | None = None
    """Measured decode steps over what the cost model says, median; None if too few were seen."""
    cost_drifted: bool = False
    """Whether that is further from one than rollout.cost.tolerance allows."""
    cost_refit: Fit | None = None
    """The cost model that this run's own decode steps ask for."""
    losses: list[str] = field(default_factory=list)
    """Actors that were lost and replaced."""
    alarms: list[str] = field(default_factory=list)
    """Instances whose logprobs drifted from the trainer's."""
    notes: list[str] = field(default_factory=list)
    """What has to be known to read its numbers: prompts that were kept apart, what changed since the run began."""

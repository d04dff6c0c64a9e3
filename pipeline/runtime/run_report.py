"""Outcomes of a run that are not in its store."""

from __future__ import annotations

from dataclasses import dataclass, field

from staleflow.pipeline.coordination.mixture import SourceCounts
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.profiling.diagnosis import Diagnosis
from staleflow.pipeline.profiling.run_profile import Profile
from staleflow.pipeline.runtime.environment_hosts import HostView
from staleflow.pipeline.runtime.evaluation_results import Evaluation


@dataclass(slots=True)
class RunReport:
    """Outcomes of a run that are not in its store."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by activity."""
    snapshot: Snapshot | None = None
    stopped: str = ""
    """Why the run ended early; empty if it did all its steps."""
    commands: dict[str, int] = field(default_factory=dict)
    """Number of the coordinator's commands, by kind."""
    bottlenecks: dict[int, str] = field(default_factory=dict)
    """What limited each step and those just before it, in a few words."""
    diagnosis: Diagnosis | None = None
    """What limited the run; None if no step was trained since it was last started."""
    profile: Profile | None = None
    """The cost model and latencies of this run, for simulations of it; None if it sampled too little."""
    instances: str = ""
    """How many instances the run has at the moment, and how many it misses."""
    environments: list[HostView] = field(default_factory=list)
    """What its environment hosts do at the moment."""
    sources: list[SourceCounts] = field(default_factory=list)
    """What was drawn from and trained on of its task sources, if it has several."""
    losses: list[str] = field(default_factory=list)
    """Actors that were lost and replaced."""
    alarms: list[str] = field(default_factory=list)
    """Instances whose logprobs drifted from the trainer's, importance ratios that collapsed, updates dropped."""
    notes: list[str] = field(default_factory=list)
    """Notes needed to interpret its numbers: prompts held out, changes since the run began."""

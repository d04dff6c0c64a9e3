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
    """What limited each step and the steps just before it, in a few words."""
    diagnosis: Diagnosis | None = None
    """What limited the run; None if no step was trained since it was last started."""
    profile: Profile | None = None
    """The cost model and latencies of this run, for simulations of it; None if it sampled too little."""
    instances: str = ""
    """One line about the instances: their number, and which are missing or retiring."""
    environments: list[HostView] = field(default_factory=list)
    """Current state of the environment hosts."""
    sources: list[SourceCounts] = field(default_factory=list)
    """Counts of each task source, if the run has several."""
    losses: list[str] = field(default_factory=list)
    """Actors that were lost and replaced."""
    alarms: list[str] = field(default_factory=list)
    """Instances whose logprobs drifted from the trainer's, importance ratios that collapsed, updates dropped."""
    notes: list[str] = field(default_factory=list)
    """Notes needed to interpret its numbers: prompts held out, changes since the run began."""

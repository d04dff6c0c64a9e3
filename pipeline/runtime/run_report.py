"""Outcomes of a run that are not in its store, and the interface of objects that are told what happens in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.mixture import SourceCounts
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.profiling.diagnosis import Diagnosis
from staleflow.pipeline.profiling.fit import CostModelFit
from staleflow.pipeline.runtime.environment_hosts import EnvironmentHostView
from staleflow.pipeline.runtime.evaluation_results import Evaluation


@dataclass(slots=True)
class RunReport:
    """Outcomes of a run that are not in its store."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of all training steps."""
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds_by_activity: dict[str, float] = field(default_factory=dict)
    """Seconds by activity, and `tokens_sampled`, up to the latest stored step or the end; empty before the first step
    of this start."""
    snapshot: Snapshot | None = None
    stop_reason: str = ""
    """Why the run ended early; empty if it did all its steps."""
    command_counts: dict[str, int] = field(default_factory=dict)
    """Number of the coordinator's commands, by kind."""
    bottlenecks: dict[int, str] = field(default_factory=dict)
    """What limited each step and the steps just before it, in a few words."""
    diagnosis: Diagnosis | None = None
    """What limited the run; None if no step was trained since it was last started."""
    cost_model_fit: CostModelFit | None = None
    """The cost model fitted to this run; None if it sampled too little."""
    instances_line: str = ""
    """One line about the instances: their number, and which are missing or retiring."""
    environment_hosts: list[EnvironmentHostView] = field(default_factory=list)
    """Current state of the environment hosts."""
    sources: list[SourceCounts] = field(default_factory=list)
    """Counts of each task source, if the run has several."""
    lost_actors: list[str] = field(default_factory=list)
    """Messages about actors that were lost and replaced."""
    alarms: list[str] = field(default_factory=list)
    """Instances whose logprobs drifted from the trainer's, importance ratios that collapsed, updates dropped."""
    notes: list[str] = field(default_factory=list)
    """Notes needed to interpret its numbers: prompts held out, changes since the run began."""


class RunListener:
    """Receives what happens in a run. This base class does nothing; subclasses override the methods they need."""

    def on_line(self, text: str) -> None:
        """Receive a line for display, such as the dashboard's address."""

    def on_activity(self, activity: str) -> None:
        """Receive the name of an activity outside of training, such as starting actors."""

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        """Receive the state of the run, twice a second, after a new activity, and before each event below. report:
        the driver's own object, which changes later."""

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        """Receive the metrics of a stored training step. bottleneck: what limits the run, in a few words."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Receive the result of an evaluation."""


class RunListeners(RunListener):
    """Calls several listeners, in order."""

    def __init__(self, *listeners: RunListener) -> None:
        self._listeners = listeners

    def on_line(self, text: str) -> None:
        for listener in self._listeners:
            listener.on_line(text)

    def on_activity(self, activity: str) -> None:
        for listener in self._listeners:
            listener.on_activity(activity)

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        for listener in self._listeners:
            listener.on_status(snapshot, report)

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        for listener in self._listeners:
            listener.on_step_stored(step, bottleneck)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        for listener in self._listeners:
            listener.on_evaluation(evaluation)

"""Interface for display, storage and reporting of a run. The driver calls it in its event loop."""

from __future__ import annotations

from collections.abc import Mapping

from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.runtime.run_report import RunReport


class RunListener:
    """Receives what happens in a run. This base class ignores it; subclasses override the methods they need."""

    def line(self, text: str) -> None:
        """Receive a line for display, such as the dashboard's address."""

    def phase(self, name: str) -> None:
        """Receive the name of an activity outside of training, such as starting actors."""

    def status(self, snapshot: Snapshot, report: RunReport) -> None:
        """Receive the state of the run, twice a second, after a new phase, and before each of the events below. report:
        the driver's own object, which changes later."""

    def step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        """Receive the metrics of a stored training step. bottleneck: what limits the run, in a few words."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Receive the result of an evaluation."""


class RunListeners(RunListener):
    """Calls several listeners, in order."""

    def __init__(self, *listeners: RunListener) -> None:
        self._listeners = listeners

    def line(self, text: str) -> None:
        for listener in self._listeners:
            listener.line(text)

    def phase(self, name: str) -> None:
        for listener in self._listeners:
            listener.phase(name)

    def status(self, snapshot: Snapshot, report: RunReport) -> None:
        for listener in self._listeners:
            listener.status(snapshot, report)

    def step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        for listener in self._listeners:
            listener.step_stored(step, bottleneck)

    def evaluated(self, evaluation: Evaluation) -> None:
        for listener in self._listeners:
            listener.evaluated(evaluation)

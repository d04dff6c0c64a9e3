"""What a driver tells those who show, store or report its run: each thing once, in the driver's event loop."""

from __future__ import annotations

from collections.abc import Mapping

from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.runtime.run_report import RunReport


class RunListener:
    """Receives what happens in a run. This one ignores it; others override what they need."""

    def line(self, text: str) -> None:
        """Receive a line for people, such as the dashboard's address."""

    def phase(self, doing: str) -> None:
        """Receive what the run does outside of training, such as starting actors."""

    def status(self, snapshot: Snapshot, report: RunReport) -> None:
        """Receive the state of the run, twice a second, after a new phase and before each of the events below. report:
        the driver's own, which changes."""

    def step_stored(self, step: Mapping[str, float], limit: str) -> None:
        """Receive the metrics of a training step that is stored. limit: what limits the run's speed, in a few words."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Receive the result of an evaluation."""


class RunListeners(RunListener):
    """Passes everything on to several listeners, in their order."""

    def __init__(self, *listeners: RunListener) -> None:
        self._listeners = listeners

    def line(self, text: str) -> None:
        for listener in self._listeners:
            listener.line(text)

    def phase(self, doing: str) -> None:
        for listener in self._listeners:
            listener.phase(doing)

    def status(self, snapshot: Snapshot, report: RunReport) -> None:
        for listener in self._listeners:
            listener.status(snapshot, report)

    def step_stored(self, step: Mapping[str, float], limit: str) -> None:
        for listener in self._listeners:
            listener.step_stored(step, limit)

    def evaluated(self, evaluation: Evaluation) -> None:
        for listener in self._listeners:
            listener.evaluated(evaluation)

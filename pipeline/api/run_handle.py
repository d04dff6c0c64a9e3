"""The handle of a run whose driver works in a thread of this process.

The thread has an event loop of its own, so that the run goes on beside a notebook's event loop, beside other runs of
this process, and in a plain script.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from staleflow.pipeline.api.job_loading import Job
from staleflow.pipeline.api.run_status import RunResult, RunState, RunStatus
from staleflow.pipeline.api.stored_run import Run, open_run
from staleflow.pipeline.config import preflight
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest, execute
from staleflow.pipeline.jobs.reporter import capturing_warnings
from staleflow.pipeline.jobs.summary import format_step
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.metrics import tokens_per_s
from staleflow.stores.printable import printable

logger = logging.getLogger(__name__)

WAITING_PREFIX = "waiting: "
"""How the lines begin that say what a run waits for."""
ProgressOption = bool | Callable[[RunStatus], object]
"""Whether to print a line for each step; or a function that is called with the status after each step."""


class RunProgress(RunListener):
    """Progress of a run, as its handle shows it. prints: whether to print progress lines. after_step: called after each
    training step."""

    def __init__(self, steps: int, *, prints: bool, after_step: Callable[[], object]) -> None:
        self._steps = steps
        self._prints = prints
        self._after_step = after_step
        self.activity = "checking the job"
        self.is_waiting = False
        self.has_begun = False
        """Whether the driver has begun."""
        self.version = 0
        self.report = RunReport()

    def on_line(self, text: str) -> None:
        self.activity, self.is_waiting = text.removeprefix(WAITING_PREFIX), text.startswith(WAITING_PREFIX)
        self.print(text)

    def on_activity(self, activity: str) -> None:
        self.activity = activity

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        self.is_waiting, self.has_begun = False, True
        self.version, self.report = snapshot.version, report

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self.activity = "training"
        self.print(format_step(step, self._steps, bottleneck))
        self._after_step()

    def print(self, line: str) -> None:
        """Print a line, if printing is enabled."""
        if self._prints:
            with contextlib.suppress(OSError, ValueError):  # an output that is closed ends no run
                print(line, flush=True)  # noqa: T201


class RunHandle:
    """A run whose driver works in the background of this process.

    The run goes on while the handle is dropped; when Python exits, it is stopped at its next step.
    """

    def __init__(self, job: Job, *, resume: bool, security: Any, progress: ProgressOption) -> None:
        self._job = job
        self._resume = resume
        self._security = security
        self._progress = RunProgress(
            job.steps,
            prints=progress is True,
            after_step=(lambda: progress(self.status())) if callable(progress) else (lambda: None),
        )
        self._stop = StopRequest()
        self._checked_event, self._ended_event = threading.Event(), threading.Event()
        self._has_passed_check = False
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name=f"staleflow {job.name}", daemon=True)
        self._thread.start()

    @property
    def job(self) -> Job:
        """The job, with absolute paths."""
        return self._job

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self._job.run_dir

    @property
    def run(self) -> Run:
        """The stored run. Raises ConfigError before it exists."""
        return open_run(self.run_dir)

    @property
    def done(self) -> bool:
        """Whether the run has ended: finished, stopped or failed."""
        return self._ended_event.is_set()

    def status(self) -> RunStatus:
        """The current status of the run. Returns at once."""
        steps, state = list(self._progress.report.steps), self._state()
        last = steps[-1] if steps else {}
        step, num_steps = self._progress.version, self._job.steps
        return RunStatus.of(state, step, num_steps, last, tokens_per_s(steps), self._message())

    def stop(self, reason: str = "stopped by the caller") -> None:
        """Request that the run stops after the training step in flight; it can be resumed. A second call stops it at
        once. Returns at once, and does nothing if the run has ended."""
        self._stop.stop(reason)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended.

        Args:
            timeout_s: Most seconds to wait; None waits as long as it takes.

        Returns:
            Whether the run has ended.
        """
        return self._ended_event.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait until the run has ended, and return its result.

        Args:
            timeout_s: Most seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: The run has not ended by then; it goes on.
            StaleflowError: What ended the run, if it failed, or was stopped before it began.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the run has not ended after {timeout_s:g} s; it goes on: {self.status()}")
        if self._result is None:
            assert self._error is not None
            raise self._error
        return self._result

    def __repr__(self) -> str:
        return f"<RunHandle {self._job.name}, {self.status()}>"

    # -- the caller's thread: the beginning and the end ---------------------------------------------------------------

    def wait_until_checked(self) -> None:
        """Wait until the job is checked. Raises the error of the check."""
        self._checked_event.wait()
        if not self._has_passed_check:
            assert self._error is not None
            raise self._error

    def result_or_interrupt(self) -> RunResult:
        """Return `result`; a KeyboardInterrupt meanwhile stops the run, and a second one stops it at once. Raises
        KeyboardInterrupt if that stopped the run before it began."""
        is_interrupted = False
        while True:
            try:
                return self.result()
            except KeyboardInterrupt:
                is_interrupted = True
                self.stop("interrupted")
            except StoppedBeforeStart as error:
                if is_interrupted:
                    raise KeyboardInterrupt from error
                raise

    # -- the driver's thread ------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        _running_handles.add(self)
        try:
            for line in preflight.check_job(self._job):
                logger.warning(line)
            self._progress.activity = "starting"
            self._has_passed_check = True
            self._checked_event.set()
            self._result = asyncio.run(self._execute())
            self._progress.activity = self._result.stop_reason
            self._progress.print(str(self._result))
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._error = error
            if self._has_passed_check:  # else the error is raised at once
                self._progress.print(str(error))
        finally:  # after the last line is printed: then Python may exit
            self._ended_event.set()
            self._checked_event.set()
            _running_handles.discard(self)

    async def _execute(self) -> RunResult:
        def print_warning(message: str) -> None:
            self._progress.print(f"warning: {printable(message)}")

        # Of this driver only. A run's own log has a handler, so Python itself prints nothing.
        with self._stop, capturing_warnings(print_warning, threading.get_ident()):
            end = await execute(
                self._job, self._progress, resume=self._resume, stop=self._stop, security=self._security
            )
        return RunResult(run_dir=end.run_dir, stop_reason=end.stop_reason, summary=end.summary)

    def _state(self) -> RunState:
        if self._result is not None:
            return "stopped" if self._result.stop_reason else "done"
        if self.done:
            return "stopped" if isinstance(self._error, StoppedBeforeStart) else "failed"
        if self._stop.reason:
            return "stopping"
        if self._progress.is_waiting:
            return "waiting"
        return "running" if self._progress.has_begun else "starting"

    def _message(self) -> str:
        if self._error is not None:
            return str(self._error) or type(self._error).__name__
        return self._progress.activity if self._result is None else self._result.stop_reason


_running_handles: set[RunHandle] = set()
"""Copying a set is one operation of CPython, unlike copying a WeakSet: drivers' threads change it meanwhile."""


def _stop_all() -> None:
    """Stop the runs that this process drives, and wait for them."""
    for handle in tuple(_running_handles):
        handle.stop("Python exits")
    for handle in tuple(_running_handles):
        handle.wait()


# Not atexit, which comes when threads cannot begin work any more: the driver's own could not end a run in order then.
getattr(threading, "_register_atexit")(_stop_all)  # noqa: B009  mypy does not know it

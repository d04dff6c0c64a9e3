"""Runs a job from start to end in its run folder, or until it is stopped by a signal or by a call from any thread.

A run may be killed at any moment, since committed data is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import BUSY_SCHEDULER_S
from staleflow.pipeline.cluster.job_lookup import refuse_second_job
from staleflow.pipeline.config import user_files
from staleflow.pipeline.config.model_facts import check_teacher_models, inspect_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.forecasting import remove_other_forecast, settings_digest
from staleflow.pipeline.jobs.starts import StartRecorder
from staleflow.pipeline.processes.worker_protocol import ClusterLost
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.pipeline.recovery.run_folder import create_and_lock, prepare_run_dir
from staleflow.pipeline.recovery.source_fingerprints import Fingerprints
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.run_report import RunListener, RunListeners, RunReport
from staleflow.stores.errors import StaleflowError, raised_as

if TYPE_CHECKING:
    from staleflow.pipeline.jobs.reporter import Reporter
    from staleflow.pipeline.processes.dask_workers import DaskWorkers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended: finished or stopped. stop_reason: why it was stopped; empty if it did all steps."""

    run_dir: Path
    summary: dict[str, object]
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverTask:
    """A driver that runs as a Dask task on a worker of the cluster. The caller of `execute` has then locked the run
    folder, and reports how the job ended.

    worker_address: that of the worker. job_id: id of the submitted job. security: Dask's security object for its
    connections.
    """

    worker_address: str
    job_id: str
    security: Any = None


async def execute(
    config: RunConfig,
    listener: RunListener,
    *,
    resume: bool = False,
    task: DriverTask | None = None,
    stop: StopRequest | None = None,
    security: Any = None,
) -> RunEnd:
    """Run a job on the cluster it names, or resume it from its folder.

    Args:
        listener: Receives the progress of the run.
        resume: Whether to continue the run in the job's folder; else there must be none.
        task: The Dask task that this driver runs in; None if it runs in none.
        stop: Request to stop the run.
        security: Dask's security object for the cluster that the job names; ignored with `task`, which has its own.

    Raises:
        ConfigError: The job or its cluster cannot be used.
        StoppedBeforeStart: The job was stopped while it waited for workers.
        StaleflowError: The run failed; what is stored can be resumed.
    """
    from staleflow.pipeline.jobs.reporter import Reporter, capturing_warnings, write_record
    from staleflow.pipeline.jobs.summary import write_summary
    from staleflow.pipeline.processes.dask_workers import check_gpus, connect

    facts = await _in_thread(inspect_model, config)
    if config.teachers:
        await _in_thread(check_teacher_models, config)
    config = user_files.with_absolute_paths(config)
    user_files.check_user_code(config)
    run_dir, job_digest = config.run_dir, settings_digest(config)
    async with contextlib.AsyncExitStack() as lock:
        if task is None:
            await check_gpus(config, security)
            lock.enter_context(create_and_lock(run_dir))
        config, fingerprints, input_changes = await _in_thread(_prepare_folder, config, resume=resume)
        if not resume and (line := remove_other_forecast(run_dir, job_digest)):
            listener.on_line(line)
        workers = await (
            connect(config, security) if task is None else connect(config, task.security, within_s=BUSY_SCHEDULER_S)
        )
        reporter = Reporter(f"{config.name}-{facts.nonce[:6]}" if task is None else task.job_id, config.steps, run_dir)
        workers.job_id = reporter.id
        end_state = "failed", ""
        try:
            if workers.dashboard:
                listener.on_line(f"Dask dashboard: {workers.dashboard}")
            if task is None:
                await write_record(run_dir, reporter.id, {"steps": config.steps}, [])  # replaces an earlier start's
            await _enter_registry(config, workers)
            own_worker = "" if task is None else task.worker_address
            if reason := await workers.wait_for_workers(config, listener.on_line, own_worker):
                raise StoppedBeforeStart(reason)
            if workers.placement_text:
                listener.on_line(f"GPUs: {workers.placement_text}")
            actors = Actors(config, workers, run_dir, facts)
            with capturing_warnings(reporter.on_line):
                report = await _train(
                    config, actors, workers, reporter, listener, (fingerprints, input_changes), stop, resume=resume
                )
            written_summary = await _in_thread(write_summary, config, report, run_dir)
            end = RunEnd(run_dir=run_dir, summary=written_summary, stop_reason=report.stop_reason)
            end_state = ("stopped" if end.stop_reason else "done"), end.stop_reason
            return end
        except BaseException as error:
            has_failed = isinstance(error, Exception) and not isinstance(error, StoppedBeforeStart)
            fallback = type(error).__name__ if has_failed else (stop.reason if stop else "") or "interrupted"
            end_state = ("failed" if has_failed else "stopped"), str(error) or fallback
            raise
        finally:
            if stop is not None:
                stop.set_handler(_ignore_stop)  # a second request would leave actors and workers behind
            with contextlib.suppress(Exception):
                await reporter.report(workers.client, *(end_state if task is None else ("running", "")))
            await workers.close()


async def _in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Call a function in a thread: it may take minutes, and the event loop sends the driver's signs of life. If the
    task is cancelled, waits until the function has returned, because it may write to the locked folder."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        raise


async def _enter_registry(config: RunConfig, workers: DaskWorkers) -> None:
    """Enter a run in the cluster's job registry. Raises ConfigError if another job uses its folder, ClusterLost."""
    job_facts = {"id": workers.job_id, "name": config.name, "run_dir": str(config.run_dir), "steps": config.steps}
    client = workers.client
    with raised_as(ClusterLost, "cluster: the scheduler does not answer", OSError):
        refuse_second_job(await job_registry.ask(client, "submit", **job_facts, submitter=str(client.id)))


async def _train(
    config: RunConfig,
    actors: Actors,
    workers: DaskWorkers,
    reporter: Reporter,
    listener: RunListener,
    inputs: tuple[Fingerprints, list[str]],
    stop: StopRequest | None,
    *,
    resume: bool,
) -> RunReport:
    """Run the driver from the run's start or its resume point to its end. inputs: fingerprints of data and code, and
    their changes since the run began."""
    from staleflow.pipeline.jobs.tracking import track
    from staleflow.pipeline.recovery import resumption as resumptions

    run_dir, (fingerprints, input_changes) = config.run_dir, inputs
    resumption = await _in_thread(resumptions.prepare, config) if resume else None
    version, elapsed_s = (0, 0.0) if resumption is None else (resumption.version, resumption.elapsed_s)
    start_recorder = StartRecorder(run_dir, version, elapsed_s)
    with start_recorder.record_end():
        async with track(config, run_dir) as tracking:
            listeners = RunListeners(tracking, start_recorder, reporter, listener)
            if resumption is not None:
                listeners.on_line(f"resuming from version {resumption.version}")
                reporter.add_earlier_steps(resumption.step_metrics)
            driver = Driver(
                config, actors, run_dir, listeners, resumption, fingerprints=fingerprints, input_changes=input_changes
            )
            with start_recorder.record_end():  # before the trackers' end, which may take long
                report = await _run_driver(driver, reporter.report_until_done(driver, workers), stop)
    if report.diagnosis is not None:
        reporter.on_line(report.diagnosis.line)
    return report


def _prepare_folder(config: RunConfig, *, resume: bool) -> tuple[RunConfig, Fingerprints, list[str]]:
    """Create the run folder, or check that its run can be resumed. Returns the job, with its user code referenced in
    the folder; the current fingerprints of data and code; and their changes since the run began. Raises ConfigError,
    StoreError."""
    from staleflow.pipeline.recovery import resumption

    fingerprints = source_fingerprints.compute(config)
    if resume:
        resumption.find_resume_version(config)
        stored_fingerprints = source_fingerprints.read(config.run_dir)
        return config, fingerprints, source_fingerprints.describe_changes(stored_fingerprints, fingerprints)
    config, code = user_files.with_copied_code(config)
    source_fingerprints.write(prepare_run_dir(config, code), fingerprints)
    return config, fingerprints, []


async def _run_driver(
    driver: Driver, report_coroutine: Coroutine[Any, Any, None], stop: StopRequest | None
) -> RunReport:
    """Run the driver until it ends or is stopped, then close it. report_coroutine: runs meanwhile; its error ends the
    run."""

    def end_run_on_error(report_task: asyncio.Future[None]) -> None:
        if not report_task.cancelled() and (error := report_task.exception()) is not None:
            driver.fail(error)

    report_task = asyncio.ensure_future(report_coroutine)
    report_task.add_done_callback(end_run_on_error)
    if stop is not None:
        stop.set_handler(driver.stop)
    try:
        return await driver.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not driver.report.stop_reason or task is None:
            raise
        task.uncancel()
        return driver.report  # stopped at once, so only committed steps count
    finally:
        if stop is not None:
            stop.set_handler(_ignore_stop)
        report_task.cancel()
        await asyncio.gather(report_task, return_exceptions=True)
        await driver.close()


def _ignore_stop(_: str) -> None:
    """Ignore a request to stop, because the run is ending."""


class StoppedBeforeStart(StaleflowError):
    """The run was stopped before it began."""


class StopRequest:
    """A request to stop one run. A context manager, entered by the task that executes the run.

    Until `set_handler` is called, a request cancels the task, and the context raises StoppedBeforeStart.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[str], None] = self._cancel
        self._num_undelivered = 0

    def stop(self, reason: str) -> None:
        """Stop the run; a second request stops it at once, without waiting for the training step in flight.
        Thread-safe, also before the run begins."""
        with self._lock:
            self.reason = self.reason or reason
            self._num_undelivered += 1
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver)

    def set_handler(self, handler: Callable[[str], None]) -> None:
        """Call `handler` with the reason of each request; at once if a request came earlier and its cancellation had no
        effect."""
        self._handler = handler
        self._num_undelivered = 1 if self.reason else 0
        self._deliver()

    def __enter__(self) -> StopRequest:
        with self._lock:
            self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
            if self._num_undelivered:
                self._loop.call_soon(self._deliver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._loop = None
        if kind is asyncio.CancelledError and self.reason and self._task is not None:
            self._task.uncancel()
            raise StoppedBeforeStart(self.reason) from None

    def _deliver(self) -> None:
        while self._num_undelivered:
            self._num_undelivered -= 1
            self._handler(self.reason)

    def _cancel(self, _: str) -> None:
        if self._task is not None:
            self._task.cancel()


@contextlib.contextmanager
def stopped_by_signals(
    request: StopRequest, announce: Callable[[str], None], end_process: Callable[[], NoReturn]
) -> Iterator[None]:
    """Context manager: the first SIGINT or SIGTERM requests that the run stops. Use in the main thread, inside of the
    request's context.

    Args:
        request: The run's request to stop.
        announce: Receives a line for the user at the first signal.
        end_process: Ends the process, at the second signal.
    """
    loop = asyncio.get_running_loop()
    received_reasons: list[str] = []

    def handle_signal(reason: str) -> None:
        if received_reasons:
            end_process()
        received_reasons.append(reason)
        announce(f"{reason}: stopping; Ctrl-C again ends at once")
        request.stop(reason)

    reasons = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    for number, reason in reasons.items():
        loop.add_signal_handler(number, handle_signal, reason)
    try:
        yield
    finally:
        for number in reasons:
            loop.remove_signal_handler(number)

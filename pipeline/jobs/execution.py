"""Runs a job from start to end in its run folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import BUSY_SCHEDULER_S
from staleflow.pipeline.cluster.job_lookup import refuse_second_job
from staleflow.pipeline.config import user_files
from staleflow.pipeline.config.model_facts import ModelFacts, inspect_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.starts import Starts
from staleflow.pipeline.jobs.stopping import StopRequest
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.pipeline.recovery.run_folder import create_and_lock, prepare_run_dir
from staleflow.pipeline.recovery.source_fingerprints import Fingerprints
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.evaluation_results import read_evaluations
from staleflow.pipeline.runtime.run_listener import RunListener, RunListeners
from staleflow.pipeline.runtime.run_report import RunReport

if TYPE_CHECKING:
    from staleflow.pipeline.jobs.reporter import Reporter
    from staleflow.pipeline.processes.dask_workers import DaskWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended: finished or stopped."""

    run_dir: Path
    summary: dict[str, object]
    stopped: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverWorker:
    """The worker on which a driver runs as a Dask task. security: Dask's security object for its connections."""

    address: str
    security: Any = None


async def execute(
    config: RunConfig,
    listener: RunListener,
    *,
    resume: bool = False,
    locked: bool = False,
    driver_worker: DriverWorker | None = None,
    job: str = "",
    stop: StopRequest | None = None,
    security: Any = None,
) -> RunEnd:
    """Run a job on the cluster it names, or resume it from its folder.

    Args:
        listener: Called with what happens in the run.
        locked: Whether the caller has locked the run folder.
        job: Id of a submitted job, whose task reports how it ended.
        stop: Requests to stop the run.
        security: Dask's security object for the cluster that the job names.
    """
    facts = inspect_model(config)
    config = user_files.with_absolute_paths(config)
    user_files.check(config)
    if driver_worker is None:
        from staleflow.pipeline.processes.dask_workers import check_gpus

        await check_gpus(config, security)
    with contextlib.nullcontext() if locked else create_and_lock(config.run_dir):
        return await _execute(
            config, facts, listener, resume=resume, driver_worker=driver_worker, job=job, stop=stop, security=security
        )


async def _execute(
    config: RunConfig,
    facts: ModelFacts,
    listener: RunListener,
    *,
    resume: bool,
    driver_worker: DriverWorker | None,
    job: str,
    stop: StopRequest | None,
    security: Any,
) -> RunEnd:
    """`execute` with the run folder locked."""
    from staleflow.pipeline.jobs.reporter import Reporter
    from staleflow.pipeline.jobs.summary import summarize, write_report
    from staleflow.pipeline.processes.dask_workers import connect

    run_dir = config.run_dir
    config, fingerprints, changed_sources = _prepare_folder(config, resume=resume)
    cluster = await (
        connect(config, security)
        if driver_worker is None
        else connect(config, driver_worker.security, within_s=BUSY_SCHEDULER_S)
    )
    reporter = Reporter(job or f"{config.name}-{facts.nonce[:6]}", config.steps, run_dir)
    cluster.job = reporter.id
    ended = "failed", ""
    try:
        if cluster.dashboard:
            listener.line(f"Dask dashboard: {cluster.dashboard}")
        client_id = str(cluster.client.id)
        job_facts = {"id": reporter.id, "name": config.name, "run_dir": str(run_dir), "steps": config.steps}
        refuse_second_job(await job_registry.ask(cluster.client, "submit", **job_facts, by=client_id))
        stopped = await cluster.wait_for_workers(
            config, listener.line, "" if driver_worker is None else driver_worker.address
        )
        if stopped:
            ended = "stopped", stopped
            summary = summarize(config, RunReport(stopped=stopped), run_dir)  # not written: nothing has changed
            return RunEnd(run_dir=run_dir, summary=summary, stopped=stopped)
        if cluster.placement_text:
            listener.line(f"GPUs: {cluster.placement_text}")
        actors = Actors(config, cluster, run_dir, facts)
        with reporter.capturing_warnings():
            outcomes = await _train(
                config, actors, cluster, reporter, listener, (fingerprints, changed_sources), stop, resume=resume
            )
        ended = ("stopped" if outcomes.stopped else "done"), outcomes.stopped
    except BaseException as error:
        ended = ("failed", str(error)) if isinstance(error, Exception) else ("stopped", "interrupted")
        raise
    finally:
        with contextlib.suppress(Exception):
            await reporter.report(cluster.client, *(("running", "") if job else ended))
        await cluster.close()
    return RunEnd(run_dir=run_dir, summary=write_report(config, outcomes, run_dir), stopped=outcomes.stopped)


async def _train(
    config: RunConfig,
    actors: Actors,
    cluster: DaskWorkers,
    reporter: Reporter,
    listener: RunListener,
    sources: tuple[Fingerprints, list[str]],
    stop: StopRequest | None,
    *,
    resume: bool,
) -> RunReport:
    """Run the driver from the run's start or its resume point to its end. sources: fingerprints of data and code, and
    their changes since the run began."""
    from staleflow.pipeline.jobs.tracking import Tracking
    from staleflow.pipeline.recovery import resumption as resumptions

    run_dir, (fingerprints, changed_sources) = config.run_dir, sources
    resumption = resumptions.prepare(config) if resume else None
    version, elapsed_s = (0, 0.0) if resumption is None else (resumption.version, resumption.elapsed_s)
    starts = Starts(run_dir, version, elapsed_s)
    with contextlib.closing(Tracking(config, run_dir)) as tracking:
        listeners = RunListeners(tracking, starts, reporter, listener)
        if resumption is not None:
            listeners.line(f"resuming from version {resumption.version}")
            reporter.earlier_steps(resumption.steps)
        driver = Driver(
            config, actors, run_dir, listeners, resumption, fingerprints=fingerprints, changed=changed_sources
        )
        with starts.recording_end(driver.outcomes):
            outcomes = await _run_driver(driver, reporter.report_until_done(driver, cluster), stop)
    if resumption is not None and not outcomes.steps:  # stopped before the run was taken up again
        outcomes.steps += resumption.steps
        outcomes.evaluations += read_evaluations(run_dir)
    if outcomes.diagnosis is not None:
        reporter.line(outcomes.diagnosis.line)
    return outcomes


def _prepare_folder(config: RunConfig, *, resume: bool) -> tuple[RunConfig, Fingerprints, list[str]]:
    """Create the run folder, or check that its run can be resumed. Returns the job, with its user code referenced in
    the folder; the current fingerprints of data and code; and their changes since the run began. Raises ConfigError,
    StoreError."""
    from staleflow.pipeline.recovery import resumption

    fingerprints = source_fingerprints.compute(config)
    if resume:
        resumption.resume_version(config)
        return config, fingerprints, source_fingerprints.changes(source_fingerprints.read(config.run_dir), fingerprints)
    config, code = user_files.with_code(config, user_files.copied_keys(config))
    config = user_files.with_code_in(config, config.run_dir / "code", code)
    source_fingerprints.write(prepare_run_dir(config, code), fingerprints)
    return config, fingerprints, []


async def _run_driver(driver: Driver, reporting: Coroutine[Any, Any, None], stop: StopRequest | None) -> RunReport:
    """Run the driver until it ends or is stopped, then close it. reporting: coroutine that runs meanwhile."""
    reports = asyncio.ensure_future(reporting)
    if stop is not None:
        stop.set_handler(driver.stop)
    try:
        return await driver.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not driver.outcomes.stopped or task is None:
            raise
        task.uncancel()
        return driver.outcomes  # stopped at once: only committed steps count
    finally:
        if stop is not None:
            stop.set_handler(_ignore_stop)
        reports.cancel()
        await asyncio.gather(reports, return_exceptions=True)
        await driver.close()


def _ignore_stop(_: str) -> None:
    """Stop a run that is ending anyway."""

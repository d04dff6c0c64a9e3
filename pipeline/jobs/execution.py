"""Executing a job from start to end in its run folder."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import user_files
from pipeline.config.model_facts import ModelFacts, inspect_model
from pipeline.config.schema import RunConfig
from pipeline.coordination.snapshot import Snapshot
from pipeline.runtime import fingerprints
from pipeline.runtime.actors import Actors
from pipeline.runtime.driver import Driver
from pipeline.runtime.fingerprints import Fingerprints
from pipeline.runtime.outcomes import Outcomes
from pipeline.runtime.run_folder import claimed, prepare_run_dir
from stores.errors import ConfigError, StaleflowError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """A finished or stopped run."""

    run_dir: Path
    summary: dict[str, object]
    stopped: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSlot:
    """The worker on which a driver runs as a Dask task. security: Dask's, for its connections."""

    address: str
    security: Any = None


class DriverSlotTaken(StaleflowError):
    """The driver's worker belongs to another run."""


async def execute(
    config: RunConfig,
    progress: Callable[[Snapshot, Outcomes, str], None],
    announce: Callable[[str], None],
    *,
    resume: bool = False,
    held: bool = False,
    slot: DriverSlot | None = None,
    job: str = "",
) -> RunEnd:
    """Run a job on the cluster it names, or resume it from its folder. `announce` receives lines for the user, such as
    the dashboard's address. held: the caller has locked the run folder. job: id of a submitted job, whose task reports
    how it ended."""
    if config.simulation.colocated:
        raise ConfigError("simulation.colocated = true: in a run every role has its own workers; use simulate")
    facts = inspect_model(config)
    config = user_files.located(config)
    user_files.check(config)
    with contextlib.nullcontext() if held else claimed(config.run_dir):
        return await _execute(config, facts, progress, announce, resume=resume, slot=slot, job=job)


async def _execute(
    config: RunConfig,
    facts: ModelFacts,
    progress: Callable[[Snapshot, Outcomes, str], None],
    announce: Callable[[str], None],
    *,
    resume: bool,
    slot: DriverSlot | None,
    job: str,
) -> RunEnd:
    """`execute` with the run folder locked."""
    from pipeline.jobs.reporter import Reporter
    from pipeline.jobs.summary import write_report
    from pipeline.jobs.tracking import Tracking
    from pipeline.runtime import resumption as resumptions
    from pipeline.runtime.workers import connect
    from pipeline.scheduler import board

    run_dir = config.run_dir
    config, found, changed = _folder_ready(config, resume=resume)
    cluster = await connect(config, None if slot is None else slot.security)
    reporter = Reporter(job or f"{config.name}-{facts.nonce[:6]}", config.steps, config.kept_bound)

    def say(line: str) -> None:
        reporter.say(line)
        announce(line)

    def show(snapshot: Snapshot, outcomes: Outcomes, doing: str) -> None:
        tracking.steps(outcomes.steps)
        reporter.progress(snapshot, outcomes, doing)
        progress(snapshot, outcomes, doing)

    ended = "failed", ""
    try:
        if cluster.dashboard:
            announce(f"Dask dashboard: {cluster.dashboard}")
        await board.ask(
            cluster.client, "submit", id=reporter.id, name=config.name, run_dir=str(run_dir), steps=config.steps
        )
        if not await cluster.settle("" if slot is None else slot.address):
            raise DriverSlotTaken("this worker belongs to another run")
        with reporter.listening(), contextlib.ExitStack() as stack:
            resumption = resumptions.prepare(config) if resume else None
            if resumption is not None:
                say(f"resuming from version {resumption.version}")
            tracking = stack.enter_context(
                contextlib.closing(Tracking(config, run_dir, 0 if resumption is None else len(resumption.steps)))
            )
            actors = Actors(config, cluster, run_dir, facts)
            driver = Driver(
                config, actors, run_dir, show, resumption, announce=say, fingerprints=found, changed=changed
            )
            outcomes = await _run_driver(driver, reporter.attend(driver, cluster))
            ended = ("stopped" if outcomes.stopped else "done"), outcomes.stopped
            if outcomes.diagnosis is not None:
                reporter.say(outcomes.diagnosis.line)
    finally:
        with contextlib.suppress(Exception):
            await reporter.report(cluster.client, *(("running", "") if job else ended))
        await cluster.close()
    return RunEnd(run_dir=run_dir, summary=write_report(config, outcomes, run_dir), stopped=outcomes.stopped)


def _folder_ready(config: RunConfig, *, resume: bool) -> tuple[RunConfig, Fingerprints, list[str]]:
    """Create the run folder, or check that the run in it can be resumed. Returns the job, with its user code referenced
    in the folder; the fingerprints of what the run uses now; and their differences from its start. Raises ConfigError,
    StoreError."""
    from pipeline.runtime import resumption

    found = fingerprints.taken(config)
    if resume:
        resumption.reached(config)
        return config, found, fingerprints.changes(fingerprints.read(config.run_dir), found)
    config, code = user_files.with_code(config, user_files.RULES)
    config = user_files.with_code_in(config, config.run_dir / "code", code)
    fingerprints.write(prepare_run_dir(config, code), found)
    return config, found, []


async def _run_driver(driver: Driver, reporting: Coroutine[Any, Any, None]) -> Outcomes:
    """Run the driver until it ends or a signal stops it, then close it. reporting: runs meanwhile."""
    loop = asyncio.get_running_loop()
    reports = asyncio.ensure_future(reporting)
    signals = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    if threading.current_thread() is not threading.main_thread():
        signals = {}  # signals belong to the worker process that runs this task
    for number, why in signals.items():
        loop.add_signal_handler(number, driver.stop, why)
    try:
        return await driver.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not driver.outcomes.stopped or task is None:
            raise
        task.uncancel()
        return driver.outcomes  # stopped at once: only committed steps count
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        reports.cancel()
        await asyncio.gather(reports, return_exceptions=True)
        await driver.close()

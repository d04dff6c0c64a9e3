"""Submits jobs to a Dask cluster, where the driver is a Dask task that restarts on another worker if its worker dies.

The driver runs in a thread of one of the workers that are assigned to its job. After a restart, and after a loss that
ends the run, it resumes from the run's newest resume point. A job ends as done, stopped on request, or
failed with a reason. Driver, trainer and trajectory server must see the same run folder (runs_dir): on one machine, or
on a shared file system.

The process that submits a job imports this module too, so torch and the store are imported only when a driver runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import secrets
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Reschedule, get_worker, secede
from distributed.core import Status

from staleflow.pipeline.cluster import job_registry, submitted_job
from staleflow.pipeline.cluster.connection import BUSY_SCHEDULER_S, ClusterAddress, client_security
from staleflow.pipeline.cluster.gang import Needs
from staleflow.pipeline.cluster.job_lookup import find_job, refuse_second_job, refuse_too_few_gpus
from staleflow.pipeline.config import knob_tree, loading, user_files
from staleflow.pipeline.config.preflight import check_job
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.user_files import collect_code, with_code_in
from staleflow.pipeline.processes.dask_workers import DriverSlotTaken
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.recovery import run_folder
from staleflow.stores.errors import ActorLost, ConfigError, StaleflowError, StoreUnavailable

if TYPE_CHECKING:
    from staleflow.pipeline.jobs.execution import DriverTask
    from staleflow.stores.trajectories.reader import StoreSummary

MAX_RESUMES = 3
"""Number of consecutive losses without a new step after which a driver still resumes."""

STUCK_LIMIT_S = 40.0
"""Seconds without a turn of the driver's event loop after which it writes the stacks of its threads. Less than
driver_watch.MIN_SILENCE_LIMIT_S, after which its worker is restarted."""
STACKS_FILE = "job.stacks.txt"
"""File in the run folder for these stacks."""

LOCK_RETRY_S = 0.5
"""Seconds between attempts to lock a folder that an earlier driver of the same job has locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job as it is sent to the cluster. job_toml: the resolved job. code: its user code by file name. resume: whether
    to continue an existing run."""

    id: str
    job_toml: str
    code: dict[str, str] = field(default_factory=dict)
    resume: bool = False


def run_driver(submission: Submission) -> str:
    """The driver's Dask task. Returns how the job ended. Dask runs it again if its worker dies, or the worker that has
    its result."""
    from staleflow.pipeline.jobs.execution import DriverTask

    worker = get_worker()
    task = DriverTask(worker_address=worker.address, job_id=submission.id, security=client_security(worker.security))
    secede()  # the task is long and computes little, so free the worker's thread
    return asyncio.run(
        _run_driver(submission, task, worker.scheduler.address, is_alive=lambda: worker.status is Status.running)
    )


async def _run_driver(
    submission: Submission, task: DriverTask, scheduler_address: str, is_alive: Callable[[], bool]
) -> str:
    from staleflow.pipeline.jobs import reporter

    cluster = ClusterAddress(address=scheduler_address, security=task.security)
    async with cluster.open_client(within_s=BUSY_SCHEDULER_S) as client:
        job = await find_job(client, submission.id)
        if job["state"] in submitted_job.ENDED:
            return str(job["state"])
        # False if the job is queued or has other workers: Dask restarts a task on any worker.
        if not await job_registry.ask(
            client, "begin", id=submission.id, address=task.worker_address, driver_client=client.id
        ):
            raise Reschedule
        async with contextlib.AsyncExitStack() as lock:
            is_locked = False
            try:
                config = configure_for_cluster(submission, scheduler_address)
                await lock.enter_async_context(lock_for_job(config, submission))
                is_locked = True
                await reporter.write_record(config.run_dir, submission.id, job, [])  # replaces that of an earlier job
                state, reason = await _run_to_end(config, submission, task, client)
            except DriverSlotTaken:
                raise Reschedule from None
            except Exception as error:
                if not is_alive():
                    raise  # the worker ends, not the job: Dask restarts the task elsewhere
                if not isinstance(error, StaleflowError):
                    logging.getLogger(__name__).exception("job %s failed", submission.id)
                is_expected = isinstance(error, StaleflowError)
                state, reason = "failed", str(error) if is_expected else f"{type(error).__name__}: {error}"
            if is_locked:
                await reporter.record_state(job, state, reason)
        await reporter.report_state(client, job, state, reason)
        await job_registry.ask(client, "release_workers", id=submission.id)
        return state


async def _run_to_end(config: RunConfig, submission: Submission, task: DriverTask, client: Any) -> tuple[str, str]:
    """Run a job whose run folder is locked, resuming after recoverable losses. Returns the final state and the reason,
    if any."""
    if not (config.run_dir / "store").exists():  # the submitting machine could not check everything
        await asyncio.to_thread(check_job, config)
    async with writing_stacks_if_stuck(config.run_dir / STACKS_FILE):
        return await _resume_to_end(config, submission, task, client)


async def _resume_to_end(config: RunConfig, submission: Submission, task: DriverTask, client: Any) -> tuple[str, str]:
    """`_run_to_end` without its checks."""
    from staleflow.pipeline.jobs import reporter
    from staleflow.pipeline.jobs.execution import StoppedBeforeStart, execute
    from staleflow.pipeline.runtime.run_report import RunListener
    from staleflow.stores.trajectories.versioned import VersionedStore
    from staleflow.tasks.actors.store_thread import retry_while_bucket_fails

    async def read_summary() -> StoreSummary:
        return await asyncio.to_thread(lambda: VersionedStore.open(config.run_dir / "store").summary())

    log = logging.getLogger(__name__)
    num_trained, num_resumes = -1, 0
    while True:
        has_store = (config.run_dir / "store").exists()
        stored_run = (
            await retry_while_bucket_fails(read_summary, config.deadlines.commit_s, log.warning) if has_store else None
        )
        num_steps = 0 if stored_run is None else stored_run.num_steps
        if stored_run is not None and stored_run.has_ended and num_steps >= config.steps:
            return "done", ""
        if stop := (job := await find_job(client, submission.id))["stop"]:
            return "stopped", stop
        if num_steps > num_trained:
            num_trained, num_resumes = num_steps, 0
        try:
            end = await execute(
                config,
                RunListener(),
                resume=has_store or submission.resume,
                task=task,
            )
        except StoppedBeforeStart as error:
            return "stopped", str(error)
        except (ActorLost, NoFreeWorker, StoreUnavailable) as error:
            num_resumes += 1
            if num_resumes > MAX_RESUMES:
                raise
            waiting = job, "waiting", f"lost: {error}; resuming"
            await reporter.record_state(*waiting)
            await reporter.report_state(client, *waiting)
            continue
        return ("stopped", end.stop_reason) if end.stop_reason else ("done", "")


@contextlib.asynccontextmanager
async def lock_for_job(config: RunConfig, submission: Submission) -> AsyncIterator[None]:
    """Lock the run folder and record this job in it. Raises ConfigError, having written nothing, if the folder has a
    run that this job must not continue, or another process uses it."""
    run_dir, deadline = config.run_dir, time.monotonic() + config.deadlines.start_s
    with contextlib.ExitStack() as lock:
        while True:
            try:
                lock.enter_context(run_folder.create_and_lock(run_dir))
                break
            except run_folder.FolderInUse:
                # An earlier driver of this job, whose worker is leaving the cluster, unlocks it at its end.
                if run_folder.read_job_id(run_dir) != submission.id or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(LOCK_RETRY_S)
        if not submission.resume and run_folder.read_job_id(run_dir) != submission.id:
            run_folder.require_no_run(run_dir)
        run_folder.write_job_id(run_dir, submission.id, submission.code)
        yield


@contextlib.asynccontextmanager
async def writing_stacks_if_stuck(path: Path) -> AsyncIterator[None]:
    """Append the stacks of all threads to a file each time that the event loop does not run for STUCK_LIMIT_S. The
    process is restarted then, and nothing else would say where it hung. Without the file, as on a full disk, nothing
    is written."""
    try:
        opened_file = path.open("ab")
    except OSError as error:
        logging.getLogger(__name__).warning("%s: cannot be opened: %s", path, error.strerror)
        opened_file = None
    if opened_file is None:
        yield
        return
    with opened_file as file:

        async def postpone() -> None:
            while True:
                faulthandler.dump_traceback_later(STUCK_LIMIT_S, file=file)
                await asyncio.sleep(STUCK_LIMIT_S / 10)

        task = asyncio.ensure_future(postpone())
        try:
            yield
        finally:
            task.cancel()
            faulthandler.cancel_dump_traceback_later()
            if not file.tell():
                path.unlink(missing_ok=True)


def configure_for_cluster(submission: Submission, scheduler_address: str) -> RunConfig:
    """The submitted job with this cluster's address, and with its user code in the run folder."""
    tree = tomllib.loads(submission.job_toml)
    tree["cluster"] |= {"kind": "address", "address": scheduler_address, "scheduler_file": ""}
    config = loading.from_tree(tree, submission.id)
    return with_code_in(config, config.run_dir / "code", submission.code)


ARRIVAL_POLL_S = 0.02
"""Seconds between two checks whether a submitted job's task has reached the scheduler."""


async def submit(config: RunConfig, cluster: ClusterAddress, *, resume: bool = False) -> dict[str, Any]:
    """Submit a job with absolute paths to a cluster. Returns its entry in the job registry, once it is in the queue.
    Raises ConfigError if another process or job has locked the run folder."""
    if resume:
        run_folder.require_unlocked(config.run_dir)
    id = f"{config.name}-{secrets.token_hex(3)}"
    user_files.check_user_code(config)
    config, code = collect_code(config)
    submission = Submission(id=id, job_toml=knob_tree.to_toml(config), code=code, resume=resume)
    needs = Needs.from_config(config, has_driver_worker=True)
    async with cluster.open_client() as client:
        await refuse_too_few_gpus(client, config)
        # The registry queues the job as soon as its task has reached the scheduler: nothing is left to do then.
        other_job = await job_registry.ask(
            client,
            "submit",
            id=id,
            name=config.name,
            run_dir=str(config.run_dir),
            steps=config.steps,
            submitter=str(client.id),
            needs=asdict(needs),
            wait_limit_s=config.deadlines.wait_s,
        )
        refuse_second_job(other_job)
        # The task runs on no worker until the registry assigns workers to the job.
        future = client.submit(
            run_driver, submission, key=job_registry.TASK_KEY_PREFIX + id, pure=False, workers=[job_registry.NO_WORKER]
        )
        while not (job := await job_registry.ask(client, "check_arrival", id=id))["arrived"]:
            if future.status in ("error", "lost", "cancelled"):
                raise ConfigError(
                    f"the scheduler at {client.scheduler.address} refuses the job: {await _task_error(future)}"
                )
            await asyncio.sleep(ARRIVAL_POLL_S)
        return dict(job)


async def _task_error(future: Any) -> str:
    """The error of a failed task, in one line."""
    error = await future.exception() if future.status == "error" else future.status
    return str(error).partition("\n")[0]

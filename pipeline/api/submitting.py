"""Submits jobs to a Dask cluster from Python. Their drivers run on the cluster, so the caller may end.

Coroutines run in a thread with its own event loop, because a notebook's loop is already running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack

from staleflow.pipeline.api.job_loading import Job, JobObjects, JobSource, load_resumable_job, prepare_job, with_objects
from staleflow.pipeline.api.run_status import RunResult, RunStatus
from staleflow.pipeline.api.stored_run import Run, open_run
from staleflow.pipeline.cluster import job_lookup
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.submitted_job import ENDED
from staleflow.pipeline.config import preflight
from staleflow.pipeline.config.knob_tree import Overrides
from staleflow.pipeline.jobs import job_driver
from staleflow.pipeline.jobs.execution import StoppedBeforeStart
from staleflow.pipeline.recovery.run_folder import read_summary
from staleflow.stores.errors import ConfigError, JobFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A job on a Dask cluster."""

    id: str
    """Id of the job, which `staleflow logs` and other commands take."""
    name: str
    """Name of its run."""
    run_dir: Path
    """Folder of its run, as the cluster's workers see it."""
    cluster: ClusterAddress
    """The cluster."""

    @property
    def run(self) -> Run:
        """The stored run, live or finished, if this process can read its folder. Raises ConfigError."""
        return open_run(self.run_dir)

    def status(self) -> RunStatus:
        """The current status of the job. Raises ConfigError if the cluster cannot be reached or does not know the
        job."""
        return _status_of(self._registry_entry())

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Iterate over the lines of the job's log. Raises ConfigError as `status` does.

        Args:
            follow: Whether to wait for further lines until the job has ended.
        """
        return iterate_async(job_lookup.log_lines(self.cluster, self.id, follow=follow))

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop the job after its current step, or at once if it is waiting. It can be resumed. Raises ConfigError as
        `status` does."""
        run_coroutine(job_lookup.cancel_job(self.cluster, self.id, reason))

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the job has ended. Returns its last status. Raises ConfigError as `status` does.

        Args:
            timeout_s: Most seconds to wait; None waits as long as it takes.
        """
        return _status_of(run_coroutine(job_lookup.wait_until_ended(self.cluster, self.id, timeout_s)))

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait until the job has ended, and return its result. This process must be able to read the run's folder.

        Args:
            timeout_s: Most seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: The job has not ended by then; it goes on.
            JobFailed: The job failed.
            StoppedBeforeStart: The job was stopped before it began.
            ConfigError: The cluster cannot be reached, or the run's folder is not on this machine.
        """
        status = self.wait(timeout_s)
        if status.state not in ENDED:
            raise TimeoutError(f"the job has not ended after {timeout_s:g} s; it goes on: {status}")
        if status.state == "failed":
            raise JobFailed(f"{self.id} failed: {status.message}")
        summary = read_summary(self.run_dir)
        if not summary and status.state == "stopped" and not status.step:
            raise StoppedBeforeStart(status.message)
        if not summary:
            raise ConfigError(f"{self.run_dir}: no summary.json; the job is {status}, and its folder is not seen here")
        stop_reason = status.message if status.state == "stopped" else ""
        return RunResult(run_dir=self.run_dir, stop_reason=stop_reason, summary=summary)

    def _registry_entry(self) -> dict[str, Any]:
        return job_lookup.find_matching(run_coroutine(job_lookup.all_jobs(self.cluster)), self.id).job

    def __repr__(self) -> str:
        return f"<SubmittedJob {self.id}, {self.run_dir}>"


def submit(
    job: JobSource,
    *,
    client: Any = None,
    scheduler: str = "",
    scheduler_file: str | Path = "",
    overrides: Overrides | None = None,
    rows: Any = None,
    reward: Any = None,
    **objects: Unpack[JobObjects],
) -> SubmittedJob:
    """Submit a job to a Dask cluster, whose workers also run its driver. It continues when the caller ends.

    Args:
        job: The path of a job file, a nested mapping as in a job file, or a Job.
        client: A distributed.Client of the cluster.
        scheduler: Instead of a client: the scheduler's address, such as tcp://host:8786.
        scheduler_file: Instead of both: the file that `dask scheduler --scheduler-file` writes. By default the cluster
            is named by Dask's configuration.
        overrides, rows, reward, objects: As in `start`.

    Returns:
        The job: `job.status()`, `job.logs()`, `job.cancel()`, `job.result()`.

    Raises:
        ConfigError: The job has a mistake, its run's name is taken, or the cluster cannot be reached.
    """
    cluster = _cluster_of(client, scheduler, scheduler_file)
    config = prepare_job(with_objects(job, overrides, {"rows": rows, "reward": reward, **objects}))
    _check_and_log(config)
    return _submitted_job(run_coroutine(job_driver.submit(config, cluster)), cluster)


def submit_resumed(
    run_dir: str | Path,
    overrides: Overrides | None = None,
    *,
    client: Any = None,
    scheduler: str = "",
    scheduler_file: str | Path = "",
) -> SubmittedJob:
    """Submit a stored run to a Dask cluster, to be resumed from its newest resume point.

    Args:
        run_dir: Folder of the run.
        overrides: As in `resume`.
        client, scheduler, scheduler_file: As in `submit`.

    Raises:
        ConfigError: There is no such run, nothing is left to do, what its job names is gone, or the cluster cannot be
            reached.
    """
    cluster = _cluster_of(client, scheduler, scheduler_file)
    config = load_resumable_job(Path(run_dir), overrides)
    _check_and_log(config)
    return _submitted_job(run_coroutine(job_driver.submit(config, cluster, resume=True)), cluster)


def submitted_jobs(*, client: Any = None, scheduler: str = "", scheduler_file: str | Path = "") -> list[SubmittedJob]:
    """The jobs of a cluster, in order of submission.

    Args:
        client, scheduler, scheduler_file: As in `submit`.

    Raises:
        ConfigError: The cluster cannot be reached.
    """
    cluster = _cluster_of(client, scheduler, scheduler_file)
    return [_submitted_job(entry, cluster) for entry in run_coroutine(job_lookup.all_jobs(cluster))]


def _check_and_log(job: Job) -> None:
    """Check what a job names, and log what cannot be checked here. Raises ConfigError."""
    for line in preflight.check_job(job, runs_here=False):
        logger.warning(line)


def _cluster_of(client: Any, scheduler: str, scheduler_file: str | Path) -> ClusterAddress:
    if client is not None and (scheduler or scheduler_file):
        raise ConfigError("both a client and a scheduler are given; name the cluster by one of them")
    if client is not None:
        return ClusterAddress.of_client(client)
    return ClusterAddress(address=scheduler, scheduler_file=str(scheduler_file or ""))


def _submitted_job(entry: Mapping[str, Any], cluster: ClusterAddress) -> SubmittedJob:
    """Convert a registry's entry of a job."""
    return SubmittedJob(id=entry["id"], name=entry["name"], run_dir=Path(entry["run_dir"]), cluster=cluster)


def _status_of(entry: Mapping[str, Any]) -> RunStatus:
    """Convert a registry's entry of a job to its status."""
    last, driver_status, state = entry["last"] or {}, entry["status"] or {}, entry["state"]
    if entry["stop"] and state not in ENDED:
        state = "stopping"
    message = entry["why"] or (driver_status.get("doing", "") if state == "running" else "")
    step = int(last["step"]) + 1 if last else 0
    return RunStatus.of(state, step, entry["steps"], last, driver_status.get("tokens_per_s", 0.0), message)


T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Returns its result and raises its errors. A KeyboardInterrupt cancels it."""

    async def result() -> AsyncGenerator[T, None]:
        yield await coroutine

    with contextlib.closing(iterate_async(result())) as results:
        return next(results)


def iterate_async(items: AsyncGenerator[T, None]) -> Generator[T]:
    """Yield the items of an asynchronous generator, which is cancelled when the iteration is abandoned."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    async def next_item() -> T:
        return await anext(items)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # a KeyboardInterrupt while the thread starts would make a second one
        try:
            while True:
                task = loop.create_task(next_item())
                yield thread.submit(loop.run_until_complete, task).result()
        except StopAsyncIteration:
            return
        finally:
            loop.call_soon_threadsafe(task.cancel)  # changes nothing if it has ended
            # First, since runner.close cancels the tasks of a client that the items close, and closes all generators at
            # once, also that of a context manager which another one is about to leave.
            thread.submit(loop.run_until_complete, items.aclose()).result()
            thread.submit(runner.close).result()

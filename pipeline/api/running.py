"""Runs a job from Python, in the background of this process or until it ends.

The run's actors are processes: those of a local cluster that begins and ends with the run, or workers of a cluster that
the caller passes in.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Unpack

from staleflow.pipeline.api.job_loading import Job, JobObjects, JobSource, load_resumable_job, prepare_job, with_objects
from staleflow.pipeline.api.run_handle import ProgressOption, RunHandle
from staleflow.pipeline.api.run_status import RunResult
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.config.knob_tree import Overrides, with_values
from staleflow.pipeline.processes import local_cluster


def start(
    job: JobSource,
    *,
    overrides: Overrides | None = None,
    client: Any = None,
    progress: ProgressOption = False,
    rows: Any = None,
    reward: Any = None,
    **objects: Unpack[JobObjects],
) -> RunHandle:
    """Start a run in the background of this process. Returns when the job is checked, after one or two seconds.

    Args:
        job: The path of a job file, a nested mapping as in a job file, or a Job.
        overrides: Values that replace the job's, as in `load_job`.
        client: A distributed.Client; the run's actors are placed on its cluster's workers. By default on local worker
            processes, which end with the run, or where the job's `cluster` says.
        progress: Whether to print a line for each step; or a function, which is called with the RunStatus after each.
        rows: Rows to train on in place of `task.source`: mappings, a pandas.DataFrame or a datasets.Dataset, with the
            columns that `task.columns` names. They are kept with the run.
        reward: A function `(answer, row) -> float`, or a mapping from names of parts to functions, which are added.
            `answer` is what `task.answer_pattern` finds in the response: all of it without a pattern, "" if nothing.
        objects: `loss`, `advantage`, `routing`, `source`, `agent`, `tools`, `tracker`: a function or class in place of
            what the job names; `eval_rows`: rows of the evaluation before and after training.

    Returns:
        A handle: `handle.status()`, `handle.stop()`, `handle.result()`, `handle.run`.

    Raises:
        ConfigError: The job has a mistake, its run's name is taken, or an object cannot be sent to workers.
    """
    config = prepare_job(with_objects(job, overrides, {"rows": rows, "reward": reward, **objects}))
    return _start_and_await_check(config, client=client, progress=progress, resume=False)


def run(
    job: JobSource,
    *,
    overrides: Overrides | None = None,
    client: Any = None,
    progress: ProgressOption = True,
    rows: Any = None,
    reward: Any = None,
    **objects: Unpack[JobObjects],
) -> RunResult:
    """Run a job to its end, printing a line for each step. Ctrl-C, or interrupting a notebook, stops the run after its
    current step; the result then has `stop_reason = "interrupted"`.

    Args:
        job, overrides, client, progress, rows, reward, objects: As in `start`.

    Returns:
        The result; `result.run` is the stored run.

    Raises:
        ConfigError: As in `start`.
        StaleflowError: The run failed; what is stored can be resumed.
    """
    return start(
        job, overrides=overrides, client=client, progress=progress, rows=rows, reward=reward, **objects
    ).result_or_interrupt()


async def run_async(
    job: JobSource,
    *,
    overrides: Overrides | None = None,
    client: Any = None,
    progress: ProgressOption = True,
    rows: Any = None,
    reward: Any = None,
    **objects: Unpack[JobObjects],
) -> RunResult:
    """As `run`, for use in a coroutine: the caller's event loop continues meanwhile. Cancelling it stops the run, and
    raises CancelledError once the run has ended; cancelling it again stops the run at once.

    Args:
        job, overrides, client, progress, rows, reward, objects: As in `start`.

    Returns:
        The result; `result.run` is the stored run.

    Raises:
        ConfigError, StaleflowError: As in `run`.
    """
    config = prepare_job(with_objects(job, overrides, {"rows": rows, "reward": reward, **objects}))
    handle = _start(config, client=client, progress=progress, resume=False)
    end_future = asyncio.get_running_loop().run_in_executor(None, handle.wait)  # no task, which a loop's end cancels
    cancellation: asyncio.CancelledError | None = None
    while not end_future.done():
        try:
            await asyncio.shield(end_future)
        except asyncio.CancelledError as error:
            handle.stop("cancelled")
            cancellation = error
    if cancellation is not None:
        raise cancellation
    return handle.result()


def start_resumed(
    run_dir: str | Path,
    overrides: Overrides | None = None,
    *,
    client: Any = None,
    progress: ProgressOption = False,
) -> RunHandle:
    """Resume a stopped, killed or finished run from its newest resume point, in the background of this process.

    Args:
        run_dir: Folder of the run.
        overrides: Values of `cluster`, `deadlines`, `steps` and others that do not change what the run computes.
        client: As in `start`.
        progress: As in `start`.

    Raises:
        ConfigError: There is no such run, nothing is left to do, or a value cannot be changed.
    """
    job = load_resumable_job(Path(run_dir), overrides)
    return _start_and_await_check(job, client=client, progress=progress, resume=True)


def resume(
    run_dir: str | Path,
    overrides: Overrides | None = None,
    *,
    client: Any = None,
    progress: ProgressOption = True,
) -> RunResult:
    """Resume a stopped, killed or finished run from its newest resume point, and run it to its end as `run` does.

    Args:
        run_dir, overrides, client, progress: As in `start_resumed`.

    Raises:
        ConfigError: As in `start_resumed`.
        StaleflowError: The run failed; what is stored can be resumed.
    """
    return start_resumed(run_dir, overrides, client=client, progress=progress).result_or_interrupt()


def _start_and_await_check(job: Job, *, client: Any, progress: ProgressOption, resume: bool) -> RunHandle:
    handle = _start(job, client=client, progress=progress, resume=resume)
    try:
        handle.wait_until_checked()
    except BaseException:  # the caller gets no handle
        handle.stop("interrupted")
        raise
    return handle


def _start(job: Job, *, client: Any, progress: ProgressOption, resume: bool) -> RunHandle:
    """The handle of a run whose job is being checked."""
    security = None
    if client is not None:
        job, security = _with_cluster_of(client, job)
    elif job.cluster.kind == "local":
        local_cluster.start_fork_server(job.cluster.threads, local_cluster.modules_to_preload(emulated=job.emulated))
    return RunHandle(job, resume=resume, security=security, progress=progress)


def _with_cluster_of(client: Any, job: Job) -> tuple[Job, Any]:
    """A job on the cluster of a Dask client, and the client's security. Raises ConfigError."""
    dask_cluster = ClusterAddress.of_client(client)
    values = {"cluster.kind": "address", "cluster.address": dask_cluster.address, "cluster.scheduler_file": ""}
    return with_values(job, values), dask_cluster.security

"""Submits jobs to a Dask cluster. Their driver is in pipeline/jobs/job_driver.py.

Driver, trainer and trajectory server must see the same run folder (runs_dir): on one machine, or on a shared file
system.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict
from typing import Any

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.gang import Needs
from staleflow.pipeline.cluster.job_lookup import refuse_second_job, refuse_too_few_gpus
from staleflow.pipeline.config import knob_tree, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.user_files import with_code
from staleflow.pipeline.jobs.job_driver import Submission, run_driver
from staleflow.pipeline.recovery.run_folder import refuse_locked
from staleflow.stores.errors import ConfigError

ARRIVAL_POLL_S = 0.02
"""Seconds between two checks whether a submitted job's task has reached the scheduler."""


async def submit(config: RunConfig, cluster: ClusterAddress, *, resume: bool = False) -> dict[str, Any]:
    """Submit a job with absolute paths to a cluster. Returns its entry in the job registry, once it is in the queue.
    Raises ConfigError if another process or job has locked the run folder."""
    if resume:
        refuse_locked(config.run_dir)
    id = f"{config.name}-{secrets.token_hex(3)}"
    user_files.check(config)
    config, code = with_code(config)
    submission = Submission(id=id, job_toml=knob_tree.to_toml(config), code=code, resume=resume)
    needs = Needs.from_config(config, driver=True)
    async with cluster.connected() as client:
        await refuse_too_few_gpus(client, config)
        # The registry queues the job as soon as its task has reached the scheduler: nothing is left to do then.
        other_job = await job_registry.ask(
            client,
            "submit",
            id=id,
            name=config.name,
            run_dir=str(config.run_dir),
            steps=config.steps,
            by=str(client.id),
            needs=asdict(needs),
            wait_s=config.deadlines.wait_s,
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

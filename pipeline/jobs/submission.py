"""Submitting jobs to a Dask cluster. Their driver is in pipeline/jobs/job_driver.py.

Driver, trainer and trajectory server must see the same run folder (runs_dir): on one machine, or on a shared file
system.
"""

from __future__ import annotations

import asyncio
import secrets

from distributed import fire_and_forget

from pipeline.config import fields, user_files
from pipeline.config.schema import RunConfig
from pipeline.config.user_files import with_code
from pipeline.jobs.job_driver import Submission, drive
from pipeline.scheduler import board
from pipeline.scheduler.connection import Where


async def submit(config: RunConfig, where: Where, *, resume: bool = False) -> str:
    """Submit a job to a cluster; returns its id as soon as the scheduler has it."""
    id = f"{config.name}-{secrets.token_hex(3)}"
    config = user_files.located(config)
    user_files.check(config)
    config, code = with_code(config)
    submission = Submission(id=id, job=fields.to_toml(config), code=code, resume=resume)
    async with where.connected() as client:
        await board.ask(client, "submit", id=id, name=config.name, run_dir=str(config.run_dir), steps=config.steps)
        workers = (await client.scheduler.identity(n_workers=-1))["workers"]
        roles = any("driver" in w["resources"] for w in workers.values())
        key = board.KEY + id
        future = client.submit(drive, submission, key=key, pure=False, resources={"driver": 1} if roles else None)
        fire_and_forget(future)
        while not await board.ask(client, "known", key=key):
            await asyncio.sleep(0.02)
    return id

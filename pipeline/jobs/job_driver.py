"""A submitted job's driver, as a task of the cluster: it starts anew elsewhere when its worker dies, and goes on.

It runs in a thread of some worker, which it claims for its run. It goes on from the run's newest resume point, as it
does by itself when the trainer or the trajectory server is lost. So a job ends in one of three ways: done, stopped
because someone asked, or failed with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Reschedule, get_worker, secede
from distributed.core import Status

from pipeline.config import loading
from pipeline.config.schema import RunConfig
from pipeline.config.user_files import with_code_in
from pipeline.jobs import reporter as reporting
from pipeline.jobs.execution import DriverSlot, DriverSlotTaken, execute
from pipeline.runtime.run_folder import FolderInUse, claimed, job_id, refuse_taken, write_job_id
from pipeline.scheduler import board
from pipeline.scheduler.connection import Where, client_security
from pipeline.scheduler.job_list import find
from stores.errors import ActorLost, StaleflowError
from stores.versioned import VersionedStore

REVIVALS = 3
"""How often a driver goes on by itself after a loss that ends a run, as long as each time brings it further."""

HELD_S = 0.5
"""How often a folder is tried that an earlier driver of the same job still holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What travels: the resolved job as TOML, and the user's own code by file name. resume: a run that is there
    already."""

    id: str
    job: str
    code: dict[str, str] = field(default_factory=dict)
    resume: bool = False


def drive(submission: Submission) -> str:
    """The driver's task; returns how the job ended. It runs again when its worker dies, or the one that holds what it
    returned."""
    worker = get_worker()
    slot = DriverSlot(address=worker.address, security=client_security(worker.security))
    secede()  # it computes little and lasts long: the worker's thread is for others
    return asyncio.run(
        _drive(submission, slot, worker.scheduler.address, alive=lambda: worker.status is Status.running)
    )


async def _drive(submission: Submission, slot: DriverSlot, scheduler: str, alive: Callable[[], bool]) -> str:
    where = Where(address=scheduler, security=slot.security)
    async with where.connected() as client:
        job = await find(client, submission.id)
        if job["state"] in board.ENDED:
            return str(job["state"])
        # A worker of another run, or one that is started anew because an earlier driver has left something in it.
        if not await board.ask(client, "slot", id=submission.id, address=slot.address):
            await asyncio.sleep(1.0)
            raise Reschedule
        try:
            state, why = await _until_it_ends(submission, slot, client, scheduler)
        except DriverSlotTaken:
            await asyncio.sleep(1.0)
            raise Reschedule from None
        except Exception as error:
            if not alive():
                raise  # it is this process that ends, not the job: Dask starts the task elsewhere
            if not isinstance(error, StaleflowError):
                logging.getLogger(__name__).exception("job %s failed", submission.id)
            state, why = "failed", f"{type(error).__name__}: {error}"
        await reporting.tell(client, submission.id, state, why)
        return state


async def _until_it_ends(submission: Submission, slot: DriverSlot, client: Any, scheduler: str) -> tuple[str, str]:
    """Run, and go on after what can be survived. Returns how it ended, and why if not by itself."""
    config = at_home(submission, scheduler)
    async with held(config, submission):
        return await _revived(config, submission, slot, client)


async def _revived(config: RunConfig, submission: Submission, slot: DriverSlot, client: Any) -> tuple[str, str]:
    """As `_until_it_ends`, in a folder that is held."""
    trained, revivals = -1, 0
    while True:
        there = (config.run_dir / "store").is_dir()
        steps, ended = stored(config.run_dir) if there else (0, False)
        if ended and steps >= config.steps:
            return "done", ""
        if stop := (await find(client, submission.id))["stop"]:
            return "stopped", stop
        if steps > trained:
            trained, revivals = steps, 0
        try:
            end = await execute(
                config,
                lambda *_: None,
                lambda _: None,
                resume=there or submission.resume,
                held=True,
                slot=slot,
                job=submission.id,
            )
        except ActorLost as lost:
            revivals += 1
            if revivals > REVIVALS:
                raise
            await reporting.tell(client, submission.id, "waiting", f"lost: {lost}; going on")
            continue
        return ("stopped", end.stopped) if end.stopped else ("done", "")


@contextlib.asynccontextmanager
async def held(config: RunConfig, submission: Submission) -> AsyncIterator[None]:
    """Hold the run's folder, which is this job's from now on. ConfigError if it holds a run that this job is not to go
    on with, or another process is at work there; nothing is written then."""
    run_dir, deadline = config.run_dir, time.monotonic() + config.deadlines.start_s
    with contextlib.ExitStack() as lock:
        while True:
            try:
                lock.enter_context(claimed(run_dir))
                break
            except FolderInUse:
                # An earlier driver of the same job, whose worker is leaving the cluster, lets go when its process ends.
                if job_id(run_dir) != submission.id or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(HELD_S)
        if not submission.resume and job_id(run_dir) != submission.id:
            refuse_taken(run_dir)
        write_job_id(run_dir, submission.id, submission.code)
        yield


def stored(run_dir: Path) -> tuple[int, bool]:
    """Training steps that a stored run has committed, and whether it came to an end after them."""
    records = VersionedStore.open(run_dir / "store").steps()
    return sum(r.kind == "step" for r in records), bool(records) and records[-1].kind == "end"


def at_home(submission: Submission, scheduler: str) -> RunConfig:
    """The job as it runs here: on this cluster, with the code that came with it in the run's folder."""
    tree = tomllib.loads(submission.job)
    tree["cluster"] |= {"kind": "address", "address": scheduler, "scheduler_file": ""}
    config = loading.from_tree(tree, submission.id)
    return with_code_in(config, config.run_dir / "code", submission.code)

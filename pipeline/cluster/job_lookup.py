"""Finds a cluster's jobs, follows their logs, and stops them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from staleflow.pipeline.cluster import job_registry, submitted_job
from staleflow.pipeline.cluster.connection import ClusterAddress
from staleflow.pipeline.cluster.gang import Needs
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.size_plan import describe_change_that_fits
from staleflow.stores.errors import ConfigError

POLL_S = 0.5
"""Seconds between polls of a followed log, or of a job until it has ended."""
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Match:
    """The job that a name or id refers to. note: why this job was chosen, if several match; otherwise empty."""

    job: dict[str, Any]
    note: str = ""


def find_matching(jobs: Sequence[dict[str, Any]], name_or_id: str) -> Match:
    """Find the job with this id, name, or beginning of an id. Of several, choose one that has not ended, or else the
    newest. Raises ConfigError if none matches.

    >>> jobs = [{"id": "far-1", "name": "far", "state": "running"}, {"id": "far-2", "name": "far", "state": "done"}]
    >>> find_matching(jobs, "far").note
    '2 jobs match far; far-1 is the one that has not ended'
    """
    matches = _all_matching(jobs, name_or_id)
    live_jobs = [j for j in matches if j["state"] not in submitted_job.ENDED]
    job = (live_jobs or matches)[-1]  # the registry lists them in the order of their submission
    if len(matches) == 1:
        return Match(job)
    chosen_job = "the newest" + (" that has not ended" if live_jobs else "")
    chosen_job = "the one that has not ended" if len(live_jobs) == 1 else chosen_job
    return Match(job, f"{len(matches)} jobs match {name_or_id}; {job['id']} is {chosen_job}")


def find_unambiguous(jobs: Sequence[dict[str, Any]], name_or_id: str) -> dict[str, Any]:
    """Find a job like `find_matching`, but raise ConfigError if several matching jobs have not ended. For operations
    that cannot be undone."""
    ids = [j["id"] for j in _all_matching(jobs, name_or_id) if j["state"] not in submitted_job.ENDED]
    if len(ids) > 1:
        raise ConfigError(f"{name_or_id!r}: {len(ids)} jobs have not ended: {', '.join(ids)}; name one by its id")
    return find_matching(jobs, name_or_id).job


def _all_matching(jobs: Sequence[dict[str, Any]], name_or_id: str) -> list[dict[str, Any]]:
    matches = (
        [j for j in jobs if j["id"] == name_or_id]
        or [j for j in jobs if j["name"] == name_or_id]
        or [j for j in jobs if name_or_id and j["id"].startswith(name_or_id)]
    )
    if not matches:
        raise ConfigError(
            f"{name_or_id!r} is not a job of this cluster; `staleflow jobs --all` lists them; for a job of an earlier "
            "scheduler name its run's folder, as in `staleflow status runs/NAME`"
        )
    return matches


def refuse_second_job(other_job: dict[str, Any]) -> None:
    """Raise ConfigError if another job uses the run folder of a submitted one, because both would write to it.
    other_job: the registry's reply to the submission."""
    if other_job:
        raise ConfigError(
            f"{other_job['run_dir']}: {other_job['id']} is {other_job['state']} and has this folder; wait until it "
            f"ends, or `staleflow cancel {other_job['id']}` it first"
        )


async def refuse_too_few_gpus(client: Any, config: RunConfig) -> None:
    """Raise ConfigError if all workers of a cluster together have too few GPUs for a job, or none with enough
    memory."""
    needs = asdict(Needs.from_config(config, has_driver_worker=True))
    while (reply := await job_registry.ask(client, "gpu_shortage", needs=needs)) is None:
        await asyncio.sleep(POLL_S)
    shortage, gpu_bytes = reply
    if shortage:
        remedy = describe_change_that_fits(config, len(gpu_bytes), max(gpu_bytes, default=0)) or (
            "start more workers, or lower rollout.instances, training.ranks, rollout.engine.tensor_parallel or "
            "cluster.gpus"
        )
        raise ConfigError(f"cluster: the run {shortage}; {remedy}")


def recent_jobs(jobs: Sequence[dict[str, Any]], now_s: float) -> list[dict[str, Any]]:
    """Return the jobs that have not ended, or ended within the last day. now_s: Unix time."""
    return [j for j in jobs if j["state"] not in submitted_job.ENDED or now_s - j["reported_at"] < DAY_S]


async def find_job(client: Any, name_or_id: str) -> dict[str, Any]:
    """Find a job of the cluster by name or id, as `find_matching` does. Raises ConfigError."""
    return find_matching(await job_registry.ask(client, "jobs"), name_or_id).job


async def all_jobs(cluster: ClusterAddress) -> list[dict[str, Any]]:
    """Return the jobs of a cluster, in order of submission. Raises ConfigError if it cannot be reached."""
    async with cluster.open_client() as client:
        jobs: list[dict[str, Any]] = await job_registry.ask(client, "jobs")
        return jobs


async def log_lines(cluster: ClusterAddress, id: str, *, follow: bool = False) -> AsyncGenerator[str, None]:
    """Yield a job's log lines; with `follow`, until the job has ended. Raises ConfigError."""
    async with cluster.open_client() as client:

        async def poll(start: int) -> tuple[int, list[str], bool]:
            has_ended = (await find_job(client, id))["state"] in submitted_job.ENDED  # before the lines: none is missed
            end, lines = await job_registry.ask(client, "lines", id=id, after=start)
            return end, lines, has_ended

        async for line in follow_lines(poll, follow=follow):
            yield line


async def follow_lines(
    poll: Callable[[int], Awaitable[tuple[int, list[str], bool]]], *, follow: bool
) -> AsyncIterator[str]:
    """Yield the lines of a log; with `follow`, until its job has ended. poll: receives a position in the log, 0 at the
    beginning, and returns the position of the end, the lines up to there, and whether the job has ended."""
    position, has_ended = 0, False
    while not has_ended:
        position, lines, has_ended = await poll(position)
        for line in lines:
            yield line
        if not follow:
            return
        if not has_ended:
            await asyncio.sleep(POLL_S)


async def wait_until_ended(cluster: ClusterAddress, id: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Wait until a job has ended, and return the registry's entry of it. Raises ConfigError. timeout_s: most seconds to
    wait; None waits as long as it takes."""
    loop = asyncio.get_running_loop()
    end_s = math.inf if timeout_s is None else loop.time() + timeout_s
    async with cluster.open_client() as client:
        while (job := await find_job(client, id))["state"] not in submitted_job.ENDED and loop.time() < end_s:
            await asyncio.sleep(POLL_S)
        return job


async def cancel_job(cluster: ClusterAddress, name_or_id: str, reason: str = "cancelled") -> tuple[dict[str, Any], str]:
    """Stop a job after its current step, or at once if it is waiting. Returns the job and its state before the request.
    Raises ConfigError."""
    async with cluster.open_client() as client:
        job = find_unambiguous(await job_registry.ask(client, "jobs"), name_or_id)
        state = await job_registry.ask(client, "stop", id=job["id"], why=reason)
        return await find_job(client, job["id"]), str(state)


async def retire_worker(cluster: ClusterAddress, name_or_id: str, worker: str) -> str:
    """Request that a running job releases one of its workers. Returns the job's id. Raises ConfigError if the job is
    not running."""
    async with cluster.open_client() as client:
        job = find_unambiguous(await job_registry.ask(client, "jobs"), name_or_id)["id"]
        state = await job_registry.ask(client, "retire", id=job, worker=worker)
    if state != "running":
        raise ConfigError(f"{job} is {state}: only a running job can release a worker")
    return str(job)

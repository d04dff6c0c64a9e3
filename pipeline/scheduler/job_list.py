"""Looking up a cluster's jobs and following their logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pipeline.scheduler import board
from stores.errors import ConfigError

POLL_S = 0.5
"""Seconds between polls of a followed log."""


async def find(client: Any, id: str) -> dict[str, Any]:
    """A job by its id or an unambiguous prefix of it. Raises ConfigError."""
    jobs = await board.ask(client, "jobs")
    found = [j for j in jobs if j["id"] == id] or [j for j in jobs if j["id"].startswith(id)]
    if len(found) != 1:
        many = f"matches {len(found)} jobs" if found else "is not a job of this cluster"
        raise ConfigError(f"{id!r} {many}; `staleflow jobs` lists them")
    job: dict[str, Any] = found[0]
    return job


async def follow(client: Any, id: str, *, after: int = 0, forever: bool = False) -> AsyncIterator[str]:
    """Yield a job's log lines; with `forever`, until the job has ended."""
    while True:
        state = (await find(client, id))["state"]
        after, lines = await board.ask(client, "lines", id=id, after=after)
        for line in lines:
            yield line
        if not forever or state in board.ENDED:
            return
        await asyncio.sleep(POLL_S)

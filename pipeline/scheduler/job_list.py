"""A cluster's jobs, as the commands that watch them ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pipeline.scheduler import board
from stores.errors import ConfigError

if TYPE_CHECKING:
    pass


POLL_S = 0.5
"""How often a followed log is looked at."""


async def find(client: Any, id: str) -> dict[str, Any]:
    """A job by its id, or by the beginning of one. Raises ConfigError."""
    jobs = await board.ask(client, "jobs")
    found = [j for j in jobs if j["id"] == id] or [j for j in jobs if j["id"].startswith(id)]
    if len(found) != 1:
        many = f"means {len(found)} jobs" if found else "is no job of this cluster"
        raise ConfigError(f"{id!r} {many}; `staleflow jobs` lists them")
    job: dict[str, Any] = found[0]
    return job


async def follow(client: Any, id: str, *, after: int = 0, forever: bool = False) -> AsyncIterator[str]:
    """A job's log lines; with `forever` until it has ended."""
    while True:
        state = (await find(client, id))["state"]
        after, lines = await board.ask(client, "lines", id=id, after=after)
        for line in lines:
            yield line
        if not forever or state in board.ENDED:
            return
        await asyncio.sleep(POLL_S)

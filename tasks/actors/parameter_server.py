"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. On other hosts it is fetched once, in chunks, from the server of a host
that has it, and appears by rename; instances that ask meanwhile wait for the same fetch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stores.parameters import ParameterFolder
from stores.trajectory import PolicyVersion
from tasks.actors.calls import answers_calls, call

CHUNK_BYTES = 64 * 2**20
"""Chunk size of a transfer: large enough that the network is the limit, small enough to hold twice in memory."""


@answers_calls
class ParameterServer:
    """The parameter server's Dask actor. `ensure` is idempotent."""

    def __init__(self, folder: str, call_s: float) -> None:
        self._folder = ParameterFolder(Path(folder))
        self._call_s = call_s
        self._fetching = asyncio.Lock()

    async def ensure(self, version: PolicyVersion, source: Any) -> str:
        """The path of `version` on this host, fetched from the parameter server `source` if it is missing."""
        async with self._fetching:
            path = self._folder.path(version)
            if not path.exists():
                chunks: list[bytes] = []
                while chunk := await call(
                    source,
                    "read_chunk",
                    version,
                    sum(map(len, chunks)),
                    CHUNK_BYTES,
                    within_s=self._call_s,
                    who="parameter server",
                ):
                    chunks.append(chunk)
                await asyncio.to_thread(self._folder.receive, version, chunks)
            return str(path)

    async def read_chunk(self, version: PolicyVersion, offset: int, size: int) -> bytes:
        """Read bytes of a published file; empty at its end."""
        return await asyncio.to_thread(self._folder.read_chunk, version, offset, size)

    async def prune(self, used: tuple[PolicyVersion, ...]) -> None:
        """Remove all versions except those in `used` and the newest."""
        self._folder.prune(used)

    async def close(self) -> None:
        """Free the shared memory."""
        self._folder.remove()

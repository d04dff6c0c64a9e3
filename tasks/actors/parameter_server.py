"""The parameter server: one actor a host, which makes a published version available to all instances of that host.

On the trainer's host the file is there already. Elsewhere it is fetched once, in pieces, from the server of a host that
has it, and appears by rename; instances of the host that ask meanwhile wait for the same fetch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stores.parameters import ParameterFolder
from stores.trajectory import PolicyVersion
from tasks.actors.calls import call

CHUNK_BYTES = 64 * 2**20
"""One piece of a transfer: large enough that the network is the limit, small enough to hold twice in memory."""


class ParameterServer:
    """The Dask actor. `ensure` is idempotent."""

    def __init__(self, folder: str, call_s: float) -> None:
        self._folder = ParameterFolder(Path(folder))
        self._call_s = call_s
        self._fetching = asyncio.Lock()

    async def ensure(self, version: PolicyVersion, source: Any) -> str:
        """Path of `version` on this host, fetched from the parameter server `source` if it is not here yet."""
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
        """Bytes of a published file; empty at its end."""
        return await asyncio.to_thread(self._folder.read_chunk, version, offset, size)

    async def prune(self, used: tuple[PolicyVersion, ...]) -> None:
        """Remove the versions that no instance of this host uses."""
        self._folder.prune(used)

    async def close(self) -> None:
        """Give the shared memory back."""
        self._folder.remove()

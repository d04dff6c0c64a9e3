"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. Other hosts fetch it in pieces from a host that has it, or is itself
about to have it: pieces are served as they arrive. Invariants:

- A version's file appears complete, by rename; instances that need it meanwhile wait for the same fetch.
- Each host reads each piece once. It retries a piece only after a source failed.
- A source that is gone, silent, slow, without the version, or that sends too few bytes is left for the next one; what
  has arrived is kept. Only when none is left the fetch fails, and the error names the sources.
- No more than PIECES_AT_ONCE pieces are in memory, whatever a version's size.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from staleflow.stores.errors import ActorFailed, ActorLost, StoreError, TransferFailed, raised_as
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.partial_file import PIECE_BYTES, PartialFile, Piece
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods

logger = logging.getLogger(__name__)

PIECES_AT_ONCE = 4
"""Pieces requested at once: while one is written, others are on their way."""
SILENT_S = 10.0
"""Seconds in which a source must send a piece; after that the next source is tried."""
WAIT_S = 2.0
"""Seconds that a call waits for a fetch before it returns the progress."""
AGAIN_S = 0.5
"""Seconds between two rounds through all sources, when none of them has sent anything."""


class Source(NamedTuple):
    """Another host's parameter server, which has a version or is fetching it. name: for messages."""

    name: str
    actor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Progress of fetching a version to a host. path: path of its file; empty until the file is complete."""

    path: str
    num_bytes: int


class SourceFailed(Exception):
    """A source could not send a piece."""


@remote_methods
class ParameterServer:
    """The parameter server's Dask actor. All methods are idempotent."""

    def __init__(self, folder: str, call_s: float, piece_bytes: int = PIECE_BYTES) -> None:
        """call_s: seconds without data from any source after which a fetch fails."""
        self._folder = WeightFolder(Path(folder))
        self._call_s, self._piece_bytes = call_s, piece_bytes
        self._silent_s = min(SILENT_S, call_s)
        self._fetching: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._incoming: dict[PolicyVersion, PartialFile] = {}
        """Files that are fetched or rebuilt once those before them are here."""
        self._bytes_read = 0

    async def ensure(
        self,
        version: PolicyVersion,
        num_bytes: int,
        sources: tuple[Source, ...],
    ) -> FetchProgress:
        """Start fetching a version unless it is present or being fetched. Returns after at most WAIT_S; call again
        until the result has a path.

        Args:
            num_bytes: of the version.
            sources: servers to fetch from; the first that works is used.

        Raises:
            TransferFailed: all sources have failed; the message names them.
            StoreError: the version cannot be written here.
        """
        path = self._folder.path(version)
        if not path.exists():
            fetching = self._fetching.get(version)
            if fetching is None:
                fetch = self._fetch(version, num_bytes, sources)
                fetching = self._fetching[version] = asyncio.ensure_future(fetch)
                fetching.add_done_callback(lambda done: self._forget(version, done))
            await asyncio.wait({fetching}, timeout=WAIT_S)
            if not fetching.done():
                incoming = self._incoming.get(version)
                return FetchProgress(path="", num_bytes=incoming.bytes_arrived if incoming is not None else 0)
            fetching.result()
        return FetchProgress(path=str(path), num_bytes=num_bytes)

    async def read_piece(self, version: PolicyVersion, offset: int, size: int) -> bytes | None:
        """Read bytes of a version. Returns None if they are being fetched and have not arrived within WAIT_S. Raises
        StoreError if the version is neither present nor being fetched."""
        path = self._folder.path(version)
        deadline = _now() + WAIT_S
        while True:
            incoming = self._incoming.get(version)
            if incoming is not None and incoming.has(offset, size):
                data = await asyncio.to_thread(incoming.read, offset, size)
            elif incoming is None and path.exists():
                data = await asyncio.to_thread(self._folder.read_chunk, path, offset, size)
            elif _now() < deadline:
                await asyncio.sleep(0.01)
                continue
            elif incoming is not None:
                return None
            else:
                raise StoreError(f"{path}: no such version here")
            self._bytes_read += len(data)
            return data

    async def bytes_read(self) -> int:
        """Return the number of bytes that other hosts have read from this server."""
        return self._bytes_read

    async def prune(self, used: tuple[PolicyVersion, ...], newest: PolicyVersion) -> None:
        """Remove all versions older than `newest` that are not in `used`. Later ones stay: they may have come into
        use."""
        later = [version for version in self._folder.versions() if version >= newest]
        await asyncio.to_thread(self._folder.prune, (*used, *later))  # freeing gigabytes takes a while

    async def close(self) -> None:
        """Stop all fetches and free the shared memory."""
        fetching = list(self._fetching.values())
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
        await asyncio.to_thread(self._folder.remove)

    def _forget(self, version: PolicyVersion, done: asyncio.Task[None]) -> None:
        del self._fetching[version]
        if not done.cancelled():
            done.exception()  # whoever waits for it raises it

    # -- fetching ------------------------------------------------------------------------------------------------

    async def _fetch(self, version: PolicyVersion, num_bytes: int, sources: tuple[Source, ...]) -> None:
        """Fetch a version, and serve its pieces to others as they arrive."""
        with self._folder.incoming(self._folder.path(version), num_bytes, self._piece_bytes) as incoming:
            self._incoming[version] = incoming
            try:
                await self._fetch_from_any(sources, version, incoming)
            finally:
                del self._incoming[version]

    async def _fetch_from_any(self, sources: tuple[Source, ...], version: PolicyVersion, incoming: PartialFile) -> None:
        """Fetch the missing pieces from the sources in turn. Raises TransferFailed once none has sent anything for
        call_s seconds."""
        failures: dict[str, str] = {}
        arrived, arrived_s = 0, _now()
        while incoming.missing:
            failures |= await self._round(sources, version, incoming)
            if not incoming.missing:
                return
            if incoming.bytes_arrived > arrived:
                arrived, arrived_s = incoming.bytes_arrived, _now()
            elif _now() - arrived_s > self._call_s or not sources:
                raise TransferFailed(
                    f"version {version} cannot be fetched: {'; '.join(failures.values()) or 'no source'}"
                )
            await asyncio.sleep(AGAIN_S)

    async def _round(
        self, sources: tuple[Source, ...], version: PolicyVersion, incoming: PartialFile
    ) -> dict[str, str]:
        """Fetch the missing pieces, trying each source once while there are any. Returns the errors of failed sources
        by their names."""
        failures: dict[str, str] = {}
        for source in sources:
            try:
                await self._fetch_from(source, version, incoming)
            except SourceFailed as failed:
                logger.warning("version %d after %d bytes: %s", version, incoming.bytes_arrived, failed)
                failures[source.name] = str(failed)
        return failures

    async def _fetch_from(self, source: Source, version: PolicyVersion, incoming: PartialFile) -> None:
        """Fetch the missing pieces from one source. Raises SourceFailed; what has arrived by then is kept."""
        needed = iter(list(incoming.missing.values()))

        async def fetch_some() -> None:
            for piece in needed:
                data = await self._read(source, version, piece)
                await asyncio.to_thread(incoming.write, piece, data)

        tasks = [asyncio.ensure_future(fetch_some()) for _ in range(PIECES_AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, source: Source, version: PolicyVersion, piece: Piece) -> bytes:
        """Read a piece from a source. Raises SourceFailed."""
        deadline = _now() + self._silent_s
        with raised_as(SourceFailed, f"{source.name} does not hand it on", ActorLost, ActorFailed, StoreError):
            data: bytes | None = None
            while data is None:
                remaining_s = deadline - _now()
                if remaining_s <= 0:
                    raise SourceFailed(f"{source.name} has sent nothing for {self._silent_s:g} s")
                data = await call_actor(
                    source.actor, "read_piece", version, *piece, timeout_s=remaining_s + WAIT_S, actor_name=source.name
                )
        if len(data) != piece.size:
            raise SourceFailed(f"{source.name} handed on {len(data)} of {piece.size} bytes at {piece.offset}")
        return data


def _now() -> float:
    return asyncio.get_running_loop().time()

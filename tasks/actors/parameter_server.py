"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. Other hosts fetch it in pieces from a host that has it, or is itself
about to have it: what has arrived is handed on before the rest. Invariants:

- A version's file appears by rename, whole; instances that ask meanwhile wait for the same fetch.
- Each piece is asked for again only if its source failed: a version's bytes are read once a host that fetches it.
- A source that is gone, silent, slow, without the version, or that hands on too few bytes is left for the next one,
  with all that has arrived kept. Only when none is left the fetch fails, and the error names the sources.
- No more than PIECES_AT_ONCE pieces are in memory, whatever a version's size.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stores.errors import ActorFailed, ActorLost, StoreError, TransferFailed
from stores.incoming import PIECE_BYTES, Incoming, Piece
from stores.parameters import ParameterFolder
from stores.trajectory import PolicyVersion
from tasks.actors.calls import answers_calls, call

logger = logging.getLogger(__name__)

PIECES_AT_ONCE = 4
"""Pieces asked for at once: while one is written, others are on their way."""
SILENT_S = 10.0
"""Seconds in which a source has to hand on a piece; then it counts as too slow, and another is asked."""
WAIT_S = 2.0
"""Seconds that a call waits for what is on its way, before it answers how far that has come."""
AGAIN_S = 0.5
"""Seconds between two rounds through all sources, when none of them has handed on anything."""


class Source(NamedTuple):
    """A parameter server that has a version, or fetches it. name: for messages."""

    name: str
    actor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How far a version has come to a host. path: of its file; empty until all of it is there."""

    path: str
    num_bytes: int


class SourceFailed(Exception):
    """A source could not hand on a piece."""


@answers_calls
class ParameterServer:
    """The parameter server's Dask actor. Safe to ask twice."""

    def __init__(self, folder: str, call_s: float, piece_bytes: int = PIECE_BYTES) -> None:
        """call_s: seconds without a piece from any source after which a fetch fails."""
        self._folder = ParameterFolder(Path(folder))
        self._call_s, self._piece_bytes = call_s, piece_bytes
        self._silent_s = min(SILENT_S, call_s)
        self._fetching: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._incoming: dict[PolicyVersion, Incoming] = {}
        self._bytes_read = 0

    async def ensure(self, version: PolicyVersion, num_bytes: int, sources: tuple[Source, ...]) -> Fetched:
        """Fetch `version`, of `num_bytes` bytes, from the first of `sources` that hands it on, unless it is here or on
        its way. Answers after WAIT_S at most: call again until there is a path. Raises TransferFailed, naming the
        sources, if all of them have failed; StoreError if it cannot be written here."""
        path = self._folder.path(version)
        if not path.exists():
            fetching = self._fetching.get(version)
            if fetching is None:
                fetching = self._fetching[version] = asyncio.ensure_future(self._fetch(version, num_bytes, sources))
                fetching.add_done_callback(lambda done: self._forget(version, done))
            await asyncio.wait({fetching}, timeout=WAIT_S)
            if not fetching.done():
                incoming = self._incoming.get(version)
                return Fetched(path="", num_bytes=0 if incoming is None else incoming.num_arrived)
            fetching.result()
        return Fetched(path=str(path), num_bytes=num_bytes)

    async def read_piece(self, version: PolicyVersion, offset: int, size: int) -> bytes | None:
        """Read bytes of a version. None if it is on its way here and they have not arrived within WAIT_S. Raises
        StoreError if the version is not here, and does not begin to arrive either."""
        deadline = _now() + WAIT_S
        while True:
            incoming = self._incoming.get(version)
            if incoming is not None and incoming.has(offset, size):
                data = await asyncio.to_thread(incoming.read, offset, size)
            elif incoming is None and self._folder.path(version).exists():
                data = await asyncio.to_thread(self._folder.read_chunk, version, offset, size)
            elif _now() < deadline:
                await asyncio.sleep(0.01)
                continue
            elif incoming is not None:
                return None
            else:
                raise StoreError(f"{self._folder.path(version)}: no such version here")
            self._bytes_read += len(data)
            return data

    async def bytes_read(self) -> int:
        """Bytes that others have read here."""
        return self._bytes_read

    async def prune(self, used: tuple[PolicyVersion, ...], newest: PolicyVersion) -> None:
        """Remove all versions except those in `used` and the newest here. newest: the one that was published last when
        this was decided; it and later ones may be in use by now."""
        later = [version for version in self._folder.versions() if version >= newest]
        await asyncio.to_thread(self._folder.prune, (*used, *later))  # freeing gigabytes takes a while

    async def close(self) -> None:
        """Stop fetching and free the shared memory."""
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
        with self._folder.incoming(version, num_bytes, self._piece_bytes) as incoming:
            self._incoming[version] = incoming
            try:
                await self._fetch_from_any(sources, version, incoming)
            finally:
                del self._incoming[version]

    async def _fetch_from_any(self, sources: tuple[Source, ...], version: PolicyVersion, incoming: Incoming) -> None:
        """Fetch all that is missing from the sources in turn. Raises TransferFailed once none has handed on anything
        for call_s seconds."""
        failures: dict[str, str] = {}
        arrived, arrived_s = 0, _now()
        while incoming.missing:
            for source in sources:
                try:
                    await self._fetch_from(source, version, incoming)
                    return
                except SourceFailed as failed:
                    logger.warning("version %d after %d bytes: %s", version, incoming.num_arrived, failed)
                    failures[source.name] = str(failed)
            if incoming.num_arrived > arrived:
                arrived, arrived_s = incoming.num_arrived, _now()
            elif _now() - arrived_s > self._call_s or not sources:
                raise TransferFailed(
                    f"version {version} cannot be fetched: {'; '.join(failures.values()) or 'no source'}"
                )
            await asyncio.sleep(AGAIN_S)

    async def _fetch_from(self, source: Source, version: PolicyVersion, incoming: Incoming) -> None:
        """Fetch all that is missing from one source. Raises SourceFailed; what has arrived by then is kept."""
        wanted = iter(list(incoming.missing.values()))

        async def fetch_some() -> None:
            for piece in wanted:
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
        try:
            data: bytes | None = None
            while data is None:
                left_s = deadline - _now()
                if left_s <= 0:
                    raise SourceFailed(f"{source.name} has not come further for {self._silent_s:g} s")
                data = await call(
                    source.actor, "read_piece", version, *piece, within_s=left_s + WAIT_S, who=source.name
                )
        except (ActorLost, ActorFailed, StoreError) as error:
            raise SourceFailed(f"{source.name} does not hand it on: {error}") from error
        if len(data) != piece.size:
            raise SourceFailed(f"{source.name} handed on {len(data)} of {piece.size} bytes at {piece.offset}")
        return data


def _now() -> float:
    return asyncio.get_running_loop().time()

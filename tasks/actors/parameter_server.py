"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. Other hosts fetch it in pieces from a host that has it, or is itself
about to have it: pieces are served as they arrive. Invariants:

- A version's file appears complete, by rename; instances that need it meanwhile wait for the same fetch.
- Each host reads each piece once. It retries a piece only after a source failed.
- A source that is gone, silent, slow, without the version, or that sends too few bytes is left for the next one; what
  has arrived is kept. Only when none is left the fetch fails, and the error names the sources.
- No more than PIECES_AT_ONCE pieces are in memory, whatever a version's size.
- A host that has an older version fetches the deltas since then (stores/weights/weight_delta.py), if they are smaller.
  It serves these deltas as it does versions, and serves the rebuilt version once its fingerprint is the published one.
  If anything fails, it fetches the complete version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from staleflow.stores.errors import ActorFailed, ActorLost, StoreError, TransferFailed
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.partial_file import PIECE_BYTES, PartialFile, Piece
from staleflow.stores.weights.weight_delta import DeltaFile
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
    """A parameter server that has a version, or fetches it. name: for messages."""

    name: str
    actor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Progress of fetching a version to a host. path: of its file; empty until it is complete."""

    path: str
    num_bytes: int
    without_delta: str = ""
    """Why this host fetches the complete version although there are deltas to it; reported once for each version."""


class WeightsFile(NamedTuple):
    """A file of a version: the complete version, or its delta to the version before."""

    version: PolicyVersion
    delta: bool = False


class SourceFailed(Exception):
    """A source could not send a piece."""


@remote_methods
class ParameterServer:
    """The parameter server's Dask actor. All methods are idempotent."""

    def __init__(self, folder: str, call_s: float, piece_bytes: int = PIECE_BYTES) -> None:
        """call_s: seconds without a piece from any source after which a fetch fails."""
        self._folder = WeightFolder(Path(folder))
        self._call_s, self._piece_bytes = call_s, piece_bytes
        self._silent_s = min(SILENT_S, call_s)
        self._fetching: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._incoming: dict[WeightsFile, PartialFile] = {}
        self._expected: set[WeightsFile] = set()
        """Files that are fetched or rebuilt once those before them are here."""
        self._without_delta: dict[PolicyVersion, str] = {}
        self._rebuilding = asyncio.Lock()
        self._bytes_read = 0

    async def ensure(
        self,
        version: PolicyVersion,
        num_bytes: int,
        sources: tuple[Source, ...],
        deltas: tuple[DeltaFile, ...] = (),
        recorded: str = "",
    ) -> FetchProgress:
        """Fetch a version, unless it is here or on its way. Returns after WAIT_S at most: call again until there is a
        path.

        Args:
            num_bytes: of the complete version.
            sources: servers to fetch from; the first that works is used.
            deltas: of successive versions up to this one, from which it may be rebuilt on an older version here.
            recorded: the fingerprint that a rebuilt version must have.

        Raises:
            TransferFailed: all sources have failed; the message names them.
            StoreError: the version cannot be written here.
        """
        path = self._folder.path(version)
        if not path.exists():
            fetching = self._fetching.get(version)
            if fetching is None:
                fetch = self._fetch(version, num_bytes, sources, deltas, recorded)
                fetching = self._fetching[version] = asyncio.ensure_future(fetch)
                fetching.add_done_callback(lambda done: self._forget(version, done))
            await asyncio.wait({fetching}, timeout=WAIT_S)
            if not fetching.done():
                arrived = sum(
                    partial.bytes_arrived for item, partial in self._incoming.items() if item.version == version
                )
                return FetchProgress(path="", num_bytes=arrived)
            fetching.result()
        return FetchProgress(path=str(path), num_bytes=num_bytes, without_delta=self._without_delta.pop(version, ""))

    async def read_piece(self, version: PolicyVersion, offset: int, size: int, delta: bool = False) -> bytes | None:
        """Read bytes of a version, or of its delta. None if they are on their way and have not arrived within WAIT_S.
        Raises StoreError if the version is neither here nor on its way."""
        item = WeightsFile(version, delta)
        path = self._path(item)
        deadline = _now() + WAIT_S
        while True:
            incoming = self._incoming.get(item)
            if incoming is not None and incoming.has(offset, size):
                data = await asyncio.to_thread(incoming.read, offset, size)
            elif incoming is None and path.exists():
                data = await asyncio.to_thread(self._folder.read_chunk, path, offset, size)
            elif _now() < deadline and not (delta and self._expects_complete(version)):
                await asyncio.sleep(0.01)
                continue
            elif incoming is not None or item in self._expected:
                return None
            else:
                raise StoreError(f"{path}: no such version here")
            self._bytes_read += len(data)
            return data

    async def bytes_read(self) -> int:
        """Return the number of bytes that other hosts have read here."""
        return self._bytes_read

    async def prune(self, used: tuple[PolicyVersion, ...], newest: PolicyVersion) -> None:
        """Remove all versions except those in `used`, and except `newest` and later ones: they may be in use by now."""
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

    def _path(self, item: WeightsFile) -> Path:
        return self._folder.delta_path(item.version) if item.delta else self._folder.path(item.version)

    def _expects_complete(self, version: PolicyVersion) -> bool:
        """Return True if the complete version is here or on its way, so that no delta will come."""
        return WeightsFile(version) in self._incoming or self._folder.path(version).exists()

    # -- fetching ------------------------------------------------------------------------------------------------

    async def _fetch(
        self,
        version: PolicyVersion,
        num_bytes: int,
        sources: tuple[Source, ...],
        deltas: tuple[DeltaFile, ...],
        recorded: str,
    ) -> None:
        base = self._base(version, num_bytes, deltas)
        if base is not None:
            needed = [delta for delta in deltas if delta.version > base]
            try:
                await self._rebuild(version, base, needed, sources, recorded)
                return
            except (SourceFailed, StoreError) as failed:
                self._without_delta[version] = str(failed)
        with self._receiving(WeightsFile(version), num_bytes) as incoming:
            await self._fetch_from_any(sources, WeightsFile(version), incoming)

    def _base(self, version: PolicyVersion, num_bytes: int, deltas: tuple[DeltaFile, ...]) -> PolicyVersion | None:
        """Return the newest version here whose deltas up to `version` are smaller than `version` itself."""
        first = deltas[0].version if deltas else version
        older = [held_version for held_version in self._folder.versions() if first - 1 <= held_version < version]
        if not older or sum(delta.num_bytes for delta in deltas if delta.version > older[-1]) >= num_bytes:
            return None
        return older[-1]

    async def _rebuild(
        self,
        version: PolicyVersion,
        base: PolicyVersion,
        deltas: Sequence[DeltaFile],
        sources: tuple[Source, ...],
        recorded: str,
    ) -> None:
        """Fetch deltas, and rebuild `version` from `base`. Raises SourceFailed or StoreError."""
        expected = {
            WeightsFile(version),
            *(WeightsFile(delta.version, delta=True) for delta in deltas),
        } - self._expected
        self._expected |= expected
        try:
            async with self._rebuilding:  # two versions may need the same delta
                for delta in deltas:
                    item = WeightsFile(delta.version, delta=True)
                    if not self._path(item).exists():
                        with self._receiving(item, delta.num_bytes) as incoming:
                            failures = await self._round(sources, item, incoming)
                            if incoming.missing:
                                raise SourceFailed("; ".join(failures.values()) or "no source")
                await asyncio.to_thread(self._folder.rebuild, version, base, recorded)
        finally:
            self._expected -= expected

    @contextlib.contextmanager
    def _receiving(self, item: WeightsFile, num_bytes: int) -> Iterator[PartialFile]:
        """Receive a file, and serve its pieces to others as they arrive."""
        with self._folder.incoming(self._path(item), num_bytes, self._piece_bytes) as incoming:
            self._incoming[item] = incoming
            try:
                yield incoming
            finally:
                del self._incoming[item]

    async def _fetch_from_any(self, sources: tuple[Source, ...], item: WeightsFile, incoming: PartialFile) -> None:
        """Fetch the missing pieces from the sources in turn. Raises TransferFailed once none has sent anything for
        call_s seconds."""
        failures: dict[str, str] = {}
        arrived, arrived_s = 0, _now()
        while incoming.missing:
            failures |= await self._round(sources, item, incoming)
            if not incoming.missing:
                return
            if incoming.bytes_arrived > arrived:
                arrived, arrived_s = incoming.bytes_arrived, _now()
            elif _now() - arrived_s > self._call_s or not sources:
                raise TransferFailed(
                    f"version {item.version} cannot be fetched: {'; '.join(failures.values()) or 'no source'}"
                )
            await asyncio.sleep(AGAIN_S)

    async def _round(self, sources: tuple[Source, ...], item: WeightsFile, incoming: PartialFile) -> dict[str, str]:
        """Fetch the missing pieces, trying each source once. Returns the errors of failed sources by their names."""
        failures: dict[str, str] = {}
        for source in sources:
            try:
                await self._fetch_from(source, item, incoming)
                break
            except SourceFailed as failed:
                logger.warning("version %d after %d bytes: %s", item.version, incoming.bytes_arrived, failed)
                failures[source.name] = str(failed)
        return failures

    async def _fetch_from(self, source: Source, item: WeightsFile, incoming: PartialFile) -> None:
        """Fetch the missing pieces from one source. Raises SourceFailed; what has arrived by then is kept."""
        needed = iter(list(incoming.missing.values()))

        async def fetch_some() -> None:
            for piece in needed:
                data = await self._read(source, item, piece)
                await asyncio.to_thread(incoming.write, piece, data)

        tasks = [asyncio.ensure_future(fetch_some()) for _ in range(PIECES_AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, source: Source, item: WeightsFile, piece: Piece) -> bytes:
        """Read a piece from a source. Raises SourceFailed."""
        deadline = _now() + self._silent_s
        args = (item.version, *piece, *([True] if item.delta else []))
        try:
            data: bytes | None = None
            while data is None:
                remaining_s = deadline - _now()
                if remaining_s <= 0:
                    raise SourceFailed(f"{source.name} has sent nothing for {self._silent_s:g} s")
                data = await call_actor(
                    source.actor, "read_piece", *args, timeout_s=remaining_s + WAIT_S, actor_name=source.name
                )
        except (ActorLost, ActorFailed, StoreError) as error:
            raise SourceFailed(f"{source.name} does not hand it on: {error}") from error
        if len(data) != piece.size:
            raise SourceFailed(f"{source.name} handed on {len(data)} of {piece.size} bytes at {piece.offset}")
        return data


def _now() -> float:
    return asyncio.get_running_loop().time()

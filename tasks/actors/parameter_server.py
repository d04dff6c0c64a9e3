"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. Other hosts fetch it in pieces from a host that has it, or is itself
about to have it: what has arrived is handed on before the rest. Invariants:

- A version's file appears by rename, whole; instances that ask meanwhile wait for the same fetch.
- Each piece is asked for again only if its source failed: a version's bytes are read once a host that fetches it.
- A source that is gone, silent, slow, without the version, or that hands on too few bytes is left for the next one,
  with all that has arrived kept. Only when none is left the fetch fails, and the error names the sources.
- No more than PIECES_AT_ONCE pieces are in memory, whatever a version's size.
- A host that has an older version fetches what has changed since (stores/weights/weight_delta.py), if that is less. It
  hands on these deltas as it does versions, and what it makes of them once its fingerprint is the published one. If
  anything fails, it fetches the version itself.
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
from staleflow.tasks.actors.actor_calls import call, remote_methods

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
class FetchProgress:
    """How far a version has come to a host. path: of its file; empty until all of it is there."""

    path: str
    num_bytes: int
    without_delta: str = ""
    """Why this host has to fetch a version whole though there are deltas to it; told once for each version."""


class WeightsFile(NamedTuple):
    """A file of a version: what has changed since the version before, or the version itself."""

    version: PolicyVersion
    delta: bool = False


class SourceFailed(Exception):
    """A source could not hand on a piece."""


@remote_methods
class ParameterServer:
    """The parameter server's Dask actor. Safe to ask twice."""

    def __init__(self, folder: str, call_s: float, piece_bytes: int = PIECE_BYTES) -> None:
        """call_s: seconds without a piece from any source after which a fetch fails."""
        self._folder = WeightFolder(Path(folder))
        self._call_s, self._piece_bytes = call_s, piece_bytes
        self._silent_s = min(SILENT_S, call_s)
        self._fetching: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._incoming: dict[WeightsFile, PartialFile] = {}
        self._expected: set[WeightsFile] = set()
        """Files that come, or are made, once those before them are here."""
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
        """Fetch `version`, of `num_bytes` bytes, from the first of `sources` that hands it on, unless it is here or on
        its way. Answers after WAIT_S at most: call again until there is a path. deltas: of one version after the other
        up to this one; with them it may be made of an older version that is here, if it then has the fingerprint
        `recorded`. Raises TransferFailed, naming the sources, if all of them have failed; StoreError if it cannot be
        written here."""
        path = self._folder.path(version)
        if not path.exists():
            fetching = self._fetching.get(version)
            if fetching is None:
                coming = self._fetch(version, num_bytes, sources, deltas, recorded)
                fetching = self._fetching[version] = asyncio.ensure_future(coming)
                fetching.add_done_callback(lambda done: self._forget(version, done))
            await asyncio.wait({fetching}, timeout=WAIT_S)
            if not fetching.done():
                arrived = sum(one.bytes_arrived for item, one in self._incoming.items() if item.version == version)
                return FetchProgress(path="", num_bytes=arrived)
            fetching.result()
        return FetchProgress(path=str(path), num_bytes=num_bytes, without_delta=self._without_delta.pop(version, ""))

    async def read_piece(self, version: PolicyVersion, offset: int, size: int, delta: bool = False) -> bytes | None:
        """Read bytes of a version, or of its delta. None if it is on its way here and they have not arrived within
        WAIT_S. Raises StoreError if it is not here, and does not begin to arrive either."""
        item = WeightsFile(version, delta)
        path = self._path(item)
        deadline = _now() + WAIT_S
        while True:
            incoming = self._incoming.get(item)
            if incoming is not None and incoming.has(offset, size):
                data = await asyncio.to_thread(incoming.read, offset, size)
            elif incoming is None and path.exists():
                data = await asyncio.to_thread(self._folder.read_chunk, path, offset, size)
            elif _now() < deadline and not (delta and self._comes_whole(version)):
                await asyncio.sleep(0.01)
                continue
            elif incoming is not None or item in self._expected:
                return None
            else:
                raise StoreError(f"{path}: no such version here")
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

    def _path(self, item: WeightsFile) -> Path:
        return self._folder.delta_path(item.version) if item.delta else self._folder.path(item.version)

    def _comes_whole(self, version: PolicyVersion) -> bool:
        """Whether a version is here, or comes, without its delta."""
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
        with self._coming(WeightsFile(version), num_bytes) as incoming:
            await self._fetch_from_any(sources, WeightsFile(version), incoming)

    def _base(self, version: PolicyVersion, num_bytes: int, deltas: tuple[DeltaFile, ...]) -> PolicyVersion | None:
        """The newest version here from which it is less to fetch the deltas than all of `version`."""
        first = deltas[0].version if deltas else version
        older = [one for one in self._folder.versions() if first - 1 <= one < version]
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
        """Fetch these deltas, and make `version` of `base`. Raises SourceFailed or StoreError."""
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
                        with self._coming(item, delta.num_bytes) as incoming:
                            failures = await self._round(sources, item, incoming)
                            if incoming.missing:
                                raise SourceFailed("; ".join(failures.values()) or "no source")
                await asyncio.to_thread(self._folder.rebuild, version, base, recorded)
        finally:
            self._expected -= expected

    @contextlib.contextmanager
    def _coming(self, item: WeightsFile, num_bytes: int) -> Iterator[PartialFile]:
        """A file that is on its way here, of which is handed on what has arrived."""
        with self._folder.incoming(self._path(item), num_bytes, self._piece_bytes) as incoming:
            self._incoming[item] = incoming
            try:
                yield incoming
            finally:
                del self._incoming[item]

    async def _fetch_from_any(self, sources: tuple[Source, ...], item: WeightsFile, incoming: PartialFile) -> None:
        """Fetch all that is missing from the sources in turn. Raises TransferFailed once none has handed on anything
        for call_s seconds."""
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
        """Fetch what is missing from the sources, each once, until nothing is; returns why those that failed did, by
        their names."""
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
        """Fetch all that is missing from one source. Raises SourceFailed; what has arrived by then is kept."""
        wanted = iter(list(incoming.missing.values()))

        async def fetch_some() -> None:
            for piece in wanted:
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
                left_s = deadline - _now()
                if left_s <= 0:
                    raise SourceFailed(f"{source.name} has not come further for {self._silent_s:g} s")
                data = await call(source.actor, "read_piece", *args, within_s=left_s + WAIT_S, who=source.name)
        except (ActorLost, ActorFailed, StoreError) as error:
            raise SourceFailed(f"{source.name} does not hand it on: {error}") from error
        if len(data) != piece.size:
            raise SourceFailed(f"{source.name} handed on {len(data)} of {piece.size} bytes at {piece.offset}")
        return data


def _now() -> float:
    return asyncio.get_running_loop().time()

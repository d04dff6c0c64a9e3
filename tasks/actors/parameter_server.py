"""The parameter server: one actor per host that makes published versions available to the host's instances.

On the trainer's host the file already exists. Other hosts fetch it in pieces from a host that has it, or is itself
about to have it: pieces are served as they arrive. Invariants:

- A version's file appears complete, by rename; instances that need it meanwhile wait for the same fetch.
- Each host reads each piece once. It retries a piece only after a source failed.
- A source that is gone, silent, slow, without the version, or that sends too few bytes is left for the next one; what
  has arrived is kept. Only when none is left the fetch fails, and the error names the sources.
- A fetch has at most MAX_PIECES_IN_MEMORY pieces in memory, whatever a version's size; a source has one for each
  request of another host.

An instance's weights and logprobs are checked against the published version after a pull.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from staleflow.stores.errors import ActorFailed, ActorLost, StoreError, TransferFailed, raised_as
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights.weight_folder import (
    TRANSFER_PIECE_BYTES,
    PartialFile,
    Piece,
    WeightFolder,
    remove_unused_folders,
)
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.engines.base import LoadResult

logger = logging.getLogger(__name__)

MAX_PIECES_IN_MEMORY = 4
"""Number of pieces that are requested concurrently: one is written while others are transferred."""
SOURCE_TIMEOUT_S = 10.0
"""Seconds within which a source must send a piece; then the next source is tried."""
MAX_WAIT_S = 2.0
"""Maximum number of seconds that a call waits for a fetch before it returns the progress."""
RETRY_PAUSE_S = 0.5
"""Seconds between two attempts to fetch from all sources."""


class WeightSource(NamedTuple):
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

    def __init__(self, folder: str, call_s: float, piece_bytes: int = TRANSFER_PIECE_BYTES) -> None:
        """call_s: seconds without data from any source after which a fetch fails."""
        self._folder = WeightFolder(Path(folder))  # first, to keep the versions of a lost server that this one replaces
        remove_unused_folders(Path(folder).parent)
        self._call_s, self._piece_bytes = call_s, piece_bytes
        self._source_timeout_s = min(SOURCE_TIMEOUT_S, call_s)
        self._fetch_tasks: dict[PolicyVersion, asyncio.Task[None]] = {}
        self._partial_files: dict[PolicyVersion, PartialFile] = {}
        """Files that are being fetched."""
        self._bytes_read = 0

    async def ensure_version(
        self,
        version: PolicyVersion,
        num_bytes: int,
        sources: tuple[WeightSource, ...],
    ) -> FetchProgress:
        """Start fetching a version unless it is present or being fetched. Returns after at most MAX_WAIT_S; call again
        until the result has a path.

        Args:
            num_bytes: Size of the version's file.
            sources: Servers to fetch from; the first that works is used.

        Raises:
            TransferFailed: all sources have failed; the message names them.
            StoreError: the version cannot be written here.
        """
        path = self._folder.path(version)
        if not path.exists():
            fetch_task = self._fetch_tasks.get(version)
            if fetch_task is None:
                fetch = self._fetch(version, num_bytes, sources)
                fetch_task = self._fetch_tasks[version] = asyncio.ensure_future(fetch)
                fetch_task.add_done_callback(lambda task: self._remove_fetch_task(version, task))
            await asyncio.wait({fetch_task}, timeout=MAX_WAIT_S)
            if not fetch_task.done():
                partial_file = self._partial_files.get(version)
                return FetchProgress(path="", num_bytes=partial_file.bytes_arrived if partial_file is not None else 0)
            fetch_task.result()
        return FetchProgress(path=str(path), num_bytes=num_bytes)

    async def read_piece(self, version: PolicyVersion, offset: int, size: int) -> bytes | None:
        """Read bytes of a version. Returns None if they are being fetched and have not arrived within MAX_WAIT_S.
        Raises StoreError if the version is neither present nor being fetched."""
        path = self._folder.path(version)
        deadline = _now() + MAX_WAIT_S
        while True:
            partial_file = self._partial_files.get(version)
            if partial_file is not None and partial_file.has(offset, size):
                data = await asyncio.to_thread(partial_file.read, offset, size)
            elif partial_file is None and path.exists():
                data = await asyncio.to_thread(self._folder.read_piece, path, offset, size)
            elif _now() < deadline:
                await asyncio.sleep(0.01)
                continue
            elif partial_file is not None:
                return None
            else:
                raise StoreError(f"{path}: no such version here")
            self._bytes_read += len(data)
            return data

    async def bytes_read(self) -> int:
        """Return the number of bytes that other hosts have read from this server."""
        return self._bytes_read

    async def prune(self, used_versions: tuple[PolicyVersion, ...], newest_version: PolicyVersion) -> None:
        """Remove all versions older than `newest_version` that are not in `used_versions`. Later ones stay: they may
        have come into use."""
        later_versions = [version for version in self._folder.versions() if version >= newest_version]
        await asyncio.to_thread(
            self._folder.prune, (*used_versions, *later_versions)
        )  # freeing gigabytes takes a while

    async def close(self) -> None:
        """Stop all fetches and free the shared memory."""
        fetch_tasks = list(self._fetch_tasks.values())
        for task in fetch_tasks:
            task.cancel()
        await asyncio.gather(*fetch_tasks, return_exceptions=True)
        await asyncio.to_thread(self._folder.remove)

    def _remove_fetch_task(self, version: PolicyVersion, fetch_task: asyncio.Task[None]) -> None:
        del self._fetch_tasks[version]
        if not fetch_task.cancelled():
            fetch_task.exception()  # its error is raised where it is awaited

    # -- fetching ------------------------------------------------------------------------------------------------

    async def _fetch(self, version: PolicyVersion, num_bytes: int, sources: tuple[WeightSource, ...]) -> None:
        """Fetch a version, and serve its pieces to others as they arrive."""
        with self._folder.receive(self._folder.path(version), num_bytes, self._piece_bytes) as partial_file:
            self._partial_files[version] = partial_file
            try:
                await self._fetch_from_any(sources, version, partial_file)
            finally:
                del self._partial_files[version]

    async def _fetch_from_any(
        self, sources: tuple[WeightSource, ...], version: PolicyVersion, partial_file: PartialFile
    ) -> None:
        """Fetch the missing pieces from the sources in turn. Raises TransferFailed once none has sent anything for
        call_s seconds."""
        failures: dict[str, str] = {}
        bytes_arrived, arrived_s = 0, _now()
        while partial_file.missing_pieces:
            for source in sources:
                try:
                    return await self._fetch_from(source, version, partial_file)
                except SourceFailed as error:
                    logger.warning("version %d after %d bytes: %s", version, partial_file.bytes_arrived, error)
                    failures[source.name] = str(error)
            if partial_file.bytes_arrived > bytes_arrived:
                bytes_arrived, arrived_s = partial_file.bytes_arrived, _now()
            elif _now() - arrived_s > self._call_s or not sources:
                raise TransferFailed(
                    f"version {version} cannot be fetched: {'; '.join(failures.values()) or 'no source'}"
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _fetch_from(self, source: WeightSource, version: PolicyVersion, partial_file: PartialFile) -> None:
        """Fetch the missing pieces from one source. Raises SourceFailed; what has arrived by then is kept."""
        pieces = iter(list(partial_file.missing_pieces.values()))

        async def fetch_pieces() -> None:
            for piece in pieces:
                data = await self._read(source, version, piece)
                await asyncio.to_thread(partial_file.write, piece, data)

        tasks = [asyncio.ensure_future(fetch_pieces()) for _ in range(MAX_PIECES_IN_MEMORY)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, source: WeightSource, version: PolicyVersion, piece: Piece) -> bytes:
        """Read a piece from a source. Raises SourceFailed."""
        deadline = _now() + self._source_timeout_s
        with raised_as(SourceFailed, f"{source.name} cannot send it", ActorLost, ActorFailed, StoreError):
            data: bytes | None = None
            while data is None:
                if _now() >= deadline:
                    raise SourceFailed(f"{source.name} has sent nothing for {self._source_timeout_s:g} s")
                data = await call_actor(
                    source.actor,
                    "read_piece",
                    version,
                    *piece,
                    timeout_s=deadline - _now() + MAX_WAIT_S,
                    actor_name=source.name,
                )
        if len(data) != piece.size:
            raise SourceFailed(f"{source.name} sent {len(data)} of {piece.size} bytes at {piece.offset}")
        return data


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version as the trainer published it."""

    version: PolicyVersion
    fingerprint: str
    probe_tokens: tuple[int, ...]
    """Tokens whose logprobs are compared; empty where contexts are too short for any."""
    probe_logprobs: tuple[float, ...]
    """The trainer's logprobs of probe_tokens[1:], nats."""
    drift_limit: float
    """The largest mean difference that an instance may have, nats."""

    def check(self, instance: InstanceId, load_result: LoadResult, probe_logprobs: tuple[float, ...]) -> WeightCheck:
        """Check whether an instance may serve the weights that it has loaded. probe_logprobs: logprobs of
        probe_tokens[1:] under them, nats."""
        drift = mean_absolute_difference(probe_logprobs, self.probe_logprobs)
        reasons = []
        if load_result.fingerprint != self.fingerprint:
            reasons.append(f"it has read {load_result.fingerprint}, {self.fingerprint} was published")
        if load_result.weights.contradicted:
            reasons.append(load_result.weights.line)
        if not drift <= self.drift_limit:  # nor NaN
            reasons.append(
                f"logprobs of the probe are {drift:.3g} nats off the trainer's on average, "
                f"rollout.logprob_drift_limit allows {self.drift_limit:.3g}"
            )
        return WeightCheck(
            instance=instance,
            version=self.version,
            fingerprint=load_result.fingerprint,
            weights=load_result.weights,
            drift=drift,
            limit=self.drift_limit,
            refused="; ".join(reasons),
        )


def mean_absolute_difference(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the mean absolute difference of two lists of logprobs, in nats; 0 for empty lists.

    >>> mean_absolute_difference((-1.0, -2.0), (-1.5, -2.0))
    0.25
    """
    pairs = list(zip(first, second, strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))

"""Broadcast of weights from the trainer's host to all other hosts along a tree.

A host sends the bytes that it has received to other hosts while it still receives the rest. So each host can join the
tree at once, and the last host has all bytes soon after the first. Invariants:

- A host fetches from hosts that have the whole version or began to fetch it earlier, so there are no cycles.
- At most FAN_OUT hosts fetch from one host at a time, unless a fetch fails.
- A host gets several sources, the root among them, and uses the next one when one fails.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from staleflow.pipeline.processes.clock import now_s
from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.actors.actor_calls import transfer_timeout_s
from staleflow.tasks.actors.parameter_server import FetchProgress, WeightSource

logger = logging.getLogger(__name__)

FAN_OUT = 2
"""Hosts that fetch from one host at a time. The root sends FAN_OUT copies through its network; of 16 hosts the last is
four hosts away from it."""
SLOW_S = 5.0
"""Fetches that take longer, in seconds, are logged."""


class BroadcastTree:
    """Tree of the hosts that fetch one version. It chooses the sources of each host; it transfers nothing."""

    def __init__(self, root: str) -> None:
        self.complete_hosts: set[str] = {root}
        """Hosts that have the whole version."""
        self._parents: dict[str, str] = {}
        """Parent of each host that is fetching, in the order in which they began."""
        self._failed_hosts: set[str] = set()

    def join(self, host: str) -> tuple[str, ...]:
        """Add a host to the tree. Returns the hosts to fetch from, best first: those near the root with fewer than
        FAN_OUT children. A host that joins again while it fetches keeps its parent. A host whose fetch failed gets only
        hosts with the complete version, so that there are no cycles."""
        parent = self._parents.get(host)
        has_failed = host in self._failed_hosts
        earlier_hosts = [] if has_failed else list(itertools.takewhile(lambda h: h != host, self._parents))
        children = Counter(p for h, p in self._parents.items() if h != host)
        sources = sorted(
            [*(self.complete_hosts - {host}), *earlier_hosts],
            key=lambda h: (h != parent, children[h] >= FAN_OUT, self._depth(h), children[h], h),
        )
        if sources and host not in self.complete_hosts:
            self._parents.setdefault(host, sources[0])
        return tuple(sources)

    def mark_complete(self, host: str) -> None:
        """Record that a host has the complete version."""
        self._parents.pop(host, None)
        self._failed_hosts.discard(host)
        self.complete_hosts.add(host)

    def mark_failed(self, host: str) -> None:
        """Record that a host's fetch has failed."""
        self._parents.pop(host, None)
        self._failed_hosts.add(host)

    def _depth(self, host: str) -> int:
        depth = 0
        while host in self._parents:
            host, depth = self._parents[host], depth + 1
        return depth


class ActorCaller(Protocol):
    """Calls actors by name; see Actors."""

    def actor(self, name: str) -> Any: ...

    async def ask(self, name: str, method: str, *args: Any) -> Any: ...


class WeightTransfers:
    """Transfers versions to hosts, each version once per host. call_s: see deadlines.call_s."""

    def __init__(self, caller: ActorCaller, call_s: float) -> None:
        self._caller = caller
        self._call_s = call_s
        self._trees: dict[PolicyVersion, BroadcastTree] = {}
        self._num_bytes: dict[PolicyVersion, int] = {}
        self.bytes_arrived = 0
        """Bytes received by all hosts so far, none counted twice. While it grows, transfers make progress."""
        self._bytes_on_hosts: dict[tuple[PolicyVersion, str], int] = {}
        """Largest number of bytes of a version that a host has reported while it fetches."""

    def record_published(self, version: PolicyVersion, host: str, num_bytes: int) -> None:
        """Record that a host has a version which others can fetch. After a version is published again, two hosts may
        have it."""
        self._trees.setdefault(version, BroadcastTree(host)).mark_complete(host)
        self._num_bytes[version] = num_bytes

    def load_timeout_s(self, version: PolicyVersion) -> float:
        """Timeout for reading, hashing or loading a version, in seconds."""
        return transfer_timeout_s(self._call_s, self._num_bytes[version])

    def remove_unused(self, used_versions: Iterable[PolicyVersion]) -> None:
        """Forget the versions that are not used; the newest is kept."""
        for version in set(self._trees) - {*used_versions, max(self._trees, default=None)}:
            del self._trees[version], self._num_bytes[version]
        self._bytes_on_hosts = {key: count for key, count in self._bytes_on_hosts.items() if key[0] in self._trees}

    async def fetch(self, version: PolicyVersion, host: str) -> str:
        """Transfer a version to a host unless it is there, and return its path. There is no time limit while bytes
        arrive; each call of the host's parameter server is short. Raises ActorLost if that server is gone,
        TransferFailed if no bytes arrive from any source."""
        tree, num_bytes = self._trees[version], self._num_bytes[version]
        server_name, started_s = f"parameters-{host}", now_s()
        sources = self._sources(tree.join(host))
        next_warning_s = self.load_timeout_s(version)
        try:
            while not (progress := await self._ensure(server_name, version, num_bytes, sources)).path:
                self._count_bytes(version, host, progress.num_bytes)
                took_s = now_s() - started_s
                if took_s > next_warning_s:
                    logger.warning(
                        "%s has %d of %d bytes of version %d after %.0f s", server_name, progress.num_bytes, num_bytes,
                        version, took_s,
                    )  # fmt: skip
                    next_warning_s *= 2
        except BaseException:
            tree.mark_failed(host)
            raise
        tree.mark_complete(host)
        took_s = now_s() - started_s
        level = logging.INFO if took_s > SLOW_S else logging.DEBUG
        logger.log(level, "%s has version %d, %d bytes, after %.1f s", server_name, version, num_bytes, took_s)
        return progress.path

    def _count_bytes(self, version: PolicyVersion, host: str, num_bytes: int) -> None:
        previous = self._bytes_on_hosts.get((version, host), 0)
        self._bytes_on_hosts[version, host] = max(previous, num_bytes)
        self.bytes_arrived += max(0, num_bytes - previous)

    async def _ensure(
        self, name: str, version: PolicyVersion, num_bytes: int, sources: tuple[WeightSource, ...]
    ) -> FetchProgress:
        progress: FetchProgress = await self._caller.ask(name, "ensure_version", version, num_bytes, sources)
        return progress

    def _sources(self, hosts: tuple[str, ...]) -> tuple[WeightSource, ...]:
        """The parameter servers of these hosts; hosts without one are left out."""
        sources = []
        for host in hosts:
            with contextlib.suppress(ActorLost):
                sources.append(WeightSource(f"parameters-{host}", self._caller.actor(f"parameters-{host}")))
        return tuple(sources)

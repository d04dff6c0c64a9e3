"""The way of weights from host to host: a tree whose root is the trainer's host, and whose hosts serve what they have.

A host that fetches a version can already be fetched from: it hands on what has arrived. So every host that asks joins
the tree at once, and the last one has all bytes little later than the first. Invariants:

- A host fetches from hosts that have all of a version, or began to fetch it before: nobody waits for itself.
- No more than FAN_OUT hosts fetch from one at a time, as long as nothing fails.
- Every source is named together with others that a host may turn to when it fails, the root among them.
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
from staleflow.tasks.actors.actor_calls import timeout_for
from staleflow.tasks.actors.parameter_server import FetchProgress, Source

logger = logging.getLogger(__name__)

FAN_OUT = 2
"""Hosts that fetch from one host at a time. The root sends FAN_OUT copies through its network; of 16 hosts the last is
four hosts away from it."""
SLOW_S = 5.0
"""Fetches that take longer, in seconds, are logged."""


class BroadcastTree:
    """Who fetches one version from whom. Decides as hosts ask; does nothing."""

    def __init__(self, root: str) -> None:
        self.complete_hosts: set[str] = {root}
        """Hosts that have all of it."""
        self._parents: dict[str, str] = {}
        """Of the hosts that fetch it now, in the order in which they began."""
        self._failed: set[str] = set()

    def join(self, host: str) -> tuple[str, ...]:
        """The hosts to fetch from, best first: those near the root, FAN_OUT at each. A host that asks again while it
        fetches keeps its parent. One whose fetch has failed waits for nobody who may wait for it: it is sent to hosts
        that have the whole version."""
        parent = self._parents.get(host)
        earlier = [] if host in self._failed else list(itertools.takewhile(lambda h: h != host, self._parents))
        children = Counter(p for h, p in self._parents.items() if h != host)
        ranked = sorted(
            [*(self.complete_hosts - {host}), *earlier],
            key=lambda h: (h != parent, children[h] >= FAN_OUT, self._depth(h), children[h], h),
        )
        if ranked and host not in self.complete_hosts:
            self._parents.setdefault(host, ranked[0])
        return tuple(ranked)

    def arrived(self, host: str) -> None:
        """Note that a host has the version."""
        self._parents.pop(host, None)
        self._failed.discard(host)
        self.complete_hosts.add(host)

    def failed(self, host: str) -> None:
        """Note that a host has given up."""
        self._parents.pop(host, None)
        self._failed.add(host)

    def _depth(self, host: str) -> int:
        depth = 0
        while host in self._parents:
            host, depth = self._parents[host], depth + 1
        return depth


class Caller(Protocol):
    """Calls actors by name; see Actors."""

    def actor(self, name: str) -> Any: ...

    async def ask(self, name: str, method: str, *args: Any) -> Any: ...


class WeightTransfers:
    """Brings versions to hosts, each to a host once. call_s: see deadlines.call_s."""

    def __init__(self, caller: Caller, call_s: float) -> None:
        self._caller = caller
        self._call_s = call_s
        self._trees: dict[PolicyVersion, BroadcastTree] = {}
        self._num_bytes: dict[PolicyVersion, int] = {}
        self.bytes_arrived = 0
        """Bytes that have arrived on hosts so far, none counted twice: as long as it grows, work goes on."""
        self._arrived: dict[tuple[PolicyVersion, str], int] = {}
        """Most bytes of a version that a host is known to have had, while it fetches."""

    def publish(self, version: PolicyVersion, host: str, num_bytes: int) -> None:
        """Note that a version is on a host, to be fetched from there; maybe on another as well, if it was published
        again."""
        self._trees.setdefault(version, BroadcastTree(host)).arrived(host)
        self._num_bytes[version] = num_bytes

    def within_s(self, version: PolicyVersion) -> float:
        """Seconds that reading, hashing or loading a version may take."""
        return timeout_for(self._call_s, self._num_bytes[version])

    def keep(self, used: Iterable[PolicyVersion]) -> None:
        """Forget where versions are, except these and the newest."""
        for version in set(self._trees) - {*used, max(self._trees, default=None)}:
            del self._trees[version], self._num_bytes[version]
        self._arrived = {key: count for key, count in self._arrived.items() if key[0] in self._trees}

    async def fetch(self, version: PolicyVersion, host: str) -> str:
        """The path of a version on a host, to which it is brought if it is not there. May take as long as bytes arrive:
        each call of the host's parameter server is answered in time, however large the version. Raises ActorLost if
        that server is gone, TransferFailed if nothing comes from those that have the version."""
        tree, num_bytes = self._trees[version], self._num_bytes[version]
        name, begin = f"parameters-{host}", now_s()
        sources = self._sources(tree.join(host))
        slow_s = self.within_s(version)
        try:
            while not (fetched := await self._ensure(name, version, num_bytes, sources)).path:
                self._count(version, host, fetched.num_bytes)
                took_s = now_s() - begin
                if took_s > slow_s:
                    logger.warning(
                        "%s has %d of %d bytes of version %d after %.0f s", name, fetched.num_bytes, num_bytes, version,
                        took_s,
                    )  # fmt: skip
                    slow_s *= 2
        except BaseException:
            tree.failed(host)
            raise
        tree.arrived(host)
        took_s = now_s() - begin
        level = logging.INFO if took_s > SLOW_S else logging.DEBUG
        logger.log(level, "%s has version %d, %d bytes, after %.1f s", name, version, num_bytes, took_s)
        return fetched.path

    def _count(self, version: PolicyVersion, host: str, num_bytes: int) -> None:
        before = self._arrived.get((version, host), 0)
        self._arrived[version, host] = max(before, num_bytes)
        self.bytes_arrived += max(0, num_bytes - before)

    async def _ensure(
        self, name: str, version: PolicyVersion, num_bytes: int, sources: tuple[Source, ...]
    ) -> FetchProgress:
        fetched: FetchProgress = await self._caller.ask(name, "ensure", version, num_bytes, sources)
        return fetched

    def _sources(self, hosts: tuple[str, ...]) -> tuple[Source, ...]:
        """The parameter servers of these hosts, as far as they are there."""
        sources = []
        for host in hosts:
            with contextlib.suppress(ActorLost):
                sources.append(Source(f"parameters-{host}", self._caller.actor(f"parameters-{host}")))
        return tuple(sources)

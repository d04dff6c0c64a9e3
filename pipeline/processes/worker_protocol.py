"""The contract of the worker processes that actors are placed on; each is either there or lost.

Driver, Actors and InstanceLink know no more of a cluster than this module. Two implementations: DaskWorkers
(pipeline/processes/dask_workers.py), and one inside a test's own process whose faults are scripted
(tests/support/in_process.py).

Invariants:
- `placed` holds exactly the actors that were placed and not lost since, by name.
- A rollout instance or a trainer shares its process with nothing but a parameter server that was placed beside it.
- The process of a lost actor is never chosen again while the run lasts, under whatever name.
- A call to a lost actor fails or never returns; it never returns anything but the method's own result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from staleflow.stores.errors import ConfigError, StaleflowError


class NoFreeWorker(ConfigError):
    """No worker for a role has become free within deadlines.start_s."""


class ClusterLost(StaleflowError, ConnectionError):
    """The cluster's scheduler is gone or was started anew, and with it whatever the run had on the workers: only a
    resume goes on. No actor is placed any more."""


@dataclass(frozen=True, slots=True)
class ActorArg:
    """An argument of a call that stands for the actor that has this name when the call is made."""

    name: str


@dataclass(slots=True)
class PlacedActor:
    """An actor, the worker it runs on, and the future that keeps it alive."""

    name: str
    role: str
    worker: str
    address: str
    host: str
    actor: Any
    """Its methods are coroutines; they are called by tasks/actors/actor_calls.py."""
    future: Any


class Workers(Protocol):
    """Worker processes that actors are placed on."""

    @property
    def placed(self) -> Mapping[str, PlacedActor]:
        """The actors that are there now, by name."""
        ...

    async def place(self, name: str, role: str, cls: type[Any], *args: Any) -> PlacedActor:
        """Create the actor `cls(*args)` on a worker for `role`; waits for one to become free, up to deadlines.start_s.
        Raises NoFreeWorker if there is none by then, ActorLost if the actor does not come up, ClusterLost."""
        ...

    async def place_beside(
        self, neighbour: PlacedActor, name: str, role: str, cls: type[Any], *args: Any
    ) -> PlacedActor:
        """Create a light actor in the process of another."""
        ...

    def forget(self, name: str) -> None:
        """Give up a light actor alone: its process, and what runs there, are left as they are."""
        ...

    async def give_back(self, name: str) -> None:
        """Give up a reward worker or environment host that has closed, and let other runs have its process."""
        ...

    async def has_spare_worker(self, role: str) -> bool:
        """Whether a worker could take `role` at once that nobody else waits for."""
        ...

    async def retire(self, name: str) -> None:
        """Give up an actor that has closed, with whatever was placed beside it, and let its process leave the cluster
        for good. Never raises."""
        ...

    def lose(self, name: str) -> None:
        """Give up an actor that is gone, with whatever was placed beside it. Its process is not used again."""
        ...

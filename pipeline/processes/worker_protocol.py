"""The contract of worker processes on which actors are placed. Each process is either present or lost.

A run's driver places actors on a cluster only through this module. Two implementations: DaskWorkers
(pipeline/processes/dask_workers.py), and one inside a test's own process whose faults are scripted
(tests/support/in_process.py).

Invariants:
- `placed` holds exactly the actors that were placed and not marked lost, released or retired since, by name.
- A rollout instance, trainer or teacher shares its process with nothing but a parameter server placed beside it.
- The process of a lost actor is never chosen again while the run lasts, under whatever name.
- A call to a lost actor fails or never returns; it never returns anything but the method's own result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from staleflow.stores.errors import ConfigError, StaleflowError


class NoFreeWorker(ConfigError):
    """No worker for a role became free within deadlines.start_s."""


class ClusterLost(StaleflowError, ConnectionError):
    """The cluster's scheduler is gone or was restarted, and all actors of the run with it. No actor can be placed any
    more; the run can only be resumed."""


@dataclass(frozen=True, slots=True)
class ActorArg:
    """A placeholder for an actor in the arguments of a call, replaced at the time of the call by the actor of this
    name."""

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
        """The placed actors, by name."""
        ...

    async def place(
        self,
        name: str,
        role: str,
        cls: type[Any],
        *args: Any,
        before_creation: Callable[[], Awaitable[None]] | None = None,
    ) -> PlacedActor:
        """Create the actor `cls(*args)` on a worker for `role`.

        Args:
            before_creation: Awaited, without a deadline, once a worker is reserved for the actor.

        Raises:
            NoFreeWorker: No worker became free within deadlines.start_s.
            ActorLost: The actor did not start, within deadlines.start_s once it had a worker.
            ClusterLost: The scheduler is gone.
        """
        ...

    async def place_beside(self, actor: PlacedActor, name: str, cls: type[Any], *args: Any) -> PlacedActor:
        """Create a parameter server in the process of another actor."""
        ...

    def release_actor(self, name: str) -> None:
        """Release a light actor. Its process and other actors in it are not affected."""
        ...

    async def return_light_worker(self, name: str) -> None:
        """Release a closed reward worker or environment host, and let other runs have its process."""
        ...

    async def has_spare_worker(self) -> bool:
        """Whether there is a free worker for a rollout instance that no other run waits for."""
        ...

    async def retire(self, name: str) -> None:
        """Release a closed actor and the actors beside it, and let its process leave the cluster for good. Never
        raises."""
        ...

    def mark_lost(self, name: str) -> None:
        """Remove a lost actor, and the parameter servers beside it. No actor is placed in its process again. If the
        driver or another actor runs there, it is left alone, because each of them may still work until a call to it
        fails."""
        ...

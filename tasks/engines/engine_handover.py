"""Engines of this process, which outlive their actors and are taken over by later ones.

A driver that is lost takes its actors with it, as Dask drops what no client wants. The engine of a rollout instance,
with its model in memory, stays: the instance that the driver's successor places in this process takes it over.

Invariants: an engine is taken over only by the same run, with the same settings but for the seed, once nobody can
use it any more, since the actor that had it does not exist. One that the same run cannot take over is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
import logging
import pickle
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.engines.base import Engine
from staleflow.tasks.engines.engine_settings import EngineSettings

logger = logging.getLogger(__name__)

ACTOR_EXIT_S = 10.0
"""Seconds that an actor of the driver before may still exist: its last call has to end, which nobody waits for."""
SETTLE_S = 1.5
"""The same before the scheduler decides whether it keeps a worker."""
POLL_S = 0.2
"""Seconds between two checks whether an actor still exists."""


@dataclass(frozen=True, slots=True)
class _RegisteredEngine:
    """An engine and the actor that uses it."""

    run: str
    settings: bytes
    engine: Engine
    user: weakref.ref[object]


_registered: list[_RegisteredEngine] = []
_lock = threading.Lock()
"""Guards _registered; locked while an engine is taken over or closed."""


def register(run: str, settings: EngineSettings, engine: Engine, user: object) -> None:
    """Register an engine so that it stays in this process when `user`, its actor, is gone. run: the run's folder."""
    with _lock:
        _registered.append(_RegisteredEngine(run, _digest(settings), engine, weakref.ref(user)))


def unregister(engine: Engine) -> None:
    """Unregister an engine that its actor has closed."""
    with _lock:
        _registered[:] = [entry for entry in _registered if entry.engine is not engine]


async def require_orphan() -> None:
    """Raise LookupError unless this process has an engine whose actor is gone, or is about to go when its last call
    ends. The scheduler calls this and reads nothing but the error."""
    until = time.monotonic() + SETTLE_S
    while any(entry.user() is not None for entry in _registered) and time.monotonic() < until:
        gc.collect()
        await asyncio.sleep(POLL_S)
    if not _registered or any(entry.user() is not None for entry in _registered):
        raise LookupError("no engine is held here that nobody uses")


def close_orphans() -> None:
    """Close the engines whose actors are gone, because another role needs their memory."""
    with _lock:
        for orphan in [orphan for orphan in _registered if orphan.user() is None]:
            _registered.remove(orphan)
            orphan.engine.close()


def take_over(run: str, settings: EngineSettings, instance: InstanceId) -> Engine | None:
    """Return the engine of a lost actor of this run, reset for `instance`; None if there is none. Waits for an actor
    that is about to go. Closes all other engines without an actor. run: empty to take over none."""
    until = time.monotonic() + ACTOR_EXIT_S
    while _in_use(run) and time.monotonic() < until:
        gc.collect()  # what a failed call has raised may refer to the actor in circles
        time.sleep(POLL_S)
    engine: Engine | None = None
    with _lock:
        for orphan in [orphan for orphan in _registered if orphan.user() is None]:
            _registered.remove(orphan)
            if engine is None and (orphan.run, orphan.settings) == (run, _digest(settings)):
                try:
                    orphan.engine.reset(instance)
                except ActorLost as lost:
                    logger.warning("an engine that was held has died: %s", lost)
                else:
                    engine = orphan.engine
                    continue
            orphan.engine.close()
    return engine


def _in_use(run: str) -> bool:
    return any(entry.run == run and entry.user() is not None for entry in _registered)


def _digest(settings: Any) -> bytes:
    """Of all settings but the seed, which an engine that goes on does not need."""
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name != "seed"}
    return hashlib.sha256(pickle.dumps((type(settings), fields))).digest()

"""Engines of this process, which survive their actors and are taken over by later ones.

When a driver is lost, Dask releases its actors. The engine of a rollout instance, with its model in memory, stays: a
new instance that the next driver places in this process takes it over.

Invariants: an engine is taken over only by the same run, with the same settings except for the seed, and only when the
actor that used it no longer exists. Other engines without an actor are closed.
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
"""Maximum number of seconds that an actor of the previous driver may still exist, until its last call ends."""
DRIVER_EXIT_S = 1.5
"""The same limit when the scheduler asks whether to keep a worker."""
POLL_S = 0.2
"""Seconds between two checks whether an actor still exists."""


@dataclass(frozen=True, slots=True)
class _RegisteredEngine:
    """An engine and the actor that uses it."""

    run_folder: str
    settings_digest: bytes
    engine: Engine
    actor: weakref.ref[object]


_registered_engines: list[_RegisteredEngine] = []
_lock = threading.Lock()
"""Guards _registered_engines; locked while an engine is taken over or closed."""


def register(run_folder: str, settings: EngineSettings, engine: Engine, actor: object) -> None:
    """Register an engine so that it stays in this process when `actor`, its actor, is gone. run_folder: the run's
    folder."""
    with _lock:
        _registered_engines.append(_RegisteredEngine(run_folder, _digest(settings), engine, weakref.ref(actor)))


def unregister(engine: Engine) -> None:
    """Unregister an engine that its actor has closed."""
    with _lock:
        _registered_engines[:] = [entry for entry in _registered_engines if entry.engine is not engine]


async def require_orphan() -> None:
    """Raise LookupError unless this process has an engine whose actor is gone, or is about to go when its last call
    ends. The scheduler calls this and reads nothing but the error."""
    deadline = time.monotonic() + DRIVER_EXIT_S
    while any(entry.actor() is not None for entry in _registered_engines) and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(POLL_S)
    if not _registered_engines or any(entry.actor() is not None for entry in _registered_engines):
        raise LookupError("this process has no engine without an actor")


def close_orphans() -> None:
    """Close the engines whose actors are gone, because another role needs their memory."""
    with _lock:
        for orphan in [orphan for orphan in _registered_engines if orphan.actor() is None]:
            _registered_engines.remove(orphan)
            orphan.engine.close()


def take_over(run_folder: str, settings: EngineSettings, instance: InstanceId) -> Engine | None:
    """Return the engine of a lost actor of this run, reset for `instance`; None if there is none. Waits for an actor
    that is about to go. Closes all other engines without an actor. run_folder: empty to take over none."""
    deadline = time.monotonic() + ACTOR_EXIT_S
    while run_folder and _has_actor(run_folder) and time.monotonic() < deadline:
        gc.collect()  # the traceback of a failed call may keep the actor alive by a reference cycle
        time.sleep(POLL_S)
    engine: Engine | None = None
    with _lock:
        for orphan in [orphan for orphan in _registered_engines if orphan.actor() is None]:
            _registered_engines.remove(orphan)
            if (
                run_folder
                and engine is None
                and (orphan.run_folder, orphan.settings_digest) == (run_folder, _digest(settings))
            ):
                try:
                    orphan.engine.reset(instance)
                except ActorLost as error:
                    logger.warning("an engine without an actor has failed: %s", error)
                else:
                    engine = orphan.engine
                    continue
            orphan.engine.close()
    return engine


def _has_actor(run_folder: str) -> bool:
    return any(entry.run_folder == run_folder and entry.actor() is not None for entry in _registered_engines)


def _digest(settings: Any) -> bytes:
    """Hash all settings except the seed, which an engine that continues does not need."""
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name != "seed"}
    return hashlib.sha256(pickle.dumps((type(settings), fields))).digest()

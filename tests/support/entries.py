"""Registry entries for tests, with knobs that only some of them have."""

from __future__ import annotations

from typing import Any, TypeVar

from staleflow.tasks.settings.knobs import keys_of
from staleflow.tasks.settings.registry import Registry, RegistryEntry

T = TypeVar("T", bound=RegistryEntry)


def entry(registry: Registry[T], name: str, **knobs: Any) -> T:
    """Return an entry with those of the knobs that it has."""
    known = keys_of(registry.find(name))
    return registry.find(name)(**{knob: value for knob, value in knobs.items() if knob in known})


def table(registry: Registry[Any], name: str, **knobs: Any) -> dict[str, Any]:
    """Return the job file table that selects an entry, with those of the knobs that it has."""
    known = keys_of(registry.find(name))
    return {"name": name, **{knob: value for knob, value in knobs.items() if knob in known}}

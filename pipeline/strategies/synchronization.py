"""When an instance pulls new weights. A pull interrupts what it runs; not pulling makes what it starts staler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingInstance:
    """An instance that serves an older version than the published one."""

    lag: int
    """Published version minus the one it serves, >= 1."""
    num_running: int
    max_running: int
    can_be_fed: bool
    """Whether queued work could still be routed to it at the version it serves."""


class Synchronization(Protocol):
    def should_pull(self, instance: LaggingInstance) -> bool: ...


class Greedy:
    """As soon as it lags."""

    def should_pull(self, instance: LaggingInstance) -> bool:
        return True


class Status:
    """When it can no longer be fed at its version and its load has drained below a share of its capacity."""

    def __init__(self, load_threshold: float) -> None:
        self._load_threshold = load_threshold

    def should_pull(self, instance: LaggingInstance) -> bool:
        return not instance.can_be_fed and instance.num_running <= self._load_threshold * instance.max_running


SYNCHRONIZATION_NAMES = ("greedy", "status")


def make_synchronization(name: str, load_threshold: float) -> Synchronization:
    """The synchronization rule called `name`."""
    match name:
        case "greedy":
            return Greedy()
        case "status":
            return Status(load_threshold)
        case _:
            raise ValueError(f"no synchronization rule {name!r}; there are {', '.join(SYNCHRONIZATION_NAMES)}")

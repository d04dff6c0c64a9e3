"""An agent that is loaded, whoever wrote it: what runs it, and what it is started with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from stores.errors import ConfigError
from tasks.episodes.playing import PlayedTask

Told = tuple[str, str, PlayedTask]
"""(base URL, key, task): what an agent is started with."""
Run = Callable[[Told], Coroutine[Any, Any, Any]]
"""Runs an agent to its end, and returns its reward."""


def _nothing() -> None:
    """There is nothing to load."""


@dataclass(frozen=True, slots=True)
class LoadedAgent:
    """An agent that can be run. run: to its end. blocking: it needs a process of its own. prepare: loads what its
    episodes share, before processes are forked for them; raises ConfigError."""

    run: Run
    blocking: bool
    options: Mapping[str, Any]
    prepare: Callable[[], None] = _nothing


def check_package(package: str, where: str) -> None:
    """Raise ConfigError if a package that brings agents is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{where}: needs the package {package}, which is not installed; pip install {package}")

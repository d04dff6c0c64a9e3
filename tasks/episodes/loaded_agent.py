"""A loaded agent: the coroutine that runs it, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import AgentTask

AgentArgs = tuple[str, str, AgentTask]
"""(base URL, key, task): what an agent is started with."""
Run = Callable[[AgentArgs], Coroutine[Any, Any, Any]]
"""Runs an agent to its end, and returns its reward."""


NAMES = {str: "a text", int: "a whole number", dict: "a table"}
"""What types of values are called in a job file."""


def _nothing() -> None:
    """There is nothing to load."""


@dataclass(frozen=True, slots=True)
class LoadedAgent:
    """An agent that can be run.

    Args:
        run: Coroutine function that runs one episode to its end.
        blocking: Whether each episode needs a process of its own.
        prepare: Loads what episodes share, before processes are forked. Raises ConfigError.
    """

    run: Run
    blocking: bool
    options: Mapping[str, Any]
    prepare: Callable[[], None] = _nothing


def check_options(options: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raise ConfigError for an unknown option of an agent, or a value of the wrong type. kinds: the types of each
    option."""
    for option, value in options.items():
        if option not in kinds:
            raise ConfigError(f"{where}: task.options.{option}: unknown; there are {', '.join(kinds)}")
        if not isinstance(value, kinds[option]) or isinstance(value, bool):
            wanted = " or ".join(NAMES[kind] for kind in kinds[option])
            raise ConfigError(f"{where}: task.options.{option} = {value!r} must be {wanted}")

"""A loaded agent: the coroutine that runs it, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import AgentTask

AgentArgs = tuple[str, str, AgentTask]
"""Arguments of an agent: (base URL, API key, task)."""
RunAgent = Callable[[AgentArgs], Coroutine[Any, Any, Any]]
"""Runs an agent to its end, and returns its reward."""


TYPE_NAMES = {str: "a text", int: "a whole number", dict: "a table"}
"""Names of types in error messages about a job file."""


def _load_nothing() -> None:
    """Do nothing: there is nothing to load."""


@dataclass(frozen=True, slots=True)
class LoadedAgent:
    """An agent that can be run.

    Args:
        run: Coroutine function that runs one episode to its end.
        blocking: Whether each episode needs a process of its own.
        options: The job's task.options, without those that are not for the agent.
        prepare: Loads the objects that episodes share, before processes are forked. Raises ConfigError.
    """

    run: RunAgent
    blocking: bool
    options: Mapping[str, Any]
    prepare: Callable[[], None] = _load_nothing


def check_options(options: Mapping[str, Any], option_types: Mapping[str, tuple[type, ...]], label: str) -> None:
    """Raise ConfigError for an unknown option of an agent, or a value of the wrong type. option_types: the types of
    each option."""
    for option, value in options.items():
        if option not in option_types:
            raise ConfigError(f"{label}: task.options.{option}: unknown; there are {', '.join(option_types)}")
        if not isinstance(value, option_types[option]) or isinstance(value, bool):
            expected_types = " or ".join(TYPE_NAMES[type_] for type_ in option_types[option])
            raise ConfigError(f"{label}: task.options.{option} = {value!r} must be {expected_types}")

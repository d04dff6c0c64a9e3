"""Loads environments by their names in a job file."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import CoroutineEnvironment
from staleflow.tasks.environments.episode import Environment
from staleflow.tasks.environments.gym_environments import GymEnvironment
from staleflow.tasks.environments.user_tools import TOOLS_KEY, load_tool, tool_environment
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.dataset_columns import DataUse
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from staleflow.tasks.settings.source_kinds import SourceType, has_turns, kind_of, open_source


class EnvironmentTraits(NamedTuple):
    """Properties of an environment that are known before it is loaded; see docs/environments.md."""

    repeatable: bool
    blocking: bool


def traits_of(source: str, key: str) -> EnvironmentTraits:
    """Return the properties of an environment by its name. Loads user code, but no package. Raises ConfigError."""
    if (kind := kind_of(source)) is not None:
        kind.check_installed(f"{key} = {source!r}")
        return EnvironmentTraits(repeatable=kind.repeatable, blocking=kind.blocking)
    code = user_code.load(source, key)
    is_async = inspect.iscoroutinefunction(getattr(code, "step", code))
    return EnvironmentTraits(
        repeatable=bool(getattr(code, "repeatable", False)), blocking=bool(getattr(code, "blocking", not is_async))
    )


def open_environment(
    source: str,
    options: Mapping[str, Any],
    key: str = "task.source",
    endpoint: EndpointSettings | None = None,
    use: DataUse = DataUse.BOTH,
) -> Environment:
    """Load the environment named `kind:name`, `file.py:NAME` or `module:NAME`. Raises ConfigError. key: key in the job
    file, which may also be that of user tools. endpoint, use: see ForkServerSettings."""
    if key == TOOLS_KEY:
        return tool_environment(load_tool(source))
    label = f"{key} = {source!r}"
    kind, name = kind_of(source), source.partition(":")[2]
    if kind is not None and kind.type is SourceType.AGENT:
        agents = importlib.import_module("staleflow.tasks.episodes.agents")
        agent = kind.open(name, options, label, label=label)
        agent.prepare()
        env: Environment = (
            agents.forked_agent_environment(agent) if endpoint is None else agents.AgentEnvironment(agent, endpoint)
        )
        return env
    if kind is not None:
        rows = (_rows(options, label), use) if kind.takes_rows else ()
        return GymEnvironment(kind.open(name, options, label, *rows, label=label))
    code = user_code.load(source, key)
    if not has_turns(code):
        raise ConfigError(
            f"{label}: an environment is a class with reset and step, or an async def play(session, task)"
        )
    if not isinstance(code, type):
        if not _accepts(code, "session", "task"):
            raise ConfigError(f"{label}: must take (session, task)")
        return CoroutineEnvironment(code, dict(options))
    if not _accepts(code, **options):
        raise ConfigError(f"{label}: {code.__name__}() does not take task.options = {dict(options)}")
    return GymEnvironment(functools.partial(code, **options))


def _rows(options: Mapping[str, Any], label: str) -> Any:
    """Open the data set of the option `rows`. Raises ConfigError."""
    rows_option = options.get("rows")
    if not isinstance(rows_option, str):
        raise ConfigError(f"{label}: task.options must have rows, its data set, such as jsonl:FILE")
    return open_source(SourceType.ROWS, rows_option, {}, f"{label}: task.options.rows = {rows_option!r}")


def _accepts(function: Any, /, *args: Any, **kwargs: Any) -> bool:
    """Return True if a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in function may have no signature
        return True
    return True

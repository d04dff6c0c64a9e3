"""Environments by the names that a job file gives them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import PlayedEnvironment
from staleflow.tasks.environments.episode import Environment
from staleflow.tasks.environments.gym_environments import SteppedEnvironment
from staleflow.tasks.environments.user_tools import TOOLS_KEY, CalledTool, load_tool
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

PACKAGED = ("textarena", "gymnasium", "skyrl_gym")
"""Kinds of environments that a package brings."""
AGENTS = ("agent", "verifiers", "openenv")
"""Kinds of agents, which ask for their turns over HTTP; see tasks/episodes/agents.py."""
SINGLE_TURN = ("reasoning_gym", "jsonl", "parquet", "datasets")
"""Kinds of sources whose tasks are a prompt and a verifier."""


def is_environment(source: str, key: str) -> bool:
    """Whether a task source is an environment of many turns. Loads a user's file. Raises ConfigError."""
    kind, _, name = source.partition(":")
    if kind in (*PACKAGED, *SINGLE_TURN, *AGENTS) or not name:
        return kind in (*PACKAGED, *AGENTS) and bool(name)
    return _plays(user_code.load(source, key))


def is_agent(source: str) -> bool:
    """Whether a task source is an agent that asks for its turns over HTTP."""
    kind, _, name = source.partition(":")
    return kind in AGENTS and bool(name)


class Traits(NamedTuple):
    """What is known of an environment before it is loaded; see Environment."""

    repeatable: bool
    blocking: bool


def traits_of(source: str, key: str) -> Traits:
    """What is known of the environment with that name. Loads a user's file, and no package. Raises ConfigError."""
    kind = source.partition(":")[0]
    if kind in PACKAGED:
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(
                f"{key} = {source!r}: needs the package {kind}; pip install 'staleflow[{kind.replace('_', '-')}]'"
            )
        # A game may search the network, and textarena's draw from Python's own random numbers; the process that each
        # has to itself makes those its own.
        return Traits(repeatable=kind != "skyrl_gym", blocking=True)
    if kind in AGENTS:
        return Traits(repeatable=False, blocking=True)
    found = user_code.load(source, key)
    is_async = inspect.iscoroutinefunction(getattr(found, "step", found))
    return Traits(
        repeatable=bool(getattr(found, "repeatable", False)), blocking=bool(getattr(found, "blocking", not is_async))
    )


def open_environment(
    source: str, options: Mapping[str, Any], key: str = "task.source", endpoint: EndpointSettings | None = None
) -> Environment:
    """The environment named `kind:name`, `file.py:NAME` or `module:NAME`. key: of the job file, which may also name a
    tool. endpoint: see ForkSettings. Raises ConfigError."""
    if key == TOOLS_KEY:
        return CalledTool(load_tool(source))
    where = f"{key} = {source!r}"
    kind, _, name = source.partition(":")
    if kind in PACKAGED:
        traits_of(source, key)  # which tells whether the package is there
        games = importlib.import_module(_GAMES[kind])
        return SteppedEnvironment(games.open_game(name, options, where))
    if kind in AGENTS:
        agents = importlib.import_module("staleflow.tasks.episodes.agents")
        agent = agents.load_agent(source, options, where)
        agent.prepare()
        runs: Environment = agents.AgentRuns(agent) if endpoint is None else agents.AgentEnvironment(agent, endpoint)
        return runs
    found = user_code.load(source, key)
    if not _plays(found):
        raise ConfigError(
            f"{where}: an environment is a class with reset and step, or an async def play(session, task)"
        )
    if not isinstance(found, type):
        if not _accepts(found, "session", "task"):
            raise ConfigError(f"{where}: must take (session, task)")
        return PlayedEnvironment(found, dict(options))
    if not _accepts(found, **options):
        raise ConfigError(f"{where}: {found.__name__}() does not take task.options = {dict(options)}")
    return SteppedEnvironment(functools.partial(found, **options))


_GAMES = {
    "textarena": "staleflow.tasks.episodes.textarena_games",
    "gymnasium": "staleflow.tasks.episodes.gymnasium_games",
    "skyrl_gym": "staleflow.tasks.episodes.skyrl_games",
}
"""The module of each package's environments, loaded where they run."""


def _plays(found: Any) -> bool:
    """Whether a user's class or function is an environment of many turns."""
    if isinstance(found, type):
        return callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))
    return inspect.iscoroutinefunction(found)


def _accepts(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it tells nothing about its parameters
        return True
    return True

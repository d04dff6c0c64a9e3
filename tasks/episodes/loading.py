"""Environments by the names that a job file gives them."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stores.errors import ConfigError
from tasks import user_code
from tasks.episodes.episode import Environment
from tasks.episodes.playing import PlayedEnvironment
from tasks.episodes.stepping import SteppedEnvironment

PACKAGED = ("textarena", "gymnasium", "skyrl_gym")
"""Kinds of environments that a package brings."""
SINGLE_TURN = ("reasoning_gym", "jsonl", "parquet", "datasets")
"""Kinds of sources whose tasks are a prompt and a verifier."""


def is_environment(source: str, key: str) -> bool:
    """Whether a task source is an environment of many turns. Loads a user's file. Raises ConfigError."""
    kind, _, name = source.partition(":")
    if kind in PACKAGED or kind in SINGLE_TURN or not name:
        return kind in PACKAGED and bool(name)
    return _plays(user_code.load(source, key))


def open_environment(source: str, options: Mapping[str, Any], key: str = "task.source") -> Environment:
    """The environment named `kind:name`, `file.py:NAME` or `module:NAME`. key: of the job file. Raises ConfigError."""
    where = f"{key} = {source!r}"
    kind, _, name = source.partition(":")
    if kind in PACKAGED:
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(f"{where}: needs the package {kind}; pip install 'staleflow[{kind.replace('_', '-')}]'")
        make = _packaged(kind)(name, options, where)
        return SteppedEnvironment(make, where, repeatable=True, blocking=True)
    found = user_code.load(source, key)
    if not _plays(found):
        raise ConfigError(
            f"{where}: an environment is a class with reset and step, or an async def play(session, task)"
        )
    repeatable = bool(getattr(found, "repeatable", False))
    if not isinstance(found, type):
        if not _accepts(found, "session", "task"):
            raise ConfigError(f"{where}: must take (session, task)")
        blocking = bool(getattr(found, "blocking", False))
        return PlayedEnvironment(found, dict(options), where, repeatable=repeatable, blocking=blocking)
    blocking = bool(getattr(found, "blocking", not inspect.iscoroutinefunction(getattr(found, "step", None))))
    if not _accepts(found, **options):
        raise ConfigError(f"{where}: {found.__name__}() does not take task.options = {dict(options)}")
    make = functools.partial(found, **options)
    return SteppedEnvironment(make, where, repeatable=repeatable, blocking=blocking)


def _packaged(kind: str) -> Callable[[str, Mapping[str, Any], str], Callable[[], Any]]:
    raise ConfigError(f"{kind}: is not there yet")


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

"""Loads user code named path/to/file.py:NAME or module:NAME in a job."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
import zlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from staleflow.stores.errors import ConfigError, type_and_message

MODULE_PREFIX = "staleflow_user_"
"""Prefix of the module names of user code."""
PICKLED_FILE = "<dynamic-code>"
"""File name that cloudpickle assigns to code pickled by value."""


def load(reference: str, key: str, kind: str = "function") -> Any:
    """Load a user's function or class.

    Args:
        reference: file.py:NAME or module:NAME.
        key: Its key in the job file, for messages.
        kind: "function" or "class". A class must be one; a function may be any callable.

    Raises:
        ConfigError: It cannot be loaded.
    """
    location, _, name = reference.rpartition(":")
    if not location:
        raise ConfigError(f"{key} = {reference!r}: expected file.py:NAME or module:NAME")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{key} = {reference!r}: cannot be loaded: {error_text(error)}") from error
    except (Exception, SystemExit) as error:  # user code
        raise ConfigError(f"{key} = {reference!r}: cannot be loaded: {type_and_message(error)}") from error
    loaded = getattr(module, name, None)
    if not callable(loaded) or (kind == "class" and not isinstance(loaded, type)):
        defined = [n for n, value in vars(module).items() if _is_defined_in(value, module)]
        matches = difflib.get_close_matches(name, defined, n=1, cutoff=0.3)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise ConfigError(f"{key} = {reference!r}: {location} has no {kind} {name}{hint}")
    return loaded


def _is_defined_in(value: object, module: ModuleType) -> bool:
    """Whether a function or class is defined in a module."""
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def error_text(error: BaseException) -> str:
    """Return the message of an error in user code, on one line."""
    return " ".join(str(error).split())


def user_code_line(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback, as file.py:LINE, or function:LINE for a function
    pickled by value; empty if there is none."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == PICKLED_FILE:
            lines.append(f"{frame.f_code.co_name}:{line}")
        elif str(frame.f_globals.get("__name__", "")).startswith(MODULE_PREFIX):
            lines.append(f"{Path(frame.f_code.co_filename).name}:{line}")
    return lines[-1] if lines else ""


def _import_file(path: Path) -> ModuleType:
    """Import a module by path. The current folder is never searched, so the module cannot shadow another one. Files
    with the same name in different folders become different modules."""
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    path = path.resolve()
    return _execute_file(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _execute_file(path: Path, mtime_ns: int) -> ModuleType:
    """Execute a file as a module, once per process until the file changes, so that its classes keep their identity.
    Bytecode is neither written, because a run's folder holds only sources, nor read, because its check misses a second
    edit within a second."""
    name = f"{MODULE_PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.modules[name] = module  # dataclasses look up their module here
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module

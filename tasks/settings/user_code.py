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

from staleflow.stores.errors import ConfigError, with_type

MODULES = "staleflow_user_"
"""How the names of modules begin that are user code."""
PICKLED = "<dynamic-code>"
"""What cloudpickle calls the file of code that it pickled by value."""


def load(reference: str, key: str, kind: str = "function") -> Any:
    """Load a user's function or class.

    Args:
        reference: file.py:NAME or module:NAME.
        key: Its key in the job file, for messages.
        kind: What is expected, for messages.

    Raises:
        ConfigError: It cannot be loaded.
    """
    where, _, name = reference.rpartition(":")
    if not where:
        raise ConfigError(f"{key} = {reference!r}: expected file.py:NAME or module:NAME")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{key} = {reference!r}: cannot be loaded: {error_text(error)}") from error
    except (Exception, SystemExit) as error:  # user code
        raise ConfigError(f"{key} = {reference!r}: cannot be loaded: {with_type(error)}") from error
    loaded = getattr(module, name, None)
    if not callable(loaded) or (kind == "class" and not isinstance(loaded, type)):
        near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if _own(v, module)], n=1, cutoff=0.3)
        raise ConfigError(
            f"{key} = {reference!r}: {where} has no {kind} {name}{f'; did you mean {near[0]}?' if near else ''}"
        )
    return loaded


def _own(value: object, module: ModuleType) -> bool:
    """Whether a function or class is defined in a module."""
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def error_text(error: BaseException) -> str:
    """Return the message of an error in user code, on one line."""
    return " ".join(str(error).split())


def line_of(error: BaseException) -> str:
    """The innermost line of user code in an error's traceback, as file.py:LINE, or function:LINE for a function pickled
    by value; empty if there is none."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == PICKLED:
            lines.append(f"{frame.f_code.co_name}:{line}")
        elif str(frame.f_globals.get("__name__", "")).startswith(MODULES):
            lines.append(f"{Path(frame.f_code.co_filename).name}:{line}")
    return lines[-1] if lines else ""


def _of_file(path: Path) -> ModuleType:
    """Import a module by path. The current folder is never searched, so its name cannot shadow one of ours. Files of
    one name in several folders become different modules."""
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    path = path.resolve()
    return _loaded(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _loaded(path: Path, mtime_ns: int) -> ModuleType:
    """Executed once per process until the file changes, so that its classes keep their identity. No bytecode is read or
    written: a run's folder holds sources only, and a file edited twice within a second is not taken for the older."""
    name = f"{MODULES}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module

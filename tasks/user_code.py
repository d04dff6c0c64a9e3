"""Loads user code that a job names: path/to/file.py:NAME, or module:NAME."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from stores.errors import ConfigError


def load(named: str, key: str) -> Any:
    """Load the function or class called `named`. key: its key in the job file, for messages. Raises ConfigError."""
    where, _, name = named.rpartition(":")
    if not where:
        raise ConfigError(f"{key} = {named!r}: expected file.py:NAME or module:NAME")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{key} = {named!r}: cannot be loaded: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{key} = {named!r}: {where} has no function {name}")
    return found


def _load_file(path: Path) -> Any:
    """Import a module by path. The current folder is never searched, so its name cannot shadow one of ours. Files of
    one name in several folders become different modules."""
    if not path.is_file():
        raise OSError(f"{path}: no such file")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"staleflow_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

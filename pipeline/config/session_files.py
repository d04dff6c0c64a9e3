"""The temporary folder of this process, for code and rows that were given as Python objects. A run keeps copies of what
its job names there, because the folder ends with the process."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path


def new_folder() -> Path:
    """An empty folder below that of this process. Raises OSError."""
    return Path(tempfile.mkdtemp(dir=_session()))


def is_temporary(path: Path) -> bool:
    """Whether a file ends with this process."""
    return _session.cache_info().currsize > 0 and path.is_relative_to(_session())


@functools.cache
def _session() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name).resolve()

"""A temporary folder of this process for code and rows passed as Python objects. A run copies the files that its job
names, since the folder is deleted with the process."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path


def new_folder() -> Path:
    """Create an empty folder in the temporary folder of this process. Raises OSError."""
    return Path(tempfile.mkdtemp(dir=_session()))


def is_temporary(path: Path) -> bool:
    """Whether a file is deleted with this process."""
    return _session.cache_info().currsize > 0 and path.is_relative_to(_session())


@functools.cache
def _session() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name).resolve()

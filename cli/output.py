"""Where a command will write: found out before it works for minutes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stores.errors import ConfigError


def claim_folder(folder: Path, option: str) -> None:
    """Make the folder, and see whether a file can be written there. option: that names it, for the message."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; choose another place with {option}"
        ) from error

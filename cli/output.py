"""Checking a command's output folder before it works for minutes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from staleflow.stores.errors import ConfigError


def claim_folder(folder: Path, option: str) -> None:
    """Create the folder and check that it is writable. option: names it, for messages. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; choose another folder with {option}"
        ) from error

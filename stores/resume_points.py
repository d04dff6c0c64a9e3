"""A run's resume points: the trainer's full state at a version. One file per version, the latest few kept.

A file becomes visible by rename, so a process that resumes sees all of it or nothing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from stores.errors import StoreError
from stores.trajectory import PolicyVersion

KEPT = 3
"""Resume points kept. The trainer may be two steps ahead of the last commit: one being committed, one waiting."""


class ResumePoints:
    """The resume points of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, version: PolicyVersion) -> Path:
        return self.folder / f"v{version:08d}.pt"

    def versions(self) -> list[PolicyVersion]:
        """The versions that have a resume point, oldest first."""
        return sorted(PolicyVersion(int(p.stem[1:])) for p in self.folder.glob("v*.pt"))

    def whole(self) -> list[PolicyVersion]:
        """The versions whose file is complete: a torch file is a zip archive, and the zip directory comes last."""
        return [version for version in self.versions() if zipfile.is_zipfile(self.path(version))]

    def write(self, version: PolicyVersion, write: Callable[[Path], None]) -> None:
        """Have `write` create the file of `version`, then remove the oldest beyond `KEPT`. Raises StoreError."""
        part = self.folder / f".v{version:08d}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(part)
            part.rename(self.path(version))
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            part.unlink(missing_ok=True)
            raise StoreError(
                f"{self.path(version)}: the resume point cannot be written: {error}; free space, move runs_dir or set "
                "training.resume_every"
            ) from error
        for old in self.versions()[:-KEPT]:
            self.path(old).unlink(missing_ok=True)

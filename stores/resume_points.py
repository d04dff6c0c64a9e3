"""A run's resume points: all that its trainer needs to go on from a version. One file a version, the latest few kept.

Whoever resumes sees all of a file or nothing (stores/files.py).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from stores.files import replace_file
from stores.trajectory import PolicyVersion

KEPT = 3
"""The trainer may be ahead of the last commit by the step whose commit is under way, and one more that waits for it."""


class ResumePoints:
    """The files of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, version: PolicyVersion) -> Path:
        return self.folder / f"v{version:08d}.pt"

    def versions(self) -> list[PolicyVersion]:
        """What can be resumed from, oldest first."""
        return sorted(PolicyVersion(int(p.stem[1:])) for p in self.folder.glob("v*.pt"))

    def whole(self) -> list[PolicyVersion]:
        """Those whose file has its end: a torch file is a zip archive, whose directory comes last. A few bytes are
        read of each."""
        return [version for version in self.versions() if zipfile.is_zipfile(self.path(version))]

    def write(self, version: PolicyVersion, write: Callable[[Path], None]) -> None:
        """Have `write` fill a file for `version`; the oldest beyond those kept are removed. Raises StoreError."""
        remedy = "free space, move runs_dir or set training.resume_every"
        # torch.save raises RuntimeError on a full disk.
        replace_file(self.path(version), write, remedy, failures=(RuntimeError,))
        for old in self.versions()[:-KEPT]:
            self.path(old).unlink(missing_ok=True)

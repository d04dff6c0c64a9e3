"""A run's resume points: the trainer's full state at a version. One file per version, the latest few kept.

A file becomes visible by rename (stores/files.py), so a process that resumes sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from stores.errors import StoreError
from stores.files import replace_file
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

    def remove_after(self, version: PolicyVersion) -> None:
        """Remove the points of later versions. A run that goes on from `version` makes these anew, with other weights:
        what is left of the old ones would be taken for them if it is killed before it has written its own."""
        for later in self.versions():
            if later > version:
                self.path(later).unlink(missing_ok=True)

    def write(self, version: PolicyVersion, write: Callable[[Path], None]) -> None:
        """Have `write` create the file of `version`, then remove the oldest beyond `KEPT`. Raises StoreError."""
        remedy = "free space, move runs_dir or set training.resume_every"
        # torch.save raises RuntimeError on a full disk.
        replace_file(self.path(version), write, remedy, failures=(RuntimeError,))
        for old in self.versions()[:-KEPT]:
            self.path(old).unlink(missing_ok=True)


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """Raise what loading a resume point with torch or numpy raises as a StoreError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreError(f"{path}: no resume point of this job: {what}; remove it to use an older one") from error

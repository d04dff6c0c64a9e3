"""A run's resume points: the trainer's full state at a version. One per version, the latest few kept.

A trainer of one process writes a file; one of several a folder, into which each process writes its shards. Either
becomes visible by rename (stores/files.py), so a process that resumes sees all of it or nothing, and either can be gone
on from by any number of processes.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from stores.errors import StoreError
from stores.files import remove, replacing, replacing_folder
from stores.trajectory import PolicyVersion

KEPT = 3
"""Resume points kept. The trainer may be two steps ahead of the last commit: one being committed, one waiting."""


class ResumePoints:
    """The resume points of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, version: PolicyVersion, *, sharded: bool | None = None) -> Path:
        """The file or folder of a version. sharded: which of them; by default the one that is there."""
        file, folder = self.folder / f"v{version:08d}.pt", self.folder / f"v{version:08d}.shards"
        return folder if sharded or (sharded is None and folder.exists()) else file

    def versions(self) -> list[PolicyVersion]:
        """The versions that have a resume point, oldest first."""
        found = (*self.folder.glob("v*.pt"), *self.folder.glob("v*.shards"))
        return sorted({PolicyVersion(int(path.stem[1:])) for path in found})

    def whole(self) -> list[PolicyVersion]:
        """The versions whose resume point is complete: a folder is if it is there; a torch file is a zip archive, and
        the zip directory comes last."""
        found = ((version, self.path(version)) for version in self.versions())
        return [version for version, path in found if path.is_dir() or zipfile.is_zipfile(path)]

    def remove_after(self, version: PolicyVersion) -> None:
        """Remove the points of later versions. A run that goes on from `version` makes these anew, with other weights:
        what is left of the old ones would be taken for them if it is killed before it has written its own."""
        for later in self.versions():
            if later > version:
                self._remove(later)

    def write(self, version: PolicyVersion, write: Callable[[Path], None], *, sharded: bool = False) -> None:
        """Have `write` create the file of `version`, or fill its folder; then remove the oldest beyond `KEPT`. Raises
        StoreError."""
        with self.writing(version, sharded=sharded) as part:
            write(part)

    @contextlib.contextmanager
    def writing(self, version: PolicyVersion, *, sharded: bool = False) -> Iterator[Path]:
        """`write` for a point that is written bit by bit: the temporary path of its file or folder. It is there, whole,
        when the block has ended well. Raises StoreError."""
        remedy = "free space, move runs_dir or set training.resume_every"
        path = self.path(version, sharded=sharded)
        # torch.save raises RuntimeError on a full disk.
        replacement = replacing_folder if sharded else replacing
        with replacement(path, remedy, failures=(RuntimeError,)) as part:
            yield part
        remove(self.path(version, sharded=not sharded))  # of another number of processes; what is there is never both
        for old in self.versions()[:-KEPT]:
            self._remove(old)

    def _remove(self, version: PolicyVersion) -> None:
        for sharded in (False, True):
            remove(self.path(version, sharded=sharded))


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """Raise what loading a resume point with torch or numpy raises as a StoreError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreError(f"{path}: no resume point of this job: {what}; remove it to use an older one") from error
